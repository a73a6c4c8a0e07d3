"""What a training run is: one frozen dataclass per section of its TOML file, with the paper's values as defaults."""

import math
import os
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from merope.adapters.branch_config import CameraBranchConfig
from merope.datasets.data_kind import Data
from merope.datasets.kinds import DATA_KINDS
from merope.datasets.world_data import WorldData
from merope.errors import invalid

RESUMABLE = frozenset({"run", "parallel"})
"""Sections that may differ when a run goes on: lengths, intervals and the machine, but not what is learnt."""


@dataclass(frozen=True)
class RunSection:
    """How long, how often, and where to. batch_size counts the clips of one step on all ranks together."""

    out: Path
    steps: int = 20_000
    batch_size: int = 64
    micro_batch: int = 1  # clips of one forward pass on one rank; gradients of the others are accumulated
    seed: int = 0
    log_every: int = 10
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    validate_every: int = 500
    validation_clips: int = 32
    sample_every: int = 0  # 0: no sample videos
    sample_steps: int = 30  # denoising steps of a sample video
    export_precision: Literal["bf16", "fp32"] = "fp32"  # of the weights in the folder `trained`

    def __post_init__(self) -> None:
        positive = ("steps", "batch_size", "micro_batch", "log_every", "checkpoint_every", "keep_checkpoints")
        for name in (*positive, "sample_steps"):
            _at_least(f"run.{name}", getattr(self, name), 1)
        for name in ("seed", "validate_every", "validation_clips", "sample_every"):
            _at_least(f"run.{name}", getattr(self, name), 0)
        if self.batch_size % self.micro_batch:
            expected = f"a divisor of run.batch_size = {self.batch_size}"
            raise invalid("run.micro_batch", expected, self.micro_batch, "use a smaller one")


@dataclass(frozen=True)
class ModelSection:
    """The transformer: a pretrained folder or hub id, or a WanTransformer3DModel from scratch.

    A model from scratch is trained on pixels in [−1, 1], or on the latents of the VAE that it is given.
    """

    pretrained: str | None = None
    architecture: dict[str, Any] | None = None  # arguments of WanTransformer3DModel; those of `pretrained`, if given
    vae: Path | None = None  # folder of a trained VAE, for a model from scratch
    pretrained_branch: Path | None = None  # a saved branch to go on from; None: a fresh one, which adds nothing
    trainable: Literal["branch", "all"] = "branch"
    precision: Literal["bf16", "fp32"] = "bf16"  # of the arithmetic; trained weights are always kept in fp32
    gradient_checkpointing: bool = True
    compile: bool = False  # torch.compile on every block

    def __post_init__(self) -> None:
        if self.pretrained is None and self.architecture is None:
            raise invalid("model", "pretrained or architecture", "neither", "name a folder, or give the sizes")
        if self.pretrained is not None and self.vae is not None:
            raise invalid("model.vae", "left out with model.pretrained, which has one", self.vae, "remove one of them")
        if self.pretrained is not None:  # as all paths of a file: this one may be a hub id and is no Path
            object.__setattr__(self, "pretrained", os.path.expanduser(self.pretrained))


@dataclass(frozen=True)
class ObjectiveSection:
    """Flow matching with a clean prefix."""

    prefix_frames: int = 9  # clean RGB frames at the beginning of a clip; 0 trains from noise and text alone
    shift: float = 5.0  # of the noise level: σ = s·u / (1 + (s − 1)·u) with u uniform
    levels: tuple[float, ...] | None = None  # noise levels that are trained, those of the model's steps; None: all
    text_dropout: float = 0.1  # share of clips that are trained with the empty prompt, for guidance
    prefix_dropout: float = 0.0  # share of clips that are trained without their clean prefix
    causal_block_frames: int | None = None  # latent frames of a block of a causal model; None: it sees whole clips
    past_noise: float = 0.0  # highest noise level of the blocks that later blocks of a causal model see; half are clean
    own_past: float = 0.0  # share of steps after blocks that the causal model made itself (`train/own_past.py`)

    def __post_init__(self) -> None:
        _at_least("objective.prefix_frames", self.prefix_frames, 0)
        if self.causal_block_frames is not None:
            _at_least("objective.causal_block_frames", self.causal_block_frames, 1)
        if not 0 < self.shift < math.inf:
            raise invalid("objective.shift", "positive and finite", self.shift, "Wan2.2 uses 5, Wan2.1 uses 3")
        if self.levels is not None and not _falls_from_noise(self.levels):
            fix = "begin with 1 and fall; above 0 each, as in [1.0, 0.9, 0.75, 0.5]"
            raise invalid("objective.levels", "noise levels at which steps begin", list(self.levels), fix)
        for name in ("text_dropout", "prefix_dropout", "own_past"):
            _probability(f"objective.{name}", getattr(self, name))
        _noise_level("objective.past_noise", self.past_noise)
        if self.past_noise and self.causal_block_frames is None:
            fix = "set objective.causal_block_frames, or leave it out"
            raise invalid("objective.past_noise", "0 for a model that sees whole clips", self.past_noise, fix)
        if self.own_past:
            self._check_own_past()

    def _check_own_past(self) -> None:
        """Refuse what has no past, or no steps in which it could be made."""
        if self.causal_block_frames is None:
            fix = "set objective.causal_block_frames, or leave it out"
            raise invalid("objective.own_past", "0 for a model that sees whole clips", self.own_past, fix)
        if self.levels is None or len(self.levels) < 2:
            fix = "name those of the model's steps, as in [1.0, 0.9, 0.75, 0.5]"
            raise invalid("objective.levels with objective.own_past", "at least two", self.levels, fix)


@dataclass(frozen=True)
class DistillationSection:
    """A causal model taught to make a block in a few steps, by itself as it was before (`train/few_steps.py`)."""

    steps: int = 4  # of a block
    teacher_steps: int = 16  # of the teacher; a multiple, so that both meet after every step
    past_noise: float = 0.0  # noise level at which the teacher sees the blocks that the student made

    def __post_init__(self) -> None:
        _at_least("distillation.steps", self.steps, 1)
        if self.teacher_steps < self.steps or self.teacher_steps % self.steps:
            expected = f"a multiple of distillation.steps = {self.steps}"
            raise invalid("distillation.teacher_steps", expected, self.teacher_steps, f"use {4 * self.steps}")
        _noise_level("distillation.past_noise", self.past_noise)


@dataclass(frozen=True)
class AdversarySection:
    """A model taught to be taken for true by a network that learns to judge it (`train/judging.py`)."""

    weight: float = 1.0  # of the gradient of passing, as a multiple of that of the loss
    judge_first: int = 100  # steps in which the judge learns alone

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise invalid("adversary.weight", "positive and finite", self.weight, "1 is usual")
        _at_least("adversary.judge_first", self.judge_first, 0)

    def weight_at(self, step: int) -> float:
        return self.weight if step >= self.judge_first else 0.0


@dataclass(frozen=True)
class HistorySection:
    """Retrieved history: frames that other drives took of the clip's place (paper, Appendix on retrieved history)."""

    frames: int = 3  # asked for, spread over the clip
    conflict_rate: float = 0.25  # share of clips that get a donor from a neighbouring lane, where there is one
    prefix_dropout: float = 0.25  # share of clips with usable history that are trained without their clean prefix

    def __post_init__(self) -> None:
        _at_least("history.frames", self.frames, 1)
        for name in ("conflict_rate", "prefix_dropout"):
            _probability(f"history.{name}", getattr(self, name))


@dataclass(frozen=True)
class OptimiserSection:
    """AdamW with a constant learning rate (paper, Appendix on optimisation), or what is asked for."""

    learning_rate: float = 1e-5
    matrices: Literal["adamw", "muon"] = "adamw"  # what updates the matrices of the blocks
    warmup_steps: int = 0  # the rate rises to its value over the first steps
    decay_steps: int = 0  # and falls towards zero over the last of run.steps, which then may not change any more
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    ema_decay: float | None = None  # None: no moving average of the weights

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise invalid("optimiser.learning_rate", "positive and finite", self.learning_rate, "the paper uses 1e-5")
        _at_least("optimiser.warmup_steps", self.warmup_steps, 0)
        _at_least("optimiser.decay_steps", self.decay_steps, 0)
        if not self.clip_norm > 0:
            raise invalid("optimiser.clip_norm", "positive; inf never clips", self.clip_norm, "1 is usual")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise invalid("optimiser.ema_decay", "in (0, 1)", self.ema_decay, "0.999 is usual; leave it out for none")


@dataclass(frozen=True)
class ParallelSection:
    """How ranks share the work: replicas × shards of the weights × shards of a clip's frames = number of ranks."""

    replicate: int = 1
    shard: int | None = None  # None: all ranks that replicate and context leave over
    context: int = 1

    def __post_init__(self) -> None:
        for name in ("replicate", "context"):
            _at_least(f"parallel.{name}", getattr(self, name), 1)
        if self.shard is not None:
            _at_least("parallel.shard", self.shard, 1)


@dataclass(frozen=True)
class TrainConfig:
    """A whole run."""

    run: RunSection
    model: ModelSection
    data: Data = field(metadata={"kinds": DATA_KINDS})
    branch: CameraBranchConfig | Literal["none"] = "none"  # "none": no camera conditioning, the paper's first row
    objective: ObjectiveSection = field(default_factory=ObjectiveSection)
    optimiser: OptimiserSection = field(default_factory=OptimiserSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    history: HistorySection | None = None
    distillation: DistillationSection | None = None
    adversary: AdversarySection | None = None

    @property
    def sample_steps(self) -> int:
        """Denoising steps of sample videos, and of what is exported."""
        if self.distillation is not None:
            return self.distillation.steps
        return self.run.sample_steps if self.objective.levels is None else len(self.objective.levels)

    def __post_init__(self) -> None:
        if self.branch == "none" and self.model.trainable == "branch":
            fix = 'add [branch], or train all weights with trainable = "all"'
            raise invalid("model.trainable", "something to train", "no branch", fix)
        if self.branch == "none" and self.model.pretrained_branch is not None:
            got = self.model.pretrained_branch
            raise invalid("model.pretrained_branch", "left out without [branch]", got, "add [branch]")
        if self.branch != "none" and self.branch.integration == "rerope" and self.model.trainable == "branch":
            raise invalid("model.trainable", '"all" for rerope', '"branch"', "rerope adds no weights of its own")
        for name, default in (("weight", 1.0), ("name", "")):
            if getattr(self.data, name) != default:
                fix = "it is a key of [[data.sources]]"
                raise invalid(f"data.{name}", "left out, as nothing else is drawn", getattr(self.data, name), fix)
        if isinstance(self.data, WorldData):
            self.data.check_pool()
        self._check_history()
        if self.objective.causal_block_frames is not None:
            self._check_causal()
        if self.data.views > 1:
            self._check_rig()
        if self.distillation is not None:
            self._check_distillation()
        if self.adversary is not None:
            self._check_adversary()

    def _check_causal(self) -> None:
        """Refuse what needs all frames of a clip at once."""
        name = "with objective.causal_block_frames"
        if self.history is not None:
            fix = "train without [history] and branch.history"
            raise invalid(f"[history] {name}", "left out", "given", fix)
        if self.parallel.context != 1:
            raise invalid(f"parallel.context {name}", "1", self.parallel.context, "share clips with parallel.shard")

    def _check_rig(self) -> None:
        """Refuse what takes clips of one view."""
        given = {
            "objective.causal_block_frames": self.objective.causal_block_frames is not None,
            "[history]": self.history is not None,
            "parallel.context": self.parallel.context != 1,
        }
        for way in ("rerope", "epipolar"):
            given[f'branch.integration = "{way}"'] = self.branch != "none" and self.branch.integration == way
        for name in (name for name, is_given in given.items() if is_given):
            raise invalid(f"{name} with a rig of {self.data.views} views", "left out", "given", "train one view")

    def _check_distillation(self) -> None:
        """Refuse to distil what is not a trained causal model."""
        name = "with [distillation]"
        if self.objective.causal_block_frames is None:
            fix = "set it to the blocks that the model was trained with"
            raise invalid(f"objective.causal_block_frames {name}", "given", "none", fix)
        needed: dict[str, object] = {"model.pretrained": self.model.pretrained}
        if self.branch != "none":
            needed["model.pretrained_branch"] = self.model.pretrained_branch
        for key, value in needed.items():
            if value is None:
                raise invalid(f"{key} {name}", "the causal model to distil", "none", "name what a causal run trained")
        if self.objective.prefix_dropout:
            got = self.objective.prefix_dropout
            raise invalid(f"objective.prefix_dropout {name}", "0", got, "the model keeps what it learnt of it")
        for key, value in (("[adversary]", self.adversary), ("objective.levels", self.objective.levels)):
            if value is not None:
                raise invalid(f"{key} {name}", "left out", "given", "distil in a run of its own")

    def _check_adversary(self) -> None:
        """Refuse what a judge cannot be shown: it sees a block after the one before it."""
        objective, name = self.objective, "with [adversary]"
        if objective.causal_block_frames is None:
            raise invalid(f"objective.causal_block_frames {name}", "given", "none", "train a causal model")
        if not objective.prefix_frames or objective.prefix_dropout:
            got = f"prefix_frames {objective.prefix_frames}, prefix_dropout {objective.prefix_dropout}"
            raise invalid(f"objective {name}", "a prefix in every clip", got, "a judge sees the block before, too")
        if objective.own_past:
            fix = "train with one, then with the other: a judge sees the true block before"
            raise invalid(f"objective.own_past {name}", "0", objective.own_past, fix)

    def _check_history(self) -> None:
        path = None if self.branch == "none" else self.branch.history
        if (path is None) != (self.history is None):
            got = f"branch.history {path!r}, [history] {'missing' if self.history is None else 'given'}"
            raise invalid("history", "both branch.history and [history], or neither", got, "add or remove the other")
        if self.history is None:
            return
        if not self.data.knows_places:
            kinds = " or ".join(f'"{name}"' for name, kind in DATA_KINDS.items() if kind.knows_places)
            raise invalid("data.kind with [history]", kinds, repr(self.data.kind), "places are known for these alone")
        if self.parallel.context != 1:
            fix = "share clips with parallel.shard"
            raise invalid("parallel.context with [history]", "1", self.parallel.context, fix)
        is_pooled = isinstance(self.data, WorldData) and self.data.worlds is not None
        if self.run.micro_batch != 1 and not is_pooled:
            fix = "clips have different numbers of references"
            raise invalid("run.micro_batch with [history]", "1", self.run.micro_batch, fix)
        if self.history.conflict_rate and is_pooled:
            fix = "the clips of a pool are cleared for their own drive, not for the lane beside"
            raise invalid("history.conflict_rate with data.worlds", "0", self.history.conflict_rate, fix)

    def learnt(self) -> dict[str, Any]:
        """What decides the result of a run, for comparing it with the run that a checkpoint came from."""
        table = {name: value for name, value in asdict(self).items() if name not in RESUMABLE}
        for section, name in (("data", "workers"), ("data", "keep_renders"), ("model", "gradient_checkpointing")):
            table[section].pop(name, None)
        if self.optimiser.decay_steps:
            table["steps"] = self.run.steps  # where the rate falls
        return table | {"seed": self.run.seed, "batch_size": self.run.batch_size}


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise invalid(name, f"at least {least}", value, "docs/training.md says what it means")


def _noise_level(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise invalid(name, "at least 0 and below 1", value, "0 is clean and 1 is noise alone")


def _falls_from_noise(levels: tuple[float, ...]) -> bool:
    return levels[:1] == (1.0,) and all(0 < after < before for before, after in pairwise(levels))


def _probability(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise invalid(name, "in [0, 1]", value, "it is a share: 0.5 is every second one, drawn by chance")

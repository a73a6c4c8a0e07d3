"""What the training of a VAE is: one frozen dataclass per section of its TOML file.

`merope train` takes a file with a [vae] table for the training of a VAE, any other for that of a transformer.
"""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from merope.errors import invalid
from merope.generate.whole_clips import FRAMES_PER_CHUNK
from merope.train.clip_pool import Growth
from merope.train.config import AdversarySection, OptimiserSection
from merope.world.clips import WorldClips


@dataclass(frozen=True)
class VaeSection:
    """The VAE: a saved folder to go on from, or an AutoencoderKLWan from scratch."""

    architecture: dict[str, Any]  # arguments of AutoencoderKLWan; those of `pretrained`, if given
    pretrained: Path | None = None
    trainable: Literal["all", "decoder"] = "all"  # "decoder": latents stay as they are, for models that learnt them
    precision: Literal["bf16", "fp32"] = "bf16"  # of the arithmetic; weights are kept in fp32
    compile: bool = False

    def __post_init__(self) -> None:
        if self.trainable == "decoder" and self.pretrained is None:
            fix = "name the VAE whose decoder is to be trained"
            raise invalid("vae.pretrained", 'given with trainable = "decoder"', None, fix)


@dataclass(frozen=True)
class PoolSection:
    """Clips of the procedural world. They are rendered once and stay in memory as bytes."""

    frames: int = 49
    height: int = 144
    width: int = 256
    frame_rate_hz: float = 16.0
    prefix_frames: int = 9  # frames after which speed and yaw rate go to new targets
    clips: int = 2500  # of the pool
    first_clips: int = 256  # rendered before the first step
    clips_per_step: float = 1.0  # rendered between the steps, until the pool is full
    crop_frames: int = 17  # consecutive frames of a clip that a step sees
    held_out_worlds: int = 24  # for validation; no training clip shows them

    def __post_init__(self) -> None:
        if (self.crop_frames - 1) % FRAMES_PER_CHUNK or not 1 <= self.crop_frames <= self.frames:
            expected = f"{FRAMES_PER_CHUNK}k + 1 frames, at most data.frames = {self.frames}"
            raise invalid("data.crop_frames", expected, self.crop_frames, "17 is usual")
        if (self.frames - 1) % FRAMES_PER_CHUNK:
            raise invalid("data.frames", f"{FRAMES_PER_CHUNK}k + 1", self.frames, "whole clips are encoded, too")
        if not 1 <= self.first_clips <= self.clips:
            expected = f"in [1, data.clips = {self.clips}]"
            raise invalid("data.first_clips", expected, self.first_clips, "training begins with these")
        if self.held_out_worlds < 1:
            raise invalid("data.held_out_worlds", "at least 1", self.held_out_worlds, "24 is usual")

    def world_clips(self) -> WorldClips:
        return WorldClips(self.frames, self.height, self.width, self.frame_rate_hz, self.prefix_frames)

    @property
    def growth(self) -> Growth:
        """Of the pool that steps draw from."""
        return Growth(self.first_clips, self.clips_per_step, self.clips)


@dataclass(frozen=True)
class ReconstructionSection:
    """Weights of the terms of the loss, and when it is taken at half size. Colours are in [−1, 1]; terms are means."""

    absolute: float = 1.0  # of colour differences
    squared: float = 0.0  # of colour differences; what PSNR measures
    edges: float = 0.5  # absolute differences between the steps from a pixel to its neighbours
    kl: float = 1e-6  # of the latents' distribution from the standard normal one, per number
    half_size: float = 0.0  # share of steps whose latents, at half size, must become the clip at half size

    def __post_init__(self) -> None:
        if not 0.0 <= self.half_size <= 1.0:
            raise invalid("objective.half_size", "in [0, 1]", self.half_size, "it is a share of steps")


@dataclass(frozen=True)
class VaeRunSection:
    """How long, how often, and where to. The run ends with its steps or its minutes, whichever comes first."""

    out: Path
    steps: int = 20_000
    minutes: float | None = None  # of all pieces of the run, rendering and compilation included, the export not
    batch_size: int = 16
    seed: int = 0
    log_every: int = 20
    checkpoint_every: int = 2000
    keep_checkpoints: int = 1
    validate_every: int = 1000

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "log_every", "checkpoint_every", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise invalid(f"run.{name}", "at least 1", getattr(self, name), "see merope/train/vae_config.py")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise invalid("run.minutes", "positive", self.minutes, "leave it out to train all steps")


@dataclass(frozen=True)
class VaeTrainConfig:
    """A whole run. The learning rate falls along a cosine to zero at its end."""

    run: VaeRunSection
    vae: VaeSection
    data: PoolSection = field(default_factory=PoolSection)
    objective: ReconstructionSection = field(default_factory=ReconstructionSection)
    optimiser: OptimiserSection = field(default_factory=OptimiserSection)
    adversary: AdversarySection | None = None  # a judge of pictures (`train/picture_judge.py`)

    def __post_init__(self) -> None:
        if self.optimiser.matrices != "adamw":
            fix = "leave it out; a VAE consists of convolutions"
            raise invalid("optimiser.matrices", '"adamw" for a VAE', repr(self.optimiser.matrices), fix)
        if self.optimiser.decay_steps:
            fix = "leave it out; the rate of a VAE falls from the first step to the last"
            raise invalid("optimiser.decay_steps", "0 for a VAE", self.optimiser.decay_steps, fix)

    def learnt(self) -> dict[str, Any]:
        """What decides the result of a run, besides its length, for comparing it with that of a checkpoint."""
        table = {name: value for name, value in asdict(self).items() if name != "run"}
        table["vae"].pop("compile")
        return table | {"seed": self.run.seed, "batch_size": self.run.batch_size}

    def share_done(self, step: int, elapsed_s: float) -> float:
        """How much of the run lies behind, in [0, 1]: by steps or by the clock, whichever is further."""
        by_clock = 0.0 if self.run.minutes is None else elapsed_s / (60.0 * self.run.minutes)
        return min(1.0, max(step / self.run.steps, by_clock))

    def learning_rate(self, step: int, share_done: float) -> float:
        """A straight rise at the start where it is wanted, then a cosine to zero."""
        warmup = self.optimiser.warmup_steps
        rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
        return self.optimiser.learning_rate * rise * 0.5 * (1.0 + math.cos(math.pi * share_done))

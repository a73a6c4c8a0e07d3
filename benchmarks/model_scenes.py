"""The methods, clips and measuring tools of benchmarks/model.py: one model, and what it denoises under each method."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from train_step import PREFIX

from merope.adapters import camera_attention
from merope.adapters.attachment import attach, detach
from merope.adapters.branch_config import Blocks, CameraBranchConfig
from merope.adapters.camera_attention import CameraAttention
from merope.attention.dispatch import attend
from merope.attention.plan import AttentionPlan
from merope.generate.camera_video import CameraVideoPipeline
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Pinhole
from merope.geometry.trajectories import driving_path

SPEAKS = 0.2
"""Standard deviation of the output projection's weights: a fresh branch adds zeros, and errors could not be seen."""

Row = dict[str, Any]
Attention = Callable[[Tensor, Tensor, Tensor, AttentionPlan], Tensor]

papers_way: Attention = partial(attend, backend="sdpa", memory_budget=2**36)
"""Keys and values materialised for all query cameras at once, in plain PyTorch."""


@dataclass(frozen=True)
class Method:
    """What stands in the model."""

    name: str
    encoding: str  # "none": no branch
    attention: Attention = attend
    compression: int = 4
    blocks: Blocks = "alternating"

    @property
    def config(self) -> CameraBranchConfig:
        scale = 0.04 if self.encoding in ("gta", "ucpe") else 1.0  # 1 / 25 m, as in configs/nuscenes
        return CameraBranchConfig(self.encoding, {}, "parallel", self.compression, self.blocks, translation_scale=scale)


NO_BRANCH, GTA, UCPE = Method("no branch", "none"), Method("gta", "gta"), Method("ucpe", "ucpe")
PAPERS, OURS = Method("merope, paper's way", "merope", attention=papers_way), Method("merope", "merope")
METHODS = (NO_BRANCH, GTA, UCPE, PAPERS, OURS)
SETTINGS = (
    Method("merope, C = 2", "merope", compression=2),
    Method("merope, C = 8", "merope", compression=8),
    Method("merope, every block", "merope", blocks="every"),
    Method("merope, blocks 11 and 13", "merope", blocks="peak"),
)


@dataclass(frozen=True)
class Clip:
    """A clip, and how much of its loop is run: `steps` after the first one, in every round."""

    name: str
    frames: int
    height: int
    width: int
    methods: tuple[Method, ...] = METHODS
    rounds: int = 4
    steps: int = 6

    @property
    def grid(self) -> tuple[int, int, int]:
        """Latent frames, token rows and columns."""
        return (self.frames - 1) // 4 + 1, self.height // 32, self.width // 32

    def cameras(self) -> Cameras:
        """Of every RGB frame, along a driven path."""
        path = driving_path(self.frames, 12.0, torch.Generator().manual_seed(0), PREFIX)
        lens = Pinhole(0.8 * self.width, 0.8 * self.width, self.width / 2, self.height / 2, self.width, self.height)
        return Cameras(path, lens, plan_dtype=torch.float32)


CLIPS = {
    "denoise-49": Clip("denoise-49", 49, 288, 512, METHODS + SETTINGS),
    "denoise-121": Clip("denoise-121", 121, 704, 1280, rounds=2, steps=2),
}


class Stamp:
    """A moment on the device's clock."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self.host_s = time.perf_counter()
        if self.event is not None:
            self.event.record()

    def seconds_until(self, later: "Stamp") -> float:
        if self.event is None or later.event is None:
            return later.host_s - self.host_s
        later.event.synchronize()
        return self.event.elapsed_time(later.event) / 1e3


def timed(run: Callable[[], object], device: torch.device) -> float:  # seconds
    start = Stamp(device)
    run()
    return start.seconds_until(Stamp(device))


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def spread(name: str, seconds: list[float]) -> Row:
    p10, median, p90 = torch.tensor(seconds, dtype=torch.float64).quantile(torch.tensor([0.1, 0.5, 0.9]).double())
    return {f"{name}_s": float(median), f"{name}_p10_s": float(p10), f"{name}_p90_s": float(p90)}


@contextmanager
def branch_attention(function: Attention) -> Iterator[None]:
    """Another function in the place of `attend` in all camera branches."""
    vars(camera_attention)["attend"] = function
    try:
        yield
    finally:
        vars(camera_attention)["attend"] = attend


def speak(processors: Iterable[nn.Module]) -> None:
    for processor in processors:
        assert isinstance(processor, CameraAttention)
        nn.init.normal_(processor.cam_out.weight, std=SPEAKS)


@contextmanager
def attached(transformer: Any, method: Method) -> Iterator[None]:
    """A branch that speaks, with the same weights every time."""
    if method.encoding == "none":
        yield
        return
    torch.manual_seed(3)
    speak(attach(transformer, method.config).processors().values())
    try:
        with branch_attention(method.attention):
            yield
    finally:
        detach(transformer)


@dataclass(frozen=True, eq=False)
class Scene:
    """One model, and what it denoises: the same for all methods."""

    pipeline: CameraVideoPipeline
    clip: Clip
    text: Tensor  # [2, 512, text_dim] prompt and negative prompt
    noise: Tensor  # [1, C, T, h, w]
    clean: Tensor  # [1, C, 3, h, w] the prefix
    cameras: Cameras  # of every RGB frame

    @classmethod
    def random(cls, pipeline: CameraVideoPipeline, clip: Clip) -> "Scene":
        dice, device = torch.Generator().manual_seed(1), pipeline.transformer.device
        config = pipeline.transformer.config
        text = torch.randn(2, 512, config.text_dim, generator=dice).to(device, pipeline.transformer.dtype)
        frames, rows, columns = clip.grid
        latents = torch.randn(2, config.in_channels, frames, 2 * rows, 2 * columns, generator=dice).to(device)
        pipeline.set_progress_bar_config(disable=True)
        return cls(pipeline, clip, text, latents[1:], latents[:1, :, : (PREFIX - 1) // 4 + 1], clip.cameras())

    @property
    def device(self) -> torch.device:
        return self.noise.device

    def denoised(self, has_branch: bool, steps: int, after_step: Callable[[], None]) -> Tensor:  # [1, C, T, h, w]
        """The pipeline's loop from noise to latents."""
        clip = self.clip
        self.pipeline.encode_frames = lambda frames: self.clean  # type: ignore[method-assign]  # no VAE in the times

        def callback(*_: object) -> dict[str, Tensor]:
            after_step()
            return {}

        return self.pipeline(
            prompt_embeds=self.text[:1],
            negative_prompt_embeds=self.text[1:],
            cameras=self.cameras if has_branch else None,
            prefix=torch.zeros(PREFIX, clip.height, clip.width, 3, dtype=torch.uint8),
            height=clip.height,
            width=clip.width,
            num_frames=clip.frames,
            num_inference_steps=steps,
            latents=self.noise,
            output_type="latent",
            return_dict=False,
            callback_on_step_end=callback,
        )[0]


@dataclass(frozen=True)
class Visit:
    """Some steps of a clip's loop under one method."""

    latents: Tensor
    first_s: float  # with all that is done once per clip
    steps_s: list[float]
    peak_gib: float


def visit(scene: Scene, method: Method, steps: int) -> Visit:
    """The first step and so many more."""
    with attached(scene.pipeline.transformer, method):
        forget_peak(scene.device)
        stamps = [Stamp(scene.device)]
        latents = scene.denoised(method.encoding != "none", 1 + steps, lambda: stamps.append(Stamp(scene.device)))
        first_s, *steps_s = (a.seconds_until(b) for a, b in pairwise(stamps))
        return Visit(latents, first_s, steps_s, peak_gib(scene.device))


def gate(scene: Scene) -> Row:
    """Ours is the paper's way: in the attention of every branch, on real activations, and in the latents.

    attention: largest relative difference of the two on the same q, k and v. latents: relative difference after two
    steps, in which every rounding of a deep model in bf16 comes back. effect: that of taking the branch away.
    """
    attention: list[float] = []

    def both(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        ours = attend(q, k, v, plan)
        attention.append(relative_difference(ours, papers_way(q, k, v, plan)))
        return ours

    ours = visit(scene, replace(OURS, attention=both), 1).latents
    papers, base = visit(scene, PAPERS, 1).latents, visit(scene, NO_BRANCH, 1).latents
    latents, effect = relative_difference(ours, papers), relative_difference(base, papers)
    numbers = {"attention": max(attention), "latents": latents, "effect": effect}
    print("relative differences", numbers, flush=True)
    if not (max(attention) < 0.02 and latents < 0.05 and effect > latents):
        raise SystemExit(f"our latents are not those of the paper's way, or the branch does not speak: {numbers}")
    return numbers


def relative_difference(x: Tensor, expected: Tensor) -> float:
    return float((x.double() - expected.double()).norm() / expected.double().norm())


def identity(what: str, method: Method) -> Row:
    """Which row it is."""
    if method.encoding == "none":
        return {"what": what, "method": method.name, "compression": None, "blocks": None}
    return {"what": what, "method": method.name, "compression": method.compression, "blocks": method.blocks}


def with_ratios(rows: list[Row]) -> list[Row]:
    """Rows with throughput and peak memory over those of no branch and of UCPE, where these were measured."""
    by_method = {row["method"]: row for row in rows}
    for name, key in ((NO_BRANCH.name, "no_branch"), (UCPE.name, "ucpe")):
        if name in by_method:
            base = by_method[name]
            for row in rows:
                row[f"throughput_to_{key}"] = row["clips_per_s"] / base["clips_per_s"]
                row[f"memory_to_{key}"] = row["peak_memory_gib"] / (base["peak_memory_gib"] or float("nan"))
    return rows

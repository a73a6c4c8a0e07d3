"""The model that the pages drive: its folder, its clips, and the two ways in which it makes frames."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from merope.adapters.attachment import load_branch
from merope.demo.drive import SHIPPED_MODEL
from merope.errors import invalid
from merope.formats.video import as_bytes
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.conditions import check_prefix_count
from merope.generate.preflight import check_branch, check_model_weights, no_loading_bars, outline_model
from merope.generate.stream import BLOCK_FRAMES, CameraStream
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Lens
from merope.world.clips import WorldClips
from merope.world.clips_file import CLIPS_FILE, EXAMPLE, read_clips

GUIDANCE = 5.0  # of models with a text encoder
LONGEST_S = 20.0  # of a clip along a drawn path, for models that go on for ever


class StoppedError(Exception):
    """Nobody waits for what is being made any more."""


@dataclass(frozen=True)
class ModelChoice:
    """What to load.

    model: a pipeline folder with clips.json. branch: a folder, by default branch/ in the model's.
    steps: of denoising; None for what the model's folder names.
    """

    model: Path = SHIPPED_MODEL
    branch: Path | None = None
    steps: int | None = None
    seed: int = 0
    prompt: str | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise invalid("--steps", "at least 1", self.steps, "leave it out to take what suits the model")
        if self.seed < 0:
            raise invalid("--seed", "at least 0", self.seed, "each block draws its noise from it")


class StudioModel:
    """A loaded pipeline and what its clips are like. Its calls must not overlap."""

    def __init__(self, pipe: CameraVideoPipeline, clips: WorldClips, steps: int, choice: ModelChoice) -> None:
        self.pipe, self.clips, self.steps = pipe, clips, steps
        self.seed, self.prompt = choice.seed, choice.prompt
        self.name = "the package's model" if choice.model == SHIPPED_MODEL else choice.model.resolve().name
        self.guidance = 1.0 if pipe.text_encoder is None else GUIDANCE

    @property
    def is_causal(self) -> bool:
        """Trained to make block after block."""
        return self.pipe.causal_block_frames is not None

    @property
    def first_frames(self) -> int:
        """Frames that a stream begins with: those of one block."""
        block = self.pipe.causal_block_frames or BLOCK_FRAMES
        return (block - 1) * self.pipe.strides.frames + 1

    @property
    def most_frames(self) -> int:
        """Of a clip along a path: as in training; of a model that goes on for ever, a bound in seconds."""
        if not self.is_causal:
            return self.clips.frames
        block = self.first_frames + self.pipe.strides.frames - 1
        return self.first_frames + block * round(LONGEST_S * self.clips.frame_rate_hz / block)

    def stream(
        self,
        prefix: Tensor,  # uint8 [T, H, W, 3]
        world_from_camera: Tensor,  # [T, 4, 4]
        lens: Lens,
    ) -> CameraStream:
        """A drive that begins with these frames."""
        return self.pipe.stream(
            self.prompt,
            prefix,
            world_from_camera,
            lens,
            num_inference_steps=self.steps,
            guidance_scale=self.guidance,
            seed=self.seed,
        )

    def clip(
        self,
        prefix: Tensor,  # uint8 [K, H, W, 3]
        cameras: Cameras,  # [T]
        on_step: Callable[[int, int], None],  # steps done, of so many
    ) -> Tensor:  # uint8 [T, H, W, 3], the prefix included
        """A video along a path: block by block if the model was trained so, else the whole clip at once."""
        if self.is_causal:
            return self._streamed(prefix, cameras, on_step)

        def report(
            _: CameraVideoPipeline, step: int, timestep: Tensor, tensors: dict[str, Tensor]
        ) -> dict[str, Tensor]:
            on_step(step + 1, self.steps)
            return tensors

        frames = self.pipe(
            prompt=self.prompt,
            cameras=cameras,
            prefix=prefix,
            height=self.clips.height,
            width=self.clips.width,
            num_frames=cameras.count,
            num_inference_steps=self.steps,
            guidance_scale=self.guidance,
            generator=torch.Generator("cpu").manual_seed(self.seed),  # the same noise on every machine
            output_type="pt",
            return_dict=False,
            callback_on_step_end=report,
        )[0]
        return as_bytes(frames[0].movedim(1, -1)).cpu()

    def _streamed(self, prefix: Tensor, cameras: Cameras, on_step: Callable[[int, int], None]) -> Tensor:
        stream = self.stream(prefix, cameras.world_from_camera[: len(prefix)], cameras.lens)
        made, block = [prefix], stream.block_frames
        total = self.steps * ((cameras.count - len(prefix)) // block)
        while stream.frames < cameras.count:
            before = self.steps * stream.blocks
            own = cameras.world_from_camera[stream.frames : stream.frames + block]
            made.append(stream.drive(own, on_step=lambda step, before=before: on_step(before + step, total)))  # type: ignore[misc]
        return torch.cat(made)

    def fitting_frames(self, count: int) -> int:
        """The most frames, up to `count`, that a clip can have; less than the smallest clip is refused."""
        strides, first = self.pipe.strides, self.prefix_frames
        step = (self.first_frames + strides.frames - 1) if self.is_causal else strides.frames
        fitting = first + (min(count, self.most_frames) - first) // step * step
        if fitting <= first:
            expected = f"of at least {first + step} frames, {(first + step - 1) / self.clips.frame_rate_hz:.2g} s"
            raise invalid("path", expected, f"{count}", "draw it longer, or drive more slowly")
        return fitting

    @property
    def prefix_frames(self) -> int:
        """Clean frames that a clip along a path begins with."""
        return self.first_frames if self.is_causal else self.clips.prefix_frames


def load_model(choice: ModelChoice) -> tuple[StudioModel, float]:
    """The model and the seconds that it took; a folder that does not fit is refused before its weights are read."""
    began_s = time.perf_counter()
    if not choice.model.is_dir():
        raise FileNotFoundError(f"model folder {choice.model} is missing; check --model")
    folder, clips, steps = str(choice.model.absolute()), *read_clips(choice.model)
    branch = str((choice.branch or choice.model / "branch").absolute())
    outline = outline_model(folder)
    if outline.strides.pixels > 1 and not (choice.model / CLIPS_FILE).is_file():
        fix = f"write what its clips are like, such as {EXAMPLE}"
        raise invalid("--model", f"a folder with {CLIPS_FILE}, as every model with a VAE needs", folder, fix)
    if outline.has_text and choice.prompt is None:
        raise invalid("--prompt", "given to a model with a text encoder", None, 'such as --prompt "a street"')
    outline.strides.check(clips.height, clips.width, clips.frames)
    check_prefix_count(clips.prefix_frames, outline.strides, clips.frames)
    check_branch(branch, outline, clips.cameras([0]))
    check_model_weights(outline)
    device = _device(choice.device)
    dtype = torch.bfloat16 if outline.has_text and device.type == "cuda" else torch.float32
    with no_loading_bars():
        pipe: CameraVideoPipeline = CameraVideoPipeline.from_pretrained(folder, dtype=dtype)
        load_branch(pipe.transformer, branch)
    pipe.set_progress_bar_config(disable=True)
    model = StudioModel(pipe.to(device), clips, choice.steps or steps, choice)
    return model, time.perf_counter() - began_s


def _device(name: str) -> torch.device:
    here = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    if name not in ("auto", *here):
        raise invalid("--device", f"auto or, on this machine, {', '.join(here)}", repr(name), "use auto")
    return torch.device(here[-1] if name == "auto" else name)

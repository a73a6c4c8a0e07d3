"""A model that the pages drive: its folder, its clips, and the two ways in which it makes frames."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from merope.adapters.recorded_passes import is_bound_by_launches
from merope.demo.drive import SHIPPED_MODEL
from merope.errors import invalid
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.causal_clips import OnStep, made_clip
from merope.generate.recall import REMEMBERED
from merope.generate.stream import BLOCK_FRAMES, SINK, WINDOW, CameraStream
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Lens
from merope.world.clips import WorldClips

GUIDANCE = 5.0  # of models with a text encoder
LONGEST_S = 20.0  # of a clip along a drawn path, for models that go on for ever
DRIVING_STEPS = 6  # of a block at most, unless the user asks for more: somebody waits for its first frame
MOST_STEPS, MOST_PROMPT = 100, 2000


class StoppedError(Exception):
    """Nobody waits for what is being made any more."""


@dataclass(frozen=True)
class ModelChoice:
    """What to load.

    model: a pipeline folder with clips.json. branch: a folder, by default branch/ in the model's.
    steps: of denoising; None for what the model's folder names, and at most DRIVING_STEPS of them for a driven block.
    prompt: what pages begin with, for models with a text encoder.
    """

    model: Path = SHIPPED_MODEL
    branch: Path | None = None
    steps: int | None = None
    seed: int = 0
    prompt: str | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.steps is not None and not 1 <= self.steps <= MOST_STEPS:
            raise invalid("--steps", f"from 1 to {MOST_STEPS}", self.steps, "leave it out to take what suits the model")
        if self.seed < 0:
            raise invalid("--seed", "at least 0", self.seed, "each block draws its noise from it")
        if self.prompt is not None and len(self.prompt) > MOST_PROMPT:
            got = f"{len(self.prompt)}, {self.prompt[:40]!r} …"
            raise invalid("--prompt", f"a text of at most {MOST_PROMPT} characters", got, "shorten it")


@dataclass(frozen=True)
class Sampling:
    """What a page chooses of how frames are made. prompt: None for models without a text encoder."""

    steps: int
    prompt: str | None = None


class StudioModel:
    """A loaded pipeline and what its clips are like. Its calls must not overlap."""

    def __init__(
        self, pipe: CameraVideoPipeline, clips: WorldClips, steps: int, choice: ModelChoice, name: str
    ) -> None:
        self.pipe, self.clips, self.steps, self.name = pipe, clips, steps, name
        self.driving_steps = steps if choice.steps else min(steps, DRIVING_STEPS)
        self.seed, self.prompt = choice.seed, (choice.prompt or "") if self.has_text else ""
        self.guidance = GUIDANCE if self.has_text else 1.0

    @property
    def has_text(self) -> bool:
        return self.pipe.text_encoder is not None

    @property
    def is_causal(self) -> bool:
        """Trained to make block after block."""
        return self.pipe.causal_block_frames is not None

    @property
    def recall(self) -> int:
        """Older views of the same place that a block is shown. Their pass would delay the first frame on a CPU."""
        is_quick = self.pipe.transformer.device.type == "cuda"
        return self.pipe.causal_block_frames or BLOCK_FRAMES if is_quick else 0

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

    def about(self) -> dict[str, object]:
        """What a page must know of it."""
        clips = self.clips
        return {
            "name": self.name,
            "causal": self.is_causal,
            "text": self.has_text,
            "prompt": self.prompt,
            "width": clips.width,
            "height": clips.height,
            "fps": clips.frame_rate_hz,
            "steps": self.steps,
            "driving_steps": self.driving_steps,
            "lens": {"kind": "pinhole" if clips.xi[0] == 0.0 else "fisheye", "fov_deg": clips.fov_deg[0]},
        }

    def sampling(self, steps: object, prompt: object) -> Sampling:
        """What a page asks for, checked."""
        if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= MOST_STEPS:
            raise invalid("steps", f"a whole number from 1 to {MOST_STEPS}", repr(steps)[:80], "choose fewer or more")
        if not isinstance(prompt, str) or len(prompt) > MOST_PROMPT:
            raise invalid("prompt", f"a text of at most {MOST_PROMPT} characters", repr(prompt)[:80], "shorten it")
        if prompt and not self.has_text:
            raise invalid("prompt", "empty: this model has no text encoder", repr(prompt)[:80], "leave it out")
        return Sampling(steps, prompt if self.has_text else None)

    def stream(
        self,
        prefix: Tensor,  # uint8 [T, H, W, 3]
        world_from_camera: Tensor,  # [T, 4, 4]
        lens: Lens,
        sampling: Sampling,
    ) -> CameraStream:
        """A drive that begins with these frames."""
        return self.pipe.stream(
            sampling.prompt,
            prefix,
            world_from_camera,
            lens,
            num_inference_steps=sampling.steps,
            guidance_scale=self.guidance,
            seed=self.seed,
            remember=REMEMBERED if self.recall else 0,
            cuda_graphs=is_bound_by_launches(self.pipe.transformer),
        )

    def clip(
        self,
        prefix: Tensor,  # uint8 [K, H, W, 3]
        cameras: Cameras,  # [T]
        sampling: Sampling,
        on_step: OnStep,
    ) -> Tensor:  # uint8 [T, H, W, 3], the prefix included
        """A video along a path: block by block if the model was trained so, else the whole clip at once."""
        sizes = {"height": self.clips.height, "width": self.clips.width}
        driven = {"window": WINDOW, "sink": SINK, "cuda_graphs": is_bound_by_launches(self.pipe.transformer)}
        return made_clip(
            self.pipe,
            cameras.count,
            cameras,
            prefix,
            on_step,
            seed=self.seed,
            prompt=sampling.prompt,
            num_inference_steps=sampling.steps,
            guidance_scale=self.guidance,
            **sizes | (driven if self.is_causal else {}),
        )[0]

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

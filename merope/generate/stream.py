"""CameraStream: video for as long as cameras come, a block of latent frames after the other.

    stream = pipe.stream("a street", prefix=nine_frames, cameras=their_poses, lens=lens, window=12, sink=3)
    frames = stream.drive(poses)     # the next 12 poses in, the next 12 frames out

A block sees the last frames of the stream and its first ones through a cache of raw keys (`adapters/causal_wan.py`).
The VAE goes on where it stopped. All that a stream remembers has a fixed size.
"""

from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from merope.adapters.attachment import attached_branch
from merope.adapters.block_passes import BlockCondition
from merope.adapters.causal_wan import attach_causal, ready_block, recalling
from merope.adapters.history import HistoryReferences
from merope.adapters.key_cache import KeyCache
from merope.adapters.recorded_passes import Passes, RecordedPasses
from merope.errors import invalid
from merope.generate.block_noise import OF_THE_BLOCK, OF_THE_PAST, block_noise
from merope.generate.conditions import Frames, check_finite, prefix_tensor
from merope.generate.history_frames import check_history
from merope.generate.recall import PastBlock, views_of_place, with_block
from merope.generate.stream_checks import (
    check_graphs,
    check_models,
    check_prefix_blocks,
    check_recall,
    check_settings,
    stream_cameras,
)
from merope.generate.stream_file import StreamSettings, StreamState, read_stream, write_stream
from merope.generate.text import Text
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Lens

if TYPE_CHECKING:
    from merope.generate.camera_video import CameraVideoPipeline


BLOCK_FRAMES = 3
"""Latent frames of a block of a model that does not say with which it was trained."""

STEPS = 50
"""Denoising steps of a model that does not say for how many it was trained."""

WINDOW, SINK = 12, 3  # latent frames that a block sees: the last ones, its own included, and the first ones


class CameraStream:
    """Made by `pipe.stream` and `pipe.resume_stream`.

    An error in `drive` leaves the stream as it was. The noise of a block comes from the seed and the block's number, so
    the same cameras give the same frames, also after `undo` and after a resume.
    """

    def __init__(
        self,
        pipe: "CameraVideoPipeline",
        settings: StreamSettings,
        lens: Lens | None,
        state: StreamState,
        cuda_graphs: bool = False,
    ) -> None:
        check_graphs(cuda_graphs, pipe)
        self.pipe, self.settings, self.lens = pipe, settings, lens
        self._state = state
        kind = RecordedPasses if cuda_graphs else Passes
        self._passes = [kind(pipe.transformer) for _ in state.texts]
        self._before: StreamState | None = None

    @property
    def frames(self) -> int:
        """RGB frames so far, the prefix included."""
        latent, stride = self._state.caches[0].count, self.pipe.strides.frames
        return 0 if latent == 0 else (latent - 1) * stride + 1

    @property
    def blocks(self) -> int:
        """Driven so far, without the prefix."""
        return self._state.blocks

    @property
    def block_frames(self) -> int:
        """RGB frames of the next block, and cameras that `drive` takes.

        12 for 3 latent frames of 4 RGB frames each; 9 where a stream begins without a prefix, because the very first
        latent frame has one RGB frame.
        """
        block, stride = self.settings.block, self.pipe.strides.frames
        return block * stride if self.frames else (block - 1) * stride + 1

    @property
    def latents(self) -> Tensor | None:  # [1, C, block, h, w]
        """Of the last block, normalised; None before the first."""
        return self._state.latents

    @property
    def recalled(self) -> tuple[int, ...]:
        """Latent frames of the stream that the last block was shown besides window and sink."""
        return self._state.recalled

    @torch.no_grad()
    def drive(
        self,
        cameras: Cameras | Tensor | None = None,  # [block_frames] or poses [block_frames, 4, 4]
        recall: int = 0,
        history: HistoryReferences | None = None,
        on_step: Callable[[int], None] | None = None,
        on_frames: Callable[[Tensor], None] | None = None,
    ) -> Tensor:  # uint8 [block_frames, H, W, 3]
        """The next block of frames, seen by these cameras.

        cameras: of every RGB frame. Poses alone (world_from_camera, metres) take the stream's lens.
        recall: at most so many latent frames of the same place, that the window has left behind, are seen besides.
        history: retrieved images for this block, for a branch that was made for them; matched with its latent frames
            0, 1, 2 (`merope.HistoryFrames`).
        on_step: called after each denoising step with how many are done; what it raises stops the block.
        on_frames: called with the frames of each latent frame as soon as they are decoded, uint8 [T, H, W, 3].
        """
        check_recall(recall, history, self.settings)
        posed = self._latent_cameras(cameras, self.block_frames)
        noise = self._noise()
        state, across = self._shown(posed, recall, history)
        blocks = self._blocks(state, noise, posed, across)
        made = self._denoised(state, noise, blocks, on_step)
        frames, after = self._finished(state, made, blocks, on_frames, self.settings.past_noise)
        self._before, self._state = self._state, replace(after, blocks=self._state.blocks + 1)
        return frames

    def undo(self) -> None:
        """Take the last block back, as if it had not been driven. One block can be taken back, not two in a row."""
        if self._before is None:
            got = "nothing driven yet" if self._state.blocks == 0 else "the last block is gone, or was before a resume"
            raise invalid("undo", "called after drive", got, "drive first; save the stream to come back to a place")
        self._state, self._before = self._before, None

    def save(self, folder: str | PathLike[str]) -> Path:
        """Write all that it takes to go on into one file, in one step; `pipe.resume_stream(folder)` reads it."""
        return write_stream(Path(folder), self.pipe, self.settings, self.lens, self._state)

    @torch.no_grad()
    def _begin(
        self,
        prefix: Tensor,  # uint8 [1, T, H, W, 3]
        cameras: Cameras | Tensor | None,
    ) -> None:
        """Take in clean first frames, block by block."""
        latents = self.pipe.encode_frames(prefix).to(self.pipe._execution_device)
        posed = self._latent_cameras(cameras, prefix.shape[1])
        for start in range(0, latents.shape[2], self.settings.block):
            own = slice(start, start + self.settings.block)
            blocks = self._blocks(self._state, latents[:, :, own], None if posed is None else posed.at(own), None)
            _, self._state = self._finished(self._state, latents[:, :, own], blocks)

    def _latent_cameras(self, given: Cameras | Tensor | None, frames: int) -> Cameras | None:
        """Those of the latent frames: of RGB frames 0, 4, 8, … of the whole stream."""
        has_branch = attached_branch(self.pipe.transformer) is not None
        seen = self._state.caches[0].cameras
        cameras = stream_cameras(given, self.lens, frames, self.settings, has_branch, seen)
        stride = self.pipe.strides.frames
        first = 0 if self.frames == 0 else stride - 1
        return None if cameras is None else cameras.at(slice(first, None, stride))

    def _shown(
        self, cameras: Cameras | None, recall: int, history: HistoryReferences | None
    ) -> tuple[StreamState, HistoryReferences | None]:
        """The state with further frames in its caches, or the references of a branch with history "ca"."""
        state, branch = replace(self._state, recalled=()), attached_branch(self.pipe.transformer)
        if history is not None:
            settings = self.settings
            check_history(history, branch, 1, settings.height, settings.width, settings.block)
            history = history.encoded(self.pipe.encode_frames)
        elif recall and cameras is not None:
            views = views_of_place(state.past, state.caches[0], cameras, recall)
            history = None if views is None else views.references()
            state = state if views is None else replace(state, recalled=views.frames)
        path = None if branch is None else branch.config["history"]
        if history is None or history.count == 0 or path == "ca":
            return state, history
        latents = history.latents.to(self.pipe._execution_device)
        times = history.moments.flatten().tolist() if path == "sa" else None
        caches = tuple(
            recalling(self.pipe.transformer, cache, latents, history.posed, text, times)
            for cache, text in zip(state.caches, state.texts, strict=True)
        )
        return replace(state, caches=caches), None

    def _blocks(
        self, state: StreamState, latents: Tensor, cameras: Cameras | None, history: HistoryReferences | None
    ) -> tuple[BlockCondition, ...]:
        """The next block before the cache of each text, for latents of this shape. All share the plans."""
        transformer = self.pipe.transformer
        block = ready_block(transformer, state.caches[0], latents.to(transformer.dtype), cameras, history)
        return tuple(block.reading(cache) for cache in state.caches)

    def _denoised(
        self,
        state: StreamState,
        latents: Tensor,
        blocks: tuple[BlockCondition, ...],
        on_step: Callable[[int], None] | None,
    ) -> Tensor:  # [1, C, block, h, w]
        """The latents of a block from its noise."""
        scheduler = self._scheduler(latents.device)
        with self.pipe.progress_bar(total=len(scheduler.timesteps)) as progress:
            for done, timestep in enumerate(scheduler.timesteps, 1):
                velocity = self._velocity(state, timestep, latents, blocks)
                latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
                progress.update()
                if on_step is not None:
                    on_step(done)
        check_finite("the sampled latents", latents)
        return latents

    def _scheduler(self, device: torch.device) -> Any:
        """At the noise levels that the model was trained for, if it is asked for so many steps; else the pipeline's."""
        levels, steps = self.pipe.denoising_levels, self.settings.steps
        if levels is not None and len(levels) == steps:
            trained: Any = FlowMatchEulerDiscreteScheduler()  # which shifts nothing
            trained.set_timesteps(sigmas=list(levels), device=device)
            return trained
        self.pipe.scheduler.set_timesteps(steps, device=device)
        self.pipe.scheduler.set_begin_index(0)
        return self.pipe.scheduler

    def _noise(self, use: int = OF_THE_BLOCK) -> Tensor:  # float32 [1, C, block, h, w]
        """Drawn on the CPU, so that a seed means the same on every machine."""
        rows, columns = self.pipe.strides.latent_size(self.settings.height, self.settings.width)
        shape = (1, self.pipe.transformer.config.in_channels, self.settings.block, rows, columns)
        return block_noise(self.settings.seed, self._state.blocks, shape, use).to(self.pipe._execution_device)

    def _velocity(
        self, state: StreamState, timestep: Tensor, latents: Tensor, blocks: tuple[BlockCondition, ...]
    ) -> Tensor:  # [1, C, block, h, w]
        """Guided by text if the scale asks for it: each text has a cache of its own."""
        predicted = [
            passes.velocity(block, latents, timestep.expand(1), text).to(latents.dtype)
            for passes, block, text in zip(self._passes, blocks, state.texts, strict=True)
        ]
        if len(predicted) == 1:
            return predicted[0]
        conditioned, unconditioned = predicted
        return unconditioned + self.settings.guidance * (conditioned - unconditioned)

    def _finished(
        self,
        state: StreamState,
        latents: Tensor,  # [1, C, block, h, w]
        blocks: tuple[BlockCondition, ...],
        on_frames: Callable[[Tensor], None] | None = None,
        past_noise: float = 0.0,
    ) -> tuple[Tensor, StreamState]:  # uint8 [T, H, W, 3]
        """The frames of a block, and what the stream remembers after it."""
        frames, vae_past = self.pipe.decode_block_frames(latents, state.vae_past, on_frames)
        seen = torch.lerp(latents, self._noise(OF_THE_PAST), past_noise) if past_noise else latents
        caches = tuple(
            passes.commit(cache, block, seen, text, past_noise)
            for passes, cache, block, text in zip(self._passes, state.caches, blocks, state.texts, strict=True)
        )
        past, cameras = state.past, blocks[0].given
        if self.settings.remember and cameras is not None:
            own = PastBlock(state.caches[0].count, latents.cpu(), cameras.to("cpu"))
            past = with_block(past, own, self.settings.remember)
        return frames, replace(state, caches=caches, vae_past=vae_past, latents=latents, past=past)


def open_stream(
    pipe: "CameraVideoPipeline",
    prompt: str | None = None,
    prefix: Frames | None = None,
    cameras: Cameras | Tensor | None = None,
    lens: Lens | None = None,
    *,
    window: int = WINDOW,
    sink: int = SINK,
    block: int | None = None,
    negative_prompt: str | None = None,
    height: int | None = None,
    width: int | None = None,
    num_inference_steps: int | None = None,
    guidance_scale: float = 5.0,
    seed: int = 0,
    remember: int = 0,
    past_noise: float = 0.0,
    prompt_embeds: Tensor | None = None,  # [1, L, text_dim]
    negative_prompt_embeds: Tensor | None = None,  # [1, L, text_dim]
    max_sequence_length: int = 512,
    cuda_graphs: bool = False,
) -> CameraStream:
    """A stream of one video, ready for `drive`.

    prefix: clean first frames, uint8 [T, H, W, 3] or PIL images: 9, 21, … of them, whole blocks. None: from noise.
    cameras: of every frame of the prefix, or their poses [T, 4, 4] for which `lens` is taken.
    lens: of all poses that come without one, here and in `drive`.
    window, sink, block: in latent frames. A block sees the last `window`, itself included, and the first `sink`.
        A block is as the model was trained (`pipe.causal_block_frames`), or 3.
    num_inference_steps: of every block. None: as many as the model was trained for (`pipe.denoising_levels`), or 50.
    remember: latent frames that are kept as latents, for `drive(…, recall=n)`.
    past_noise: level of noise that covers every finished block before later blocks see it. It hides faults, so that
        they do not grow from block to block, and details. For models trained with `objective.past_noise`.
    height, width: those of the prefix, or else 288 × 512.
    cuda_graphs: record the launches of a pass once the window is full, and replay them. For small models, whose passes
        are bound by their launches; it takes the memory of the cache once more.

    The model becomes causal (`merope.attach_causal`); its other calls stay what they are.
    """
    clean = None if prefix is None else prefix_tensor(prefix)
    block = pipe.causal_block_frames or BLOCK_FRAMES if block is None else block
    steps = len(pipe.denoising_levels or ()) or STEPS if num_inference_steps is None else num_inference_steps
    size = (288, 512) if clean is None else (clean.shape[2], clean.shape[3])
    settings = StreamSettings(
        height or size[0], width or size[1], window, sink, block, steps, guidance_scale, seed, remember, past_noise
    )
    text = Text(prompt, negative_prompt, prompt_embeds, negative_prompt_embeds)
    check_models(pipe)
    check_settings(pipe, settings, text)
    KeyCache(window, sink, block)  # which checks them
    if clean is not None:
        check_prefix_blocks(clean, pipe.strides, settings)
    elif cameras is not None:
        raise invalid("cameras", "None without a prefix", "cameras", "pass them to drive, with the block they are of")
    attach_causal(pipe.transformer)
    pipe._guidance_scale = guidance_scale  # which decides what is embedded
    embedded = pipe._embedded(text, 1, max_sequence_length)
    texts = (embedded.positive,) if embedded.negative is None else (embedded.positive, embedded.negative)
    state = StreamState(tuple(KeyCache(window, sink, block) for _ in texts), texts)
    stream = CameraStream(pipe, settings, lens, state, cuda_graphs)
    if clean is not None:
        stream._begin(clean, cameras)
    return stream


def resume_stream(pipe: "CameraVideoPipeline", folder: str | PathLike[str], cuda_graphs: bool = False) -> CameraStream:
    """The stream that `stream.save(folder)` wrote; it goes on exactly, with the same model and scheduler.

    cuda_graphs: as in `open_stream`.
    """
    check_models(pipe)
    settings, lens, state = read_stream(Path(folder), pipe)
    attach_causal(pipe.transformer)
    return CameraStream(pipe, settings, lens, state, cuda_graphs)

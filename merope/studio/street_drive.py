"""One drive of one page: a stream that goes where it is steered, from the first frames of a street or a video on."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from merope.studio.given_video import GivenVideo
from merope.studio.recording import Recording
from merope.studio.steering import Controls, controls_of, steered
from merope.studio.street_view import StreetView, Where, jpeg, on_the_ground
from merope.studio.studio_model import Sampling, StudioModel

Beginning = StreetView | GivenVideo


@dataclass(frozen=True, eq=False)
class Block:
    """Cameras that were commanded, what was held at each, and the frames of them that are made so far."""

    first: int
    frames: Tensor  # uint8 [T, H, W, 3]
    world_from_camera: Tensor  # [T, 4, 4]
    held: list[Controls]
    seconds: float  # since it was begun

    @property
    def numbers(self) -> list[int]:
        return list(range(self.first, self.first + len(self.frames)))


@dataclass(frozen=True, eq=False)
class Sight:
    """What some cameras of a block would truly see, and where the generated ones really were."""

    frames: list[int]
    true: dict[int, bytes]  # JPEG by frame
    commanded: Tensor  # [T, 4, 4]
    recovered: Tensor  # [T, 4, 4]
    valid: Tensor  # bool [T] where a pose was found

    @property
    def found(self) -> list[Where]:
        is_found = dict(zip(self.frames, self.valid.tolist(), strict=True))
        return [where for where in on_the_ground(self.recovered, self.frames) if is_found[where.frame]]

    @property
    def lost(self) -> list[int]:
        return [frame for frame, is_found in zip(self.frames, self.valid.tolist(), strict=True) if not is_found]

    @property
    def off_m(self) -> float | None:
        """Between command and recovery at the last pose found."""
        off_m = (self.recovered[:, :3, 3] - self.commanded[:, :3, 3]).norm(dim=-1)[self.valid]
        return float(off_m[-1]) if len(off_m) else None


class StreetDrive:
    """Its calls but `look` run the model and must not overlap with another's."""

    def __init__(self, model: StudioModel, beginning: Beginning, sampling: Sampling, folder: Path) -> None:
        self.model, self.beginning, self.sampling = model, beginning, sampling
        began_s, count = time.perf_counter(), model.first_frames
        prefix, poses = beginning.first(count)
        self._stream = model.stream(prefix, poses, beginning.lens, sampling)
        self.recording = Recording(folder / "drive.mp4", model.clips.frame_rate_hz, beginning.lens)
        self.recording.add(prefix, poses)
        held = controls_of(poses, model.clips.frame_rate_hz)
        self.given = Block(0, prefix, poses, held, time.perf_counter() - began_s)
        self._held = [held[-1]]  # after each block
        self.can_undo = False
        self.sights: list[Sight] = []  # that were shown

    @property
    def street(self) -> StreetView | None:
        """Where the truth is known."""
        return self.beginning if isinstance(self.beginning, StreetView) else None

    @property
    def block_s(self) -> float:
        """How long the next block is to be played."""
        return self._stream.block_frames / self.model.clips.frame_rate_hz

    def block(self, target: Controls, on_step: Callable[[int], None], show: Callable[[Block], None]) -> Block:
        """The next frames, where this steering leads. They are shown, a few at a time, before the block is whole."""
        began_s, first = time.perf_counter(), self.recording.frames
        last, rate_hz = self.recording.poses[-1], self.model.clips.frame_rate_hz
        poses, held = steered(last, self._held[-1], target, self._stream.block_frames, rate_hz)
        made = 0

        def show_part(frames: Tensor) -> None:  # uint8 [T, H, W, 3]
            nonlocal made
            own = slice(made, made + len(frames))
            show(Block(first + made, frames, poses[own], held[own], time.perf_counter() - began_s))
            made += len(frames)

        frames = self._stream.drive(poses, self.model.recall, on_step=on_step, on_frames=show_part)
        try:
            self.recording.add(frames, poses)
        except OSError:  # the disk is full
            self._stream.undo()
            raise
        self._held = [self._held[-1], held[-1]]
        self.can_undo = True
        return Block(first, frames, poses, held, time.perf_counter() - began_s)

    def undo(self) -> int:
        """Take the last block back; the number of frames that are left."""
        self._stream.undo()
        self.recording.take_back()
        self._held.pop()
        self.can_undo = False
        return self.recording.frames

    def forget_sights(self, left: int) -> None:
        """Those of frames that are not among the first `left`."""
        self.sights = [sight for sight in self.sights if sight.frames[0] < left]

    def look(self, street: StreetView, block: Block) -> Sight:
        """Once for every latent frame: as often as the model is told where the camera is."""
        own = slice(len(block.frames) - 1, None, -self.model.pipe.strides.frames)
        picked = sorted(range(len(block.frames))[own])
        poses, numbers = block.world_from_camera[picked], [block.first + k for k in picked]
        seen = street.seen(poses)
        true = {n: jpeg((255.0 * image).round().byte()) for n, image in zip(numbers, seen.image, strict=True)}
        return Sight(numbers, true, poses, *street.recovered(block.frames[picked], poses, seen))

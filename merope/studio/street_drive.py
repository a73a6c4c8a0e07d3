"""One drive of one page: a stream that goes where it is steered, from the first frames of a street on."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from merope.studio.recording import Recording
from merope.studio.steering import Controls, controls_of, steered
from merope.studio.street_view import StreetView, Where, jpeg, on_the_ground
from merope.studio.studio_model import StudioModel


@dataclass(frozen=True, eq=False)
class Block:
    """Frames that were made, the cameras that they were commanded by, and what was held at each."""

    first: int
    frames: Tensor  # uint8 [T, H, W, 3]
    world_from_camera: Tensor  # [T, 4, 4]
    held: list[Controls]
    seconds: float

    @property
    def numbers(self) -> list[int]:
        return list(range(self.first, self.first + len(self.frames)))


@dataclass(frozen=True, eq=False)
class Sight:
    """What some cameras of a block would truly see, and where the generated ones really were."""

    true: dict[int, bytes]  # JPEG by frame
    found: list[Where]
    lost: list[int]  # frames without a pose
    off_m: float | None  # between command and recovery at the last pose found


class StreetDrive:
    """Its calls but `look` run the model and must not overlap with another's."""

    def __init__(self, model: StudioModel, view: StreetView, folder: Path) -> None:
        self.model, self.view = model, view
        began_s, count = time.perf_counter(), model.first_frames
        poses = view.start(count)
        prefix = view.pictures(poses)
        self._stream = model.stream(prefix, poses, view.lens)
        self.recording = Recording(folder / "drive.mp4", model.clips.frame_rate_hz, view.lens)
        self.recording.add(prefix, poses)
        held = controls_of(poses, model.clips.frame_rate_hz)
        self.first = Block(0, prefix, poses, held, time.perf_counter() - began_s)
        self._held = [held[-1]]  # after each block
        self.can_undo = False

    def block(self, target: Controls, on_step: Callable[[int], None]) -> Block:
        """The next frames, where this steering leads."""
        began_s, first = time.perf_counter(), self.recording.frames
        last, rate_hz = self.recording.poses[-1], self.model.clips.frame_rate_hz
        poses, held = steered(last, self._held[-1], target, self._stream.block_frames, rate_hz)
        frames = self._stream.drive(poses, on_step=on_step)
        self.recording.add(frames, poses)
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

    def look(self, block: Block) -> Sight:
        """Once for every latent frame: as often as the model is told where the camera is."""
        own = slice(len(block.frames) - 1, None, -self.model.pipe.strides.frames)
        picked = sorted(range(len(block.frames))[own])
        poses, numbers = block.world_from_camera[picked], [block.first + k for k in picked]
        seen = self.view.seen(poses)
        true = {n: jpeg((255.0 * image).round().byte()) for n, image in zip(numbers, seen.image, strict=True)}
        recovered, valid = self.view.recovered(block.frames[picked], poses, seen)
        is_found = dict(zip(numbers, valid.tolist(), strict=True))
        found = [where for where in on_the_ground(recovered, numbers) if is_found[where.frame]]
        off_m = (recovered[:, :3, 3] - poses[:, :3, 3]).norm(dim=-1)[valid]
        return Sight(true, found, [n for n in numbers if not is_found[n]], float(off_m[-1]) if len(off_m) else None)

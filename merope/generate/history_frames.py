"""Retrieved frames for a clip to be generated: RGB images, their cameras, and the frames they were matched with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from merope.adapters.camera_branch import CameraBranch
from merope.adapters.history import HistoryReferences
from merope.curation.retrieve import HISTORY_TIME_TAG
from merope.errors import invalid
from merope.generate.conditions import Frames, prefix_tensor
from merope.geometry.cameras import Cameras


@dataclass(frozen=True, eq=False)
class HistoryFrames:
    """R images of the place of a clip, of the clip's size; with a batch dimension, R for each of B clips.

    cameras: in the same world as the clip's cameras.
    matched: index of the latent frame that each image was matched with; the model sees it plus 100.
    """

    frames: Frames  # uint8 [R, H, W, 3] or [B, R, H, W, 3]
    cameras: Cameras  # [R] or [B, R]
    matched: Tensor | Sequence[float]  # [R] or [B, R]

    def images(self) -> Tensor:  # uint8 [B or 1, R, H, W, 3]
        """The images in one layout."""
        return prefix_tensor(self.frames, "history.frames")

    def check(self, height: int, width: int, latent_frames: int) -> None:
        """Refuse images of another size, and matches with frames that the clip does not have."""
        lens, images = self.cameras.lens, self.images()
        for name, got in (("frames", tuple(images.shape[2:4])), ("cameras.lens", (lens.height, lens.width))):
            if got != (height, width):
                fix = "scale the images, and the lens alike with merope.geometry.lens_batches.resized"
                expected = f"of {width}×{height}, the size of the video"
                raise invalid(f"history.{name}", expected, f"{got[1]}×{got[0]}", fix)
        matched = torch.as_tensor(self.matched)
        if not bool(((matched >= 0) & (matched < latent_frames)).all()):
            fix = f"give latent frames; {HISTORY_TIME_TAG:g} is added to them"
            raise invalid("history.matched", f"in [0, {latent_frames})", matched.tolist(), fix)
        self.encoded(lambda single: torch.zeros(len(single), 1, 1, 1, 1))  # refuses numbers that do not agree

    def encoded(
        self,
        encode: Callable[[Tensor], Tensor],  # uint8 [B, T, H, W, 3] -> [B, C, T_latent, h, w]
    ) -> HistoryReferences:
        """The images as latents, each encoded as a video of one frame, with their tagged times."""
        images = self.images()
        latents = encode(images.flatten(0, 1)[:, None])  # [B·R, C, 1, h, w]
        by_clip = latents.squeeze(2).unflatten(0, images.shape[:2]).transpose(1, 2)
        times = torch.as_tensor(self.matched, dtype=torch.float64) + HISTORY_TIME_TAG
        return HistoryReferences(by_clip, self.cameras, times)


def check_history(
    history: HistoryFrames | HistoryReferences,
    branch: CameraBranch | None,
    batch: int,
    height: int,
    width: int,
    latent_frames: int,
) -> None:
    """Refuse a history that the branch does not take, or that does not fit the clips."""
    if branch is None or branch.config["history"] is None:
        fix = 'use a branch of CameraBranchConfig(history="sa") or "ca"'
        raise invalid("history", "None for a model that takes none", "retrieved frames", fix)
    if isinstance(history, HistoryFrames):
        history.check(height, width, latent_frames)
    clips = history.images().shape[0] if isinstance(history, HistoryFrames) else history.latents.shape[0]
    if clips not in (1, batch):
        raise invalid("history", f"one set for all clips, or one for each of {batch}", clips, "pass as many")

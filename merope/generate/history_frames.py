"""Retrieved images for a clip to be generated, with their cameras and the frames that they were matched with."""

from collections.abc import Sequence

import torch
from torch import Tensor

from merope.adapters.camera_branch import CameraBranch
from merope.adapters.history import HistoryReferences
from merope.curation.retrieve import HISTORY_TIME_TAG
from merope.errors import invalid
from merope.generate.conditions import Frames, check_size, prefix_tensor
from merope.geometry.cameras import Cameras


def HistoryFrames(
    frames: Frames,  # uint8 [R, H, W, 3] or [B, R, H, W, 3], of the clip's size
    cameras: Cameras,  # [R] or [B, R], in the same world as the clip's
    matched: Tensor | Sequence[float],  # [R] or [B, R], latent frames of the clip
) -> HistoryReferences:
    """R images of the place of a clip, for the pipeline to encode; with a batch dimension, R for each of B clips."""
    images = prefix_tensor(frames, "history.frames").permute(0, 4, 1, 2, 3)
    return HistoryReferences(images, cameras, torch.as_tensor(matched, dtype=torch.float64) + HISTORY_TIME_TAG)


def check_history(
    history: HistoryReferences, branch: CameraBranch | None, batch: int, height: int, width: int, latent_frames: int
) -> None:
    """Refuse a history that the branch does not take, or that does not fit the clips."""
    if branch is None or branch.config["history"] is None:
        fix = 'use a branch of CameraBranchConfig(history="sa") or "ca"'
        raise invalid("history", "None for a model that takes none", "retrieved frames", fix)
    clips = len(history.latents)
    if clips not in (1, batch):
        raise invalid("history", f"one set for all clips, or one for each of {batch}", clips, "pass as many")
    if not history.is_encoded:
        _check_images(history, height, width, latent_frames)


def _check_images(history: HistoryReferences, height: int, width: int, latent_frames: int) -> None:
    """Refuse images of another size, and matches with frames that the clip does not have."""
    lens, size = history.posed.lens, tuple(history.latents.shape[-2:])
    check_size("history.frames", size, height, width)
    check_size("history.cameras.lens", (lens.height, lens.width), height, width)
    matched = history.moments - HISTORY_TIME_TAG
    if not bool(((matched >= 0) & (matched < latent_frames)).all()):
        fix = f"give latent frames; {HISTORY_TIME_TAG:g} is added to them"
        raise invalid("history.matched", f"in [0, {latent_frames})", matched.tolist(), fix)

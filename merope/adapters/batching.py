"""Cameras, times and latents of one batch: which clip serves which sample, and one camera per latent frame."""

import torch

from merope.encodings.tokens import Times
from merope.errors import invalid
from merope.geometry.cameras import Cameras


def check_frame_count(cameras: Cameras, latent_frames: int, latent_stride: int) -> None:
    """One camera per latent frame, nothing else: cameras of RGB frames would be taken for later times in silence."""
    if cameras.count == latent_frames:
        return
    fix = f"latent frame n has the camera of RGB frame {latent_stride}n"
    if latent_stride == 1:
        fix = "in a model of pixels every frame has a camera of its own"
    elif cameras.count == latent_stride * (latent_frames - 1) + 1:
        fix = f"these are as many as RGB frames: pass those of frames 0, {latent_stride}, … (Clip.latent_cameras())"
    raise invalid("cameras", f"one per latent frame, {latent_frames}", cameras.count, fix)


def check_whole_batch(cameras: Cameras, batch: int) -> None:
    """For models whose pipelines put both passes of guidance into one batch: one clip, or one per sample.

    The passes follow each other (a b a b), where several videos of a prompt are neighbours (a a b b).
    """
    clips = cameras.world_from_camera.shape[0] if cameras.world_from_camera.ndim == 4 else 1
    if clips not in (1, batch):
        fix = "with guidance, its pipelines double the batch: pass all clips twice in a row, or one clip a call"
        raise invalid("cameras", f"of one clip or of a batch {batch} for this model", clips, fix)


def matched_batch(cameras: Cameras, times: Times | None, batch: int) -> tuple[Cameras, Times | None]:
    """Cameras (and times) for a batch of latents: shared, one clip per sample, or each clip for n neighbours."""
    clips = cameras.world_from_camera.shape[0] if cameras.world_from_camera.ndim == 4 else 1
    if batch % clips:
        fix = "pass one clip for all samples or one per sample"
        raise invalid("cameras", f"of a batch that divides the latents' {batch}", clips, fix)
    copies = batch // clips
    if clips == 1 or copies == 1:
        return cameras, times
    if times is not None and torch.as_tensor(times).ndim == 2:
        times = torch.as_tensor(times).repeat_interleave(copies, dim=0)
    return cameras.repeated(copies), times

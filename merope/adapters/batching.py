"""Cameras, times and latents of one batch: which clip serves which sample, and one camera per latent frame.

The views of a rig are neighbouring samples of a batch: sample b · views + v is view v of clip b.
"""

import torch
from torch import Tensor

from merope.encodings.tokens import Times
from merope.errors import invalid
from merope.geometry.cameras import Cameras


def check_frame_count(cameras: Cameras, latent_frames: int, latent_stride: int) -> None:
    """One camera per latent frame, nothing else: cameras of RGB frames would be taken for later times in silence."""
    if cameras.moments == latent_frames:
        return
    fix = f"latent frame n has the camera of RGB frame {latent_stride}n"
    if latent_stride == 1:
        fix = "in a model of pixels every frame has a camera of its own"
    elif cameras.moments == latent_stride * (latent_frames - 1) + 1:
        fix = f"these are as many as RGB frames: pass those of frames 0, {latent_stride}, … (Clip.latent_cameras())"
    raise invalid("cameras", f"one per latent frame, {latent_frames}", cameras.moments, fix)


def clip_origin(cameras: Cameras, leading: int) -> Tensor:  # [(B,) 1, 4, 4]
    """world_from_camera of a clip's first camera, behind so many of references."""
    return (cameras.at(slice(leading, None)) if leading else cameras).origin()


def clips_of_batch(cameras: Cameras, batch: int) -> int:
    """Clips among the samples of a batch, which holds whole rigs."""
    if batch % cameras.views:
        fix = "give the latents of all views, those of a clip next to each other"
        raise invalid("latents", f"a batch of a multiple of the rig's {cameras.views} views", batch, fix)
    return batch // cameras.views


def rig_times(cameras: Cameras, times: Times | None) -> Times | None:
    """Times of a rig's moments, [T] or [b, T], for its cameras: all views of a moment have the same."""
    if cameras.views == 1:
        return times
    own = torch.arange(cameras.moments) if times is None else torch.as_tensor(times)
    return torch.cat([own] * cameras.views, dim=-1)


def check_whole_batch(cameras: Cameras, batch: int) -> None:
    """For models whose pipelines put both passes of guidance into one batch: one clip, or one per sample.

    The passes follow each other (a b a b), where several videos of a prompt are neighbours (a a b b).
    """
    clips = cameras.world_from_camera.shape[0] if cameras.world_from_camera.ndim == 4 else 1
    if clips not in (1, batch):
        fix = "with guidance, its pipelines double the batch: pass all clips twice in a row, or one clip a call"
        raise invalid("cameras", f"of one clip or of a batch {batch} for this model", clips, fix)


def views_as_clips(cameras: Cameras, times: Times | None, batch: int) -> tuple[Cameras, Times | None]:
    """The cameras of a rig for every sample of a batch, as if each view were a clip of its own."""
    matched, times = matched_batch(cameras.batched(), times, clips_of_batch(cameras, batch))
    if times is not None and torch.as_tensor(times).ndim == 2:
        times = torch.as_tensor(times).repeat_interleave(batch // len(times), dim=0)
    return matched.repeated(batch // cameras.views // len(matched.world_from_camera)).by_view(), times


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

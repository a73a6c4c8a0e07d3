"""Scores of clips of the procedural world: poses in metres against the command, PSNR against what would be seen."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from merope.evaluate.auc import PairErrors, pair_errors
from merope.evaluate.estimators.render_anchored import RenderAnchoredEstimator
from merope.evaluate.estimators.structure_from_motion import ColmapEstimator
from merope.evaluate.metrics import PoseMetrics, pose_metrics
from merope.evaluate.seen_before import shown_by_references_alone
from merope.formats.video import as_bytes
from merope.geometry.cameras import Cameras
from merope.geometry.lens_batches import resized
from merope.geometry.trajectories import turn_by
from merope.world.commanded import CommandedClip, stretched
from merope.world.render import Render, render

FLOOR_YAW_RAD, FLOOR_STRETCH, FLOOR_NOISE = math.radians(2.0), 1.03, 0.04
"""How far from the command, and how noisy (of full scale), the true renders are that the estimator is tried on."""

LEAST_ERROR = 255.0**2 * 1e-6
"""Mean square of 60 dB, the most that is told."""

LEAST_RECALLED = 100
"""Pixels, of those that are looked at, in which a clip must show what references alone show."""


@dataclass(frozen=True, eq=False)
class Score:
    """One clip."""

    seed: int  # of its world
    manoeuvre: str
    metrics: PoseMetrics
    pairs: PairErrors
    psnr_db: float  # mean over generated frames
    late_psnr_db: float  # of the last third of the clip
    recovered: Tensor  # [T, 4, 4]
    valid: Tensor  # bool [T], frames with a recovered pose
    colmap: Mapping[str, float | None] | None = None  # what `colmap_score` says, if it was asked
    recalled_psnr_db: float | None = None  # what `recalled_psnr_db` says, if it was asked

    @property
    def name(self) -> str:
        return f"world-{self.seed}-{self.manoeuvre}"

    def as_dict(self) -> dict[str, object]:
        """Every number of the clip, for JSON."""
        chances = len(self.pairs.rotation_deg)
        auc = {f"auc_{tau}": 100.0 * self.pairs.hits(tau) / (tau * chances) for tau in (3, 10)}
        plain = self.metrics.as_dict() | auc | {"psnr_db": self.psnr_db, "late_psnr_db": self.late_psnr_db}
        plain |= {} if self.recalled_psnr_db is None else {"recalled_psnr_db": self.recalled_psnr_db}
        lost = self.metrics.frames - self.metrics.valid_frames
        plain |= {f"colmap_{name}": value for name, value in (self.colmap or {}).items()}
        return {"world": self.seed, "manoeuvre": self.manoeuvre, "failed_frames": lost} | plain


def score_clip(clip: CommandedClip, video: Tensor, prefix_frames: int) -> Score:  # uint8 [T, H, W, 3]
    """Recover the poses of a video of a world and compare them with the command.

    The prefix was given and is always right: a clip of which nothing else was recovered has failed.
    """
    return _score(clip, video, clip.cameras.world_from_camera, prefix_frames)


def score_floor(clip: CommandedClip, prefix_frames: int, every: int = 1) -> Score:
    """What the estimator alone gets wrong: a true, noisy render of a path that strays from the command.

    A video that obeys exactly would be compared with itself and prove nothing. Frames are measured one by one, so that
    `every` n-th of them tells as much of a long clip in less time.
    """
    clip, prefix_frames = _thinned(clip, every), -(-prefix_frames // every)
    turned = turn_by(clip.cameras.world_from_camera, FLOOR_YAW_RAD, prefix_frames)
    path = stretched(turned, FLOOR_STRETCH)
    height, width = clip.true.shape[1:3]
    image = render(clip.world, Cameras(path, clip.cameras.lens).to(clip.world.device), height, width).image.cpu()
    noise = FLOOR_NOISE * torch.randn(image.shape, generator=torch.Generator().manual_seed(clip.seed))
    return _score(clip, as_bytes((image + noise).clamp(0.0, 1.0)), path, prefix_frames)


def _thinned(clip: CommandedClip, every: int) -> CommandedClip:
    kept = slice(None, None, every)
    seen = Render(clip.seen.image[kept], clip.seen.depth_m[kept], clip.seen.valid[kept], clip.seen.world)
    return replace(clip, cameras=clip.cameras.at(kept), true=clip.true[kept], seen=seen)


def _score(
    clip: CommandedClip,
    video: Tensor,  # uint8 [T, H, W, 3]
    world_from_camera: Tensor,  # [T, 4, 4] where its cameras should be
    prefix_frames: int,
) -> Score:
    estimate = RenderAnchoredEstimator(clip.world, clip.cameras, clip.seen)(video)
    valid = estimate.valid & estimate.valid[prefix_frames:].any()
    late = slice(2 * len(video) // 3, None)
    return Score(
        seed=clip.seed,
        manoeuvre=clip.manoeuvre,
        metrics=pose_metrics(world_from_camera, estimate.world_from_camera, valid, is_metric=True),
        pairs=pair_errors(world_from_camera, estimate.world_from_camera, valid, given_frames=prefix_frames),
        psnr_db=psnr_db(video[prefix_frames:], clip.true[prefix_frames:]),
        late_psnr_db=psnr_db(video[late], clip.true[late]),
        recovered=estimate.world_from_camera,
        valid=valid,
    )


def colmap_score(clip: CommandedClip, video: Tensor) -> dict[str, float | None]:  # uint8 [T, H, W, 3]
    """What COLMAP makes of a video, which knows its pictures and lens and nothing of the world.

    percent: of all frames that it registers. Errors are those of its path, laid on the command by a similarity.
    """
    found = ColmapEstimator()(video, resized(clip.cameras.lens, video.shape[2], video.shape[1]))
    errors = pose_metrics(clip.cameras.world_from_camera, found.world_from_camera, found.valid)
    known = {name: getattr(errors, name) for name in ("rot_deg", "tr_percent")}
    registered = {"percent": 100.0 * float(found.valid.float().mean())}
    return registered | {name: None if math.isnan(value) else value for name, value in known.items()}


def recalled_psnr_db(
    clip: CommandedClip,
    video: Tensor,  # uint8 [T, H, W, 3]
    prefix_frames: int,
    references: Render,
    reference_cameras: Cameras,  # [R]
) -> float | None:
    """Peak signal-to-noise ratio where a frame shows what references show and the prefix does not.

    That is consistency with what was seen before: without the references it cannot be known. None where such pixels are
    too few to tell.
    """
    alone = shown_by_references_alone(clip.seen, clip.cameras, prefix_frames, references, reference_cameras)
    if int(alone.sum()) < LEAST_RECALLED:
        return None
    error = (video[alone].double() - clip.true[alone].double()).square().mean().clamp(min=LEAST_ERROR)
    return float(10.0 * torch.log10(255.0**2 / error))


def psnr_db(video: Tensor, true: Tensor) -> float:  # uint8 [T, H, W, 3] twice
    """Mean over frames of the peak signal-to-noise ratio."""
    return float(frame_psnr_db(video, true).mean())


def frame_psnr_db(video: Tensor, true: Tensor) -> Tensor:  # uint8 [T, H, W, 3] twice -> [T]
    """Peak signal-to-noise ratio of every frame, at most 60 dB."""
    squares = (video.short() - true.short()).int().square_().flatten(1).sum(dim=1)  # int64: exact, as in float64
    error = (squares.double() / video[0].numel()).clamp(min=LEAST_ERROR)
    return 10.0 * torch.log10(255.0**2 / error)

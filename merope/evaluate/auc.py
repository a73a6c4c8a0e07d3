"""Pairwise pose AUC: the share of frame pairs whose relative motion is right within τ degrees."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from merope.errors import invalid
from merope.evaluate.metrics import NORM_FLOOR, FlagArray, PoseArray, checked_paths, relative_to_first
from merope.geometry.poses import relative, rotation_angle

VANISHING = 1e-6
"""A translation below this share of its path's extent has no direction."""

PosePair = tuple[PoseArray, PoseArray] | tuple[PoseArray, PoseArray, FlagArray | None]


@dataclass(frozen=True, eq=False)
class PairErrors:
    """Errors of the pairs of frames i < j of one clip, from which the AUC at any threshold follows.

    Infinite where there is none: both for pairs with a frame that the estimator failed on, the direction where either
    translation vanishes. Such pairs count, and are below no threshold.
    """

    rotation_deg: Tensor  # [P] float64
    direction_deg: Tensor  # [P] float64, 0 to 90: the sign of a translation is not looked at

    @property
    def joint_deg(self) -> Tensor:  # [P]
        """The larger of the two."""
        return torch.maximum(self.rotation_deg, self.direction_deg)

    def hits(self, tau: int) -> int:
        """Pairs below k degrees, summed over k = 1 … τ: AUC@τ is this over τ · P."""
        thresholds = torch.arange(1, tau + 1, dtype=torch.float64)
        return int((self.joint_deg[:, None] < thresholds).sum())


def pair_errors(
    commanded: PoseArray,  # [T, 4, 4] world_from_camera
    estimated: PoseArray,  # [T, 4, 4] world_from_camera, any unit
    valid: FlagArray | None = None,  # bool [T]
    given_frames: int = 0,
) -> PairErrors:
    """Errors of the relative motions T_{i→j} of all T (T − 1) / 2 pairs of frames.

    Pairs of the first `given_frames` are left out: a model that continues them did not make their motion.
    """
    commanded, estimated, seen = checked_paths(commanded, estimated, valid)
    if len(seen) < 2:
        raise invalid("commanded", "a path of at least two frames", f"{len(seen)}", "a single frame has no motion")
    if not 0 <= given_frames < len(seen):
        raise invalid("given_frames", f"in [0, {len(seen)})", given_frames, "some frame must have been generated")
    i, j = torch.triu_indices(len(seen), len(seen), offset=1)
    i, j = i[j >= given_frames], j[j >= given_frames]
    here, there = relative(commanded[i], commanded[j]), relative(estimated[i], estimated[j])
    rotation = torch.rad2deg(rotation_angle(here[:, :3, :3], there[:, :3, :3]))
    direction = torch.rad2deg(_line_angle(here[:, :3, 3], there[:, :3, 3]))
    vanishes = _vanishes(here, commanded) | _vanishes(there, estimated[seen])
    failed = ~(seen[i] & seen[j])
    return PairErrors(rotation.masked_fill(failed, math.inf), direction.masked_fill(failed | vanishes, math.inf))


def _line_angle(a: Tensor, b: Tensor) -> Tensor:  # [P, 3] twice -> [P] rad, 0 to π/2
    """Angle between two undirected lines; atan2 where the paper writes arccos, for its digits at small angles."""
    return torch.atan2(torch.linalg.cross(a, b).norm(dim=-1), (a * b).sum(-1).abs())


def _vanishes(motion: Tensor, path: Tensor) -> Tensor:  # [P, 4, 4], [n, 4, 4] -> bool [P]
    if len(path) == 0:
        return torch.ones(len(motion), dtype=torch.bool)
    extent = float(relative_to_first(path)[:, :3, 3].norm(dim=-1).max())
    return motion[:, :3, 3].norm(dim=-1) <= max(VANISHING * extent, NORM_FLOOR)


def pose_auc(pairs: Sequence[PosePair | PairErrors], tau: int = 10, per_clip: bool = False) -> float:  # percent
    """AUC@τ over clips given as (commanded, estimated), (commanded, estimated, valid) or `pair_errors` of them.

    The pairs of all clips are pooled, as in the paper; `per_clip` gives every clip the same weight instead, as
    evaluations of multi-view reconstruction do. Keep the `PairErrors` to ask for several thresholds.
    """
    errors = [_errors_of(clip) for clip in pairs]
    hits, counts = auc_counts(errors, tau)
    return 100.0 * float((hits / counts).mean() if per_clip else hits.sum() / counts.sum())


def _errors_of(clip: PosePair | PairErrors) -> PairErrors:
    """The errors of one clip of `pose_auc`; a bare path is refused, its poses would be taken for two paths."""
    if isinstance(clip, PairErrors):
        return clip
    if not isinstance(clip, (tuple, list)) or len(clip) < 2:
        expected = "a list of (commanded, estimated), one for each clip"
        raise invalid("pairs", expected, f"a {type(clip).__name__} for a clip", "pass [(commanded, estimated)]")
    return pair_errors(*clip)


def auc_counts(errors: Sequence[PairErrors], tau: int) -> tuple[Tensor, Tensor]:  # [clips] float64 twice
    """Hits and chances (τ · pairs) of every clip: what AUC@τ is a ratio of."""
    if isinstance(tau, bool) or not isinstance(tau, int) or tau < 1:
        got = tau if isinstance(tau, (int, float)) else type(tau).__name__
        raise invalid("tau", "a whole number of degrees ≥ 1", got, "the paper uses 3 and 10, one in each call")
    if not errors:
        raise invalid("pairs", "at least one clip", "none", "pass [(commanded, estimated), …]")
    hits = torch.tensor([clip.hits(tau) for clip in errors], dtype=torch.float64)
    counts = torch.tensor([tau * len(clip.rotation_deg) for clip in errors], dtype=torch.float64)
    return hits, counts

"""Pose metrics of one clip: the paper's (appendix, evaluation metrics), and what they cannot see.

Both paths are camera-to-world and are compared relative to their own first frame; nothing is rotated into place.
"""

import math
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from merope.errors import invalid
from merope.geometry.poses import check_rigid, check_shape, inverse, relative, rotation_angle

PoseArray = Tensor | NDArray[np.floating]  # [T, 4, 4] world_from_camera
FlagArray = Tensor | NDArray[np.bool_]  # [T]

NORM_FLOOR = 1e-9
"""ε₀ of the paper's max-norm. An estimate that never moves further than this is static."""
STATIC_M = 0.01
"""A commanded path that stays within a centimetre is static: dividing by its size would turn noise into scores."""
INVERTED_RATIO = 0.25

ERRORS = ("rot_deg", "rot_err", "scale", "tr_percent", "trans_err", "cammc", "ate_m", "metric_tr_percent")
STATIC_COMMAND = "static commanded path"
CLOSED_COMMAND = "commanded path ends where it began"
TOO_FEW_FRAMES = "a pose in fewer than half of the frames"


@dataclass(frozen=True)
class PoseMetrics:
    """Errors of one clip. A number that is undefined is NaN, and `undefined` says why.

    Frames without an estimate (valid False) are left out of the means; the sums CamMC, RotErr and TransErr are T − 1
    times the mean over the other frames, which is the paper's sum when none is missing. So missing frames neither lower
    nor raise a sum by their number, and `valid_frames` of `frames` says how much was seen.
    """

    rot_deg: float  # mean geodesic error over t ≥ 2, degrees
    tr_percent: float  # mean centre error over t ≥ 2 after s*, percent of the commanded chord
    scale: float  # s*, commanded metres per unit of the estimate; 0 for a static estimate
    cammc: float  # sum of Frobenius errors of [R | o / max ‖o‖]
    rot_err: float  # sum of geodesic errors, radians
    trans_err: float  # sum of centre errors after each path's own max-norm
    chord_m: float  # distance from the first to the last commanded camera
    ate_m: float | None  # root mean square centre error without any scaling; None unless the estimate is metric
    metric_tr_percent: float | None  # tr% with s* = 1; None unless the estimate is metric
    reversed_motion: bool  # s* ≤ 0 although the estimate moves: tr% and AUC cannot see it
    static_estimate: bool  # the estimated camera never moves
    frames: int  # T
    valid_frames: int
    gauge_frame: int | None  # the frame that both paths are relative to: the first valid one
    undefined: tuple[str, ...]  # STATIC_COMMAND, CLOSED_COMMAND, TOO_FEW_FRAMES

    def as_dict(self) -> dict[str, object]:
        """For JSON: NaN becomes None."""
        values = asdict(self)
        return {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in values.items()}


def pose_metrics(
    commanded: PoseArray,  # [T, 4, 4] world_from_camera, metres
    estimated: PoseArray,  # [T, 4, 4] world_from_camera, any unit
    valid: FlagArray | None = None,  # bool [T], where the estimator found a pose
    is_metric: bool = False,
) -> PoseMetrics:
    """The paper's errors of an estimated path against the commanded one, in float64.

    Frames of `estimated` with `valid` False are not read. Both paths are relative to the first valid frame, which is
    the paper's first frame unless that one failed; with poses in fewer than half of the frames nothing is defined. The
    chord of tr% is the commanded one, whichever frames failed. `is_metric` says that the estimate is in metres.
    """
    commanded, estimated, valid = checked_paths(commanded, estimated, valid)
    seen = valid.nonzero()[:, 0]
    chord_m = float((commanded[-1, :3, 3] - commanded[0, :3, 3]).norm())
    errors, static_estimate = dict.fromkeys(ERRORS, math.nan), False
    reasons: tuple[str, ...] = (TOO_FEW_FRAMES,)
    if len(seen) >= max(2, len(valid) / 2):  # a clean prefix that is found again says nothing about what was generated
        here, there = relative_to_first(commanded[seen]), relative_to_first(estimated[seen])
        errors = _rotation_errors(here, there, len(valid)) | _translation_errors(here, there, len(valid), chord_m)
        reasons = _undefined_reasons(here, chord_m)
        static_estimate = bool(_largest_norm(there) <= NORM_FLOOR)
    ate_m, metric_tr_percent = errors.pop("ate_m"), errors.pop("metric_tr_percent")
    return PoseMetrics(
        **errors,
        chord_m=chord_m,
        ate_m=ate_m if is_metric else None,
        metric_tr_percent=metric_tr_percent if is_metric else None,
        reversed_motion=not static_estimate and errors["scale"] <= 0,
        static_estimate=static_estimate,
        frames=len(valid),
        valid_frames=len(seen),
        gauge_frame=int(seen[0]) if len(seen) else None,
        undefined=reasons,
    )


def _undefined_reasons(commanded: Tensor, chord_m: float) -> tuple[str, ...]:  # commanded [n, 4, 4] relative
    if _largest_norm(commanded) < STATIC_M:
        return (STATIC_COMMAND,)
    return (CLOSED_COMMAND,) if chord_m < STATIC_M else ()


def _rotation_errors(commanded: Tensor, estimated: Tensor, frames: int) -> dict[str, float]:  # [n, 4, 4] relative
    """rot° and RotErr. The frame that both are relative to has no error and is not averaged."""
    mean_rad = float(rotation_angle(commanded[1:, :3, :3], estimated[1:, :3, :3]).mean())
    return {"rot_deg": math.degrees(mean_rad), "rot_err": (frames - 1) * mean_rad}


def _translation_errors(
    commanded: Tensor,  # [n, 4, 4] relative
    estimated: Tensor,  # [n, 4, 4] relative
    frames: int,
    chord_m: float,
) -> dict[str, float]:
    """s*, tr%, TransErr, CamMC and the metric errors, whose mean square is over all frames as odometry has it.

    For a static command only the last is defined: a path without a unit cannot be told from one that stands still.
    """
    here, there = commanded[:, :3, 3], estimated[:, :3, 3]
    ate_m = float((here - there).square().sum(-1).mean().sqrt())
    if _largest_norm(commanded) < STATIC_M:
        return dict.fromkeys(ERRORS[2:], math.nan) | {"ate_m": ate_m}
    scale = aligning_scale(here, there)
    difference = (_max_normalised(commanded) - _max_normalised(estimated))[1:]
    return {
        "scale": scale,
        "tr_percent": _percent_of_chord(here - scale * there, chord_m),
        "trans_err": (frames - 1) * float(difference[:, :, 3].norm(dim=-1).mean()),
        "cammc": (frames - 1) * float(difference.flatten(1).norm(dim=-1).mean()),
        "ate_m": ate_m,
        "metric_tr_percent": _percent_of_chord(here - there, chord_m),
    }


def _percent_of_chord(error: Tensor, chord_m: float) -> float:  # [n, 3], the first of them zero
    return math.nan if chord_m < STATIC_M else 100.0 * float(error[1:].norm(dim=-1).mean()) / chord_m


def aligning_scale(
    commanded: Tensor,  # [n, 3] relative centres
    estimated: Tensor,  # [n, 3] relative centres
) -> float:
    """s* = Σ ô·o / Σ ‖ô‖², the least-squares scale of the estimate; 0 where the estimate is static (0 / 0)."""
    if estimated.norm(dim=-1).max() <= NORM_FLOOR:
        return 0.0
    return float((estimated * commanded).sum() / estimated.square().sum())


def _max_normalised(path: Tensor) -> Tensor:  # [n, 4, 4] relative -> [n, 3, 4]
    """[R | o / (max ‖o‖ + ε₀)], the scale treatment of CamMC and TransErr."""
    centres = path[:, :3, 3:] / (_largest_norm(path) + NORM_FLOOR)
    return torch.cat((path[:, :3, :3], centres), dim=-1)


def _largest_norm(path: Tensor) -> Tensor:  # [n, 4, 4] relative -> []
    return path[:, :3, 3].norm(dim=-1).max()


def relative_to_first(world_from_camera: Tensor) -> Tensor:  # [n, 4, 4] -> [n, 4, 4] first_from_camera
    """Remove the gauge: every pose in the frame of the first camera."""
    return relative(world_from_camera[:1], world_from_camera)


def looks_inverted(commanded: PoseArray, estimated: PoseArray, valid: FlagArray | None = None) -> bool:
    """Whether `estimated` would fit far better as world-to-camera matrices: CamMC falls to a quarter or less.

    A hint, not a proof: on a straight path, inverse poses and driving backwards are the same thing.
    """
    as_given = pose_metrics(commanded, estimated, valid)
    poses, flags = checked_paths(commanded, estimated, valid)[1:]
    as_inverse = pose_metrics(commanded, inverse(poses), flags)
    return as_inverse.cammc < INVERTED_RATIO * as_given.cammc


def checked_paths(
    commanded: PoseArray, estimated: PoseArray, valid: FlagArray | None
) -> tuple[Tensor, Tensor, Tensor]:  # [T, 4, 4] and [T, 4, 4] float64, bool [T]
    """Both paths on the CPU with exact rotations; estimates that are not valid become the identity, unread."""
    there = _as_path(estimated, "estimated")
    here = check_rigid(_as_path(commanded, "commanded"), "commanded")
    if here.shape != there.shape:
        fix = "give one estimate per commanded frame and mark missing ones False in valid"
        raise invalid("estimated", f"{list(here.shape)} like commanded", list(there.shape), fix)
    seen = _as_flags(valid, len(here))
    there = torch.where(seen[:, None, None], there, torch.eye(4, dtype=there.dtype))
    if not bool(torch.isfinite(there).all()):
        frame = int((~torch.isfinite(there)).flatten(1).any(-1).nonzero()[0])
        raise invalid("estimated", "finite", f"NaN or inf in frame {frame}", "mark failed frames False in valid")
    return here, check_rigid(there, "estimated"), seen


def _as_path(poses: PoseArray, name: str) -> Tensor:  # [T, 4, 4]
    path = torch.tensor(poses) if isinstance(poses, np.ndarray) else poses
    check_shape(path, name)
    if path.ndim != 3 or path.shape[0] == 0:
        raise invalid(name, "[T, 4, 4] with T ≥ 1", list(path.shape), "pass one clip at a time")
    return path.detach().cpu()


def _as_flags(valid: FlagArray | None, frames: int) -> Tensor:  # bool [T]
    if valid is None:
        return torch.ones(frames, dtype=torch.bool)
    flags = torch.tensor(valid) if isinstance(valid, np.ndarray) else valid
    if not isinstance(flags, Tensor) or flags.dtype != torch.bool or flags.shape != (frames,):
        got = f"{flags.dtype} {list(flags.shape)}" if isinstance(flags, Tensor) else repr(flags)
        raise invalid("valid", f"a bool array [{frames}]", got, "pass one flag per frame")
    return flags.cpu()

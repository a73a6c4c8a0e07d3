"""Retrieved history: calibrated frames of the same place, seen on another traversal (paper, Appendix on history).

Everything is measured in the frame of the target camera, from the relative pose target_from_donor: lateral = x,
longitudinal = z, heading = the donor's optical axis turned into the target's x-z plane. So no axis of the map has to
point up, and a map in metres of any origin will do.

The paper gives no ranges. Ours: a donor stands within 10 m and looks within 45° of the target's heading; a neighbouring
lane is 2.5 to 6 m to the side, abreast within 2.5 m; a quarter of the clips draws such a conflict where there is one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from torch import Tensor

from merope.errors import invalid
from merope.geometry.poses import check_rigid, relative

HISTORY_TIME_TAG = 100.0
"""Added to the time coordinate of retrieved frames (paper): a region of time that no clip reaches."""


@dataclass(frozen=True, eq=False)
class FrameTable:
    """F frames that may serve as history. All frames of a location share one metric map frame.

    Frames of one traversal never serve each other. Name traversals by drive, not by cut: the scenes of one log overlap.
    """

    world_from_camera: Tensor  # [F, 4, 4]
    location: Sequence[str]  # [F]
    traversal: Sequence[str]  # [F]
    timestamp_s: Tensor  # [F]

    def __post_init__(self) -> None:
        poses = check_rigid(self.world_from_camera)
        if poses.ndim != 3 or len(poses) == 0:
            raise invalid("world_from_camera", "[F, 4, 4] with F ≥ 1", list(poses.shape), "pass one row per frame")
        object.__setattr__(self, "world_from_camera", poses)
        for name in ("location", "traversal", "timestamp_s"):
            if len(getattr(self, name)) != len(poses):
                raise invalid(
                    name, f"one entry for each of {len(poses)} frames", len(getattr(self, name)), "align them"
                )
        if not bool(torch.isfinite(self.timestamp_s).all()):
            raise invalid("timestamp_s", "finite", "NaN or inf", "drop frames whose time is not known")


@dataclass(frozen=True, eq=False)
class Target:
    """The clip that wants a history: T camera poses, those of its latent frames. Retrieval never changes it."""

    world_from_camera: Tensor  # [T, 4, 4] in the location's map frame
    location: str
    traversal: str

    def __post_init__(self) -> None:
        poses = check_rigid(self.world_from_camera)
        if poses.ndim != 3 or len(poses) == 0:
            raise invalid("world_from_camera", "[T, 4, 4] with T ≥ 1", list(poses.shape), "pass one clip at a time")
        object.__setattr__(self, "world_from_camera", poses)


@dataclass(frozen=True)
class Gates:
    """Which frames may serve as history."""

    max_distance_m: float = 10.0
    max_heading_deg: float = 45.0
    lane_m: tuple[float, float] = (2.5, 6.0)  # range of |lateral offset| of a neighbouring lane
    abreast_m: float = 2.5  # largest |longitudinal offset| of a frame in a neighbouring lane
    min_overlap: float = 0.5  # share of the asked target frames that a neighbouring lane must accompany

    def __post_init__(self) -> None:
        if not (self.max_distance_m > 0 and 0 < self.max_heading_deg <= 180):
            got = (self.max_distance_m, self.max_heading_deg)
            raise invalid(
                "gates", "a positive distance and a heading in (0°, 180°]", got, "see merope.curation.retrieve"
            )
        if not 0 <= self.lane_m[0] < self.lane_m[1] <= self.max_distance_m:
            fix = "raise max_distance_m or narrow the lane"
            raise invalid("lane_m", f"rising, in [0, max_distance_m = {self.max_distance_m}]", self.lane_m, fix)
        if not (self.abreast_m > 0 and 0 < self.min_overlap <= 1):
            got = (self.abreast_m, self.min_overlap)
            raise invalid(
                "abreast_m, min_overlap", "positive, the latter at most 1", got, "see merope.curation.retrieve"
            )


@dataclass(frozen=True, eq=False)
class History:
    """H retrieved frames, in the order of the target frames that they are matched with. H may be 0."""

    frame: Tensor  # [H] int64, rows of the table
    target: Tensor  # [H] int64, matched frames of the clip
    time: Tensor  # [H] the matched frames' time coordinates + HISTORY_TIME_TAG
    timestamp_s: Tensor  # [H] when the retrieved frames were taken
    distance_m: Tensor  # [H] between the camera centres
    lateral_m: Tensor  # [H] of the donor, right of the target
    longitudinal_m: Tensor  # [H] ahead of the target
    heading_rad: Tensor  # [H] to the right of the target's
    is_conflict: bool  # from a neighbouring lane

    @property
    def count(self) -> int:
        """Number of frames H."""
        return len(self.frame)


@dataclass(frozen=True, eq=False)
class _Candidates:
    """Pairs of a target frame and an admissible donor frame, one entry a pair."""

    frame: NDArray[np.int64]
    target: NDArray[np.int64]
    distance_m: NDArray[np.float64]
    lateral_m: NDArray[np.float64]
    longitudinal_m: NDArray[np.float64]
    heading_rad: NDArray[np.float64]

    def __getitem__(self, chosen: NDArray[np.int64] | NDArray[np.bool_]) -> "_Candidates":
        return _Candidates(**{name: column[chosen] for name, column in vars(self).items()})


class HistoryIndex:
    """A table of frames, searchable by place: one tree per location, built once."""

    def __init__(self, table: FrameTable, gates: Gates | None = None) -> None:
        self.table, self.gates = table, gates or Gates()
        self._traversal = np.asarray(table.traversal)
        location = np.asarray(table.location)
        self._rows = {str(name): np.flatnonzero(location == name) for name in np.unique(location)}
        centres = table.world_from_camera[:, :3, 3].numpy()
        self._trees = {name: cKDTree(centres[rows]) for name, rows in self._rows.items()}

    def nearest(
        self,
        target: Target,
        asked: Sequence[int],  # frames of the target
    ) -> History:
        """For each asked frame the nearest admissible one of another traversal (ties: the smaller row).

        Asked frames without one are left out. A donor that is nearest to several serves the one it is closest to.
        """
        candidates = self._candidates(target, asked)
        return self._history(_first_per_target(candidates, candidates.distance_m), is_conflict=False)

    def neighbouring_lane(
        self,
        target: Target,
        asked: Sequence[int],  # frames of the target
    ) -> History | None:
        """The frames abreast on one side of one other traversal, None where nobody drove in a neighbouring lane.

        The donor is one traversal on one side that accompanies at least `min_overlap` of the asked frames: the one
        that gives the most frames, among equals the one closer abreast in sum, then the first by name, left first.
        """
        gates, candidates = self.gates, self._candidates(target, asked)
        side_m = np.abs(candidates.lateral_m)
        in_lane = (side_m >= gates.lane_m[0]) & (side_m <= gates.lane_m[1])
        candidates = candidates[in_lane & (np.abs(candidates.longitudinal_m) <= gates.abreast_m)]
        donors = np.stack((self._traversal[candidates.frame], np.where(candidates.lateral_m > 0, "right", "left")))
        lanes = [candidates[(donors == donor[:, None]).all(0)] for donor in np.unique(donors, axis=1).T]
        lanes = [lane for lane in lanes if len(np.unique(lane.target)) >= gates.min_overlap * len(set(asked))]
        if not lanes:
            return None
        matches = [_first_per_target(lane, np.abs(lane.longitudinal_m)) for lane in lanes]
        best = min(matches, key=lambda match: (-len(match.target), np.abs(match.longitudinal_m).sum()))
        return self._history(best, is_conflict=True)

    def retrieve(self, target: Target, count: int, generator: torch.Generator, conflict_rate: float = 0.25) -> History:
        """History for training: up to `count` frames, matched with frames spread evenly over the clip.

        With probability `conflict_rate` it comes from a neighbouring lane where there is one, otherwise it is the
        nearest. One number is drawn per call, whatever the data, so that a generator stays in step.
        """
        if not 0 <= conflict_rate <= 1:
            raise invalid("conflict_rate", "a probability", conflict_rate, "0 switches lateral conflicts off")
        asked = spread_frames(len(target.world_from_camera), count)
        wants_conflict = float(torch.rand((), generator=generator, dtype=torch.float64)) < conflict_rate
        donor = self.neighbouring_lane(target, asked) if wants_conflict else None
        return self.nearest(target, asked) if donor is None else donor

    def _candidates(self, target: Target, asked: Sequence[int]) -> _Candidates:
        """All admissible pairs: same location, other traversal, close enough, looking the same way."""
        frames = _checked_frames(asked, len(target.world_from_camera))
        rows, paired = self._within_reach(target, frames)
        pose = relative(target.world_from_camera[frames[paired]], self.table.world_from_camera[rows]).numpy()
        offset_m, forward = pose[:, :3, 3], pose[:, :3, 2]
        pairs = _Candidates(
            frame=rows,
            target=frames[paired],
            distance_m=np.linalg.norm(offset_m, axis=-1),
            lateral_m=offset_m[:, 0],
            longitudinal_m=offset_m[:, 2],
            heading_rad=np.arctan2(forward[:, 0], forward[:, 2]),
        )
        aligned = np.abs(pairs.heading_rad) <= math.radians(self.gates.max_heading_deg)
        return pairs[aligned & (pairs.distance_m <= self.gates.max_distance_m)]

    def _within_reach(
        self, target: Target, frames: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:  # rows of the table, places in `frames`
        if target.location not in self._trees:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        centres = target.world_from_camera[frames, :3, 3].numpy()
        reach_m = self.gates.max_distance_m * (1 + 1e-9)  # the exact gate comes after, from the relative pose
        found = self._trees[target.location].query_ball_point(centres, reach_m, return_sorted=True)
        paired = np.repeat(np.arange(len(frames)), [len(near) for near in found])
        rows = self._rows[target.location][np.concatenate(found).astype(np.int64)]
        other = self._traversal[rows] != target.traversal
        return rows[other], paired[other]

    def _history(self, match: _Candidates, is_conflict: bool) -> History:
        columns = {name: torch.from_numpy(column) for name, column in vars(match).items()}
        time = columns["target"].to(torch.float64) + HISTORY_TIME_TAG
        taken_s = self.table.timestamp_s[columns["frame"]]
        return History(**columns, time=time, timestamp_s=taken_s, is_conflict=is_conflict)


def spread_frames(
    frames: int,  # of a clip
    count: int,
) -> list[int]:
    """`count` frames spread evenly over a clip, the middles of equal parts: 13 frames and 3 give 2, 6, 10."""
    if count < 1:
        raise invalid("count", "at least 1", count, "switch history off by not retrieving any")
    count = min(count, frames)
    return [(2 * part + 1) * frames // (2 * count) for part in range(count)]


def _checked_frames(asked: Sequence[int], frames: int) -> NDArray[np.int64]:
    if len(asked) == 0 or min(asked) < 0 or max(asked) >= frames:
        raise invalid("asked", f"frames of the clip, in [0, {frames})", list(asked), "see spread_frames")
    return np.unique(np.asarray(asked, dtype=np.int64))


def _first_per_target(pairs: _Candidates, key: NDArray[np.float64]) -> _Candidates:
    """The pair with the smallest key for each target frame; then for each donor, the target frame it fits best."""
    pairs, key = _first_per(pairs.target, pairs, key)
    pairs, key = _first_per(pairs.frame, pairs, key)
    return pairs[np.argsort(pairs.target, kind="stable")]


def _first_per(
    group: NDArray[np.int64], pairs: _Candidates, key: NDArray[np.float64]
) -> tuple[_Candidates, NDArray[np.float64]]:
    order = np.lexsort((pairs.target, pairs.frame, key, group))
    first = order[np.unique(group[order], return_index=True)[1]]
    return pairs[first], key[first]

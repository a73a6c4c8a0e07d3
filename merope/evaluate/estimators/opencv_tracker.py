"""A fast monocular tracker: corners followed by optical flow, an essential matrix to start, then PnP on a growing map.

Seconds per clip and no weights; good for quick checks and gross ranking. `structure_from_motion` beside this file is
for numbers to report. Tracks [T, N, 2] are coordinates on the camera's plane z = 1, NaN where a corner was not seen;
the unit of length is the distance between the first two views.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from merope.errors import invalid
from merope.evaluate.estimators.bundle_adjustment import Scene, adjusted
from merope.evaluate.estimators.estimator import PoseEstimate, check_frames, failed
from merope.evaluate.estimators.remap import pinhole_view
from merope.geometry.lenses import Lens, Pinhole

Floats: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]

MAX_CORNERS = 1500
CORNER_DISTANCE_PX = 5
MAX_ROUND_TRIP_PX = 0.5  # of a corner followed to the next frame and back
MAX_ERROR_PX = 1.5  # between a point of the map and where it is seen
START_ANGLE_DEG, LEAST_START_ANGLE_DEG = 2.0, 0.4  # median between the rays of the first two views: wanted, accepted
NEW_POINT_ANGLE_DEG = 1.0
MIN_PAIRS = 30  # to start
MIN_INLIERS = 12  # to accept a pose
ADJUSTED_POINTS = 2000  # at most, those that most views see


@dataclass(frozen=True)
class OpenCVTracker:
    """Monocular tracking with a known lens; scale is arbitrary."""

    seed: int = 0

    name = "opencv-tracker"

    def __call__(self, frames: Tensor, lens: Lens | None) -> PoseEstimate:  # uint8 [T, H, W, 3]
        import cv2

        check_frames(frames, lens)
        if lens is None:
            fix = "pass the lens of the video, or use the colmap estimator, which can do without"
            raise invalid("lens", "known for the tracker", None, fix)
        cv2.setRNGSeed(self.seed)
        view = pinhole_view(frames, lens)
        mapping = _Map(_on_plane(_followed(view.frames.numpy()), view.lens), pixel=1.0 / float(view.lens.fx))
        if not mapping.start():
            return failed(len(frames), self.name, "no start: too few corners, or the camera hardly moves")
        mapping.grow()
        mapping.improve()
        return view.restored(self._estimate(mapping))

    def _estimate(self, mapping: "_Map") -> PoseEstimate:
        poses = torch.eye(4, dtype=torch.float64).repeat(len(mapping.valid), 1, 1)
        poses[:, :3, :3] = torch.from_numpy(mapping.world_from_camera)
        poses[:, :3, 3] = torch.from_numpy(mapping.centres)
        lost = int((~mapping.valid).sum())
        note = f"lost in {lost} of {len(mapping.valid)} frames" if lost else ""
        known = mapping.seen[mapping.valid] & np.isfinite(mapping.points[:, 0])
        inliers = int(known.sum(axis=1).min())
        return PoseEstimate(poses, torch.from_numpy(mapping.valid), False, self.name, note=note, inliers=inliers)


def _followed(frames: NDArray[np.uint8]) -> Floats:  # [T, H, W, 3] -> [T, N, 2] pixels
    """Corners followed from frame to frame; those that got lost are replaced by new ones."""
    import cv2

    grey = [cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY) for frame in frames]
    alive, spots = np.zeros(0, dtype=np.int64), np.zeros((0, 2), dtype=np.float32)
    rows, total = [], 0
    for t, image in enumerate(grey):
        if t > 0 and len(spots):
            spots, kept = _one_step(grey[t - 1], image, spots)
            alive = alive[kept]
        fresh = _new_corners(image, spots)
        alive = np.concatenate((alive, np.arange(total, total + len(fresh))))
        spots = np.concatenate((spots, fresh))
        total += len(fresh)
        rows.append((alive, spots))
    tracks = np.full((len(frames), total, 2), np.nan)
    for t, (numbers, places) in enumerate(rows):
        tracks[t, numbers] = places + 0.5  # OpenCV counts from the centre of the top-left pixel
    return tracks


def _one_step(
    before: NDArray[np.uint8],  # [H, W]
    after: NDArray[np.uint8],
    spots: NDArray[np.float32],  # [n, 2]
) -> tuple[NDArray[np.float32], Mask]:  # [m, 2], bool [n]
    """Where corners went, and which of them returned to their place on the way back."""
    import cv2

    def followed(a: NDArray[np.uint8], b: NDArray[np.uint8], from_a: NDArray[np.float32]) -> tuple[Any, Any]:
        there, found, _ = cv2.calcOpticalFlowPyrLK(
            a, b, from_a, from_a.copy(), winSize=(15, 15), maxLevel=4, criteria=(3, 40, 0.005)
        )
        return there, found[:, 0] == 1

    there, found = followed(before, after, spots)
    back, found_back = followed(after, before, there)
    inside = ((there >= 0) & (there <= [before.shape[1] - 1, before.shape[0] - 1])).all(axis=-1)
    returned = np.linalg.norm(back - spots, axis=-1) < MAX_ROUND_TRIP_PX
    kept = found & found_back & inside & returned
    return there[kept], kept


def _new_corners(image: NDArray[np.uint8], spots: NDArray[np.float32]) -> NDArray[np.float32]:  # [n, 2] -> [m, 2]
    import cv2

    wanted = MAX_CORNERS - len(spots)
    if wanted <= 0:
        return np.zeros((0, 2), dtype=np.float32)
    free = np.full(image.shape, 255, dtype=np.uint8)
    for x, y in spots.round().astype(int):
        cv2.circle(free, (int(x), int(y)), CORNER_DISTANCE_PX, 0, -1)
    found = cv2.goodFeaturesToTrack(image, wanted, 0.005, CORNER_DISTANCE_PX, mask=free)
    if found is None:
        return np.zeros((0, 2), dtype=np.float32)
    refined = cv2.cornerSubPix(image, found, (3, 3), (-1, -1), (3, 20, 0.01))
    return np.asarray(refined, np.float32).reshape(-1, 2)


def _on_plane(pixels: Floats, lens: Pinhole) -> Floats:  # [T, N, 2] -> [T, N, 2]
    centre, focal = np.array([float(lens.cx), float(lens.cy)]), np.array([float(lens.fx), float(lens.fy)])
    return (pixels - centre) / focal


class _Map:
    """Points [N, 3] (NaN while unknown) and poses of T views, in the frame of the first view."""

    def __init__(self, tracks: Floats, pixel: float) -> None:  # [T, N, 2], size of a pixel on the plane
        count, number, _ = tracks.shape
        self.tracks, self.pixel = tracks, pixel
        self.seen = np.isfinite(tracks[..., 0])  # [T, N]
        rays = np.concatenate((np.nan_to_num(tracks), np.ones((count, number, 1))), axis=-1)
        self.rays = rays / np.linalg.norm(rays, axis=-1, keepdims=True)
        self.points = np.full((number, 3), np.nan)
        self.world_from_camera = np.tile(np.eye(3), (count, 1, 1))
        self.centres = np.zeros((count, 3))
        self.valid = np.zeros(count, dtype=bool)

    def start(self) -> bool:
        """Two views and the points between them: the first frame and the earliest one with enough parallax."""
        best_deg, best = LEAST_START_ANGLE_DEG, None
        for t in range(1, len(self.tracks)):
            shared = self.seen[0] & self.seen[t]
            if shared.sum() < MIN_PAIRS:
                break
            candidate = self._two_views(t, shared)
            if candidate is not None and candidate[0] > best_deg:
                best_deg, best = candidate[0], (t, candidate[1], candidate[2])
            if best_deg > START_ANGLE_DEG:
                break
        if best is None:
            return False
        t, rotation, centre = best
        self.world_from_camera[t], self.centres[t] = rotation, centre
        self.valid[[0, t]] = True
        self._add_points(t)
        return int(np.isfinite(self.points[:, 0]).sum()) >= MIN_INLIERS

    def _two_views(self, t: int, shared: Mask) -> tuple[float, Floats, Floats] | None:
        """Median angle between the rays of views 0 and t, world_from_camera [3, 3] and centre [3] of view t."""
        import cv2

        a, b = self.tracks[0, shared], self.tracks[t, shared]
        essential, inliers = cv2.findEssentialMat(a, b, np.eye(3), cv2.RANSAC, 0.9999, self.pixel)
        if essential is None or essential.shape != (3, 3):
            return None
        count, turn, shift, mask = cv2.recoverPose(essential, a, b, np.eye(3), mask=inliers)
        if count < MIN_PAIRS:
            return None
        chosen, rotation = mask[:, 0] > 0, np.asarray(turn, np.float64)
        turned = self.rays[t, shared][chosen] @ rotation  # rows: camera 0 from camera t
        angle_deg = _angle_deg(self.rays[0, shared][chosen], turned)
        return float(np.median(angle_deg)), rotation.T, -rotation.T @ np.asarray(shift[:, 0], np.float64)

    def grow(self) -> None:
        """Poses of all other views in order, with new points after each."""
        for t in range(1, len(self.tracks)):
            if not self.valid[t]:
                self._locate(t)
            if self.valid[t]:
                self._triangulate()
                self._add_points(t)

    def improve(self) -> None:
        """Bundle adjustment of all poses with the points that most views see: it takes out the drift of `grow`."""
        views = np.nonzero(self.valid)[0]
        views_of_point = self.seen[views].sum(axis=0) * np.isfinite(self.points[:, 0])
        number = np.argsort(-views_of_point, kind="stable")[:ADJUSTED_POINTS]
        number = number[views_of_point[number] >= 3]
        if len(number) < MIN_INLIERS:
            return
        rotation = self.world_from_camera[views].transpose(0, 2, 1)
        shift = -np.einsum("tij,tj->ti", rotation, self.centres[views])
        part = np.ix_(views, number)
        scene = adjusted(Scene(rotation, shift, self.points[number]), self.tracks[part], self.seen[part], self.pixel)
        self.world_from_camera[views] = scene.rotation.transpose(0, 2, 1)
        self.centres[views] = -np.einsum("tji,tj->ti", scene.rotation, scene.shift)

    def _locate(self, t: int) -> None:
        """Pose of view t from the points that it sees."""
        import cv2

        known = self.seen[t] & np.isfinite(self.points[:, 0])
        self.valid[t] = False
        if known.sum() < MIN_INLIERS:
            return
        points, plane = self.points[known], self.tracks[t, known]
        found, turn, shift, inliers = cv2.solvePnPRansac(
            points, plane, np.eye(3), None, iterationsCount=200, reprojectionError=MAX_ERROR_PX * self.pixel,
            confidence=0.9999, flags=cv2.SOLVEPNP_SQPNP,
        )  # fmt: skip
        if not found or inliers is None or len(inliers) < max(MIN_INLIERS, known.sum() // 4):
            return
        chosen = inliers[:, 0]
        turn, shift = cv2.solvePnPRefineLM(points[chosen], plane[chosen], np.eye(3), None, turn, shift)
        rotation = cv2.Rodrigues(turn)[0]
        self.world_from_camera[t], self.centres[t] = rotation.T, -rotation.T @ shift[:, 0]
        self.valid[t] = True

    def _add_points(self, t: int) -> None:
        """Points for the corners of view t that have moved enough since they were first seen."""
        usable = self.seen & self.valid[:, None]
        first = usable.argmax(axis=0)
        number = np.nonzero(self.seen[t] & np.isnan(self.points[:, 0]) & (first != t))[0]
        if len(number) == 0:
            return
        old = np.einsum("nij,nj->ni", self.world_from_camera[first[number]], self.rays[first[number], number])
        new = self.rays[t, number] @ self.world_from_camera[t].T
        self._triangulate(number[_angle_deg(old, new) > NEW_POINT_ANGLE_DEG])

    def _triangulate(self, number: NDArray[np.int64] | None = None) -> None:
        """Points nearest to all their rays, weighted by 1/distance; given up where a ray misses by too much.

        The point X with least Σ w ‖(1 − d dᵀ)(X − c)‖² over rays from c along d solves a 3 × 3 system.
        """
        if number is None:
            number = np.nonzero(np.isfinite(self.points[:, 0]))[0]
        views = np.nonzero(self.valid)[0]
        centres = self.centres[views, None]
        directions = np.einsum("tij,tnj->tni", self.world_from_camera[views], self.rays[np.ix_(views, number)])
        across = np.eye(3) - directions[..., :, None] * directions[..., None, :]
        seen = self.seen[np.ix_(views, number)].astype(np.float64)
        weight, points = seen, np.zeros((len(number), 3))
        for _ in range(3):
            normal = np.einsum("tn,tnij->nij", weight, across)
            target = np.einsum("tn,tnij,tj->ni", weight, across, centres[:, 0])
            points = np.linalg.solve(normal + 1e-12 * np.eye(3), target[..., None])[..., 0]
            towards = points - centres
            distance = np.maximum(np.linalg.norm(towards, axis=-1), 1e-6)
            weight = seen / distance**2
        sine = np.linalg.norm(np.einsum("tnij,tnj->tni", across, towards), axis=-1) / distance
        ahead = np.einsum("tni,tni->tn", directions, towards) > 0
        good = (((sine < 2.0 * MAX_ERROR_PX * self.pixel) & ahead) | (seen == 0)).all(axis=0)
        self.points[number] = np.where(good[:, None], points, np.nan)


def _angle_deg(a: Floats, b: Floats) -> Floats:  # [n, 3] unit twice -> [n]
    return np.degrees(np.arctan2(np.linalg.norm(np.cross(a, b), axis=-1), (a * b).sum(axis=-1)))

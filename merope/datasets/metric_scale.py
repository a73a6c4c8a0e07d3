"""Metres for paths of arbitrary scale: from a known speed, or from how high the camera stands above the road."""

import csv
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from merope.errors import invalid

STEP_S = 0.25  # over which a path is measured: noise of single frames would make it longer
TRIALS = 400  # planes that are tried
FLAT_DEG = 20.0  # between the road and what is level for the cameras, at most
WITHIN = 0.04  # of the camera's height: points that count as road
LEAST_POINTS = 30


def path_length(
    world_from_camera: Tensor,  # [T, 4, 4]
    fps: float,
) -> float:
    """Way along a path, in its own unit."""
    centres = world_from_camera[:, :3, 3]
    every = max(1, round(STEP_S * fps))
    rows = [*range(0, len(centres) - 1, every), len(centres) - 1]
    return float(centres[rows].diff(dim=0).norm(dim=-1).sum())


def logged_way(file: Path, start_s: float, end_s: float) -> float:
    """Metres between two times of a video, by the log of its speed: columns time_s, speed_m_s."""
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            rows = [(float(row["time_s"]), float(row["speed_m_s"])) for row in csv.DictReader(lines)]
    except (KeyError, TypeError, ValueError, OSError) as error:
        fix = "write a line time_s,speed_m_s and one line per time below it"
        raise invalid(str(file), "a CSV file with columns time_s and speed_m_s", f"{error}", fix) from None
    times_s, speeds_m_s = np.array(rows, dtype=np.float64).reshape(-1, 2).T
    if len(times_s) < 2 or not (np.diff(times_s) > 0).all() or not np.isfinite(speeds_m_s).all():
        raise invalid(str(file), "at least two rows in order of time", f"{len(times_s)} rows", "sort and complete it")
    if times_s[0] > start_s + 1.0 or times_s[-1] < end_s - 1.0:
        got = f"{times_s[0]:g} s to {times_s[-1]:g} s"
        raise invalid(str(file), f"speeds from {start_s:g} s to {end_s:g} s", got, "log the whole video")
    inside = times_s[(times_s > start_s) & (times_s < end_s)]
    at_s = np.array([start_s, *inside, end_s])
    return float(np.trapezoid(np.interp(at_s, times_s, speeds_m_s), at_s))


def height_above_road(
    world_from_camera: Tensor,  # [T, 4, 4]
    points: Tensor,  # [N, 3]
) -> float | None:
    """How high the cameras stand above the plane that most points below them lie on, in the unit of the path.

    None where no such plane is found. Cameras are taken to be about level.
    """
    poses, places = world_from_camera.numpy(), points.numpy()
    centres, down = poses[:, :3, 3], poses[:, :3, 1].mean(axis=0)
    down /= np.linalg.norm(down)
    reach = np.linalg.norm(centres[-1] - centres[0]) + 1e-12
    drop = (places - centres.mean(axis=0)) @ down
    near = np.linalg.norm(places[:, None] - centres[:: max(1, len(centres) // 8)], axis=-1).min(axis=1) < reach
    below = places[(drop > 0) & near & np.isfinite(places).all(axis=1)]
    if len(below) < LEAST_POINTS:
        return None
    dice, best = np.random.default_rng(0), np.zeros(len(below), dtype=bool)
    for _ in range(TRIALS):
        corners = below[dice.choice(len(below), 3, replace=False)]
        is_road = _on_plane(
            below, centres, down, np.cross(corners[1] - corners[0], corners[2] - corners[0]), corners[0]
        )
        best = is_road if is_road.sum() > best.sum() else best
    if best.sum() < LEAST_POINTS:
        return None
    road = below[best]
    normal = np.linalg.svd(road - road.mean(axis=0), full_matrices=False)[2][-1]
    return float(np.median(np.abs((centres - road.mean(axis=0)) @ normal)))


def _on_plane(
    points: NDArray[np.float64],  # [N, 3]
    centres: NDArray[np.float64],  # [T, 3]
    down: NDArray[np.float64],  # [3]
    normal: NDArray[np.float64],  # [3], of any length
    place: NDArray[np.float64],  # [3]
) -> NDArray[np.bool_]:  # [N]
    """Which points lie on a plane that may be the road; none if it may not."""
    length = np.linalg.norm(normal)
    if length < 1e-12 or abs(normal @ down) < math.cos(math.radians(FLAT_DEG)) * length:
        return np.zeros(len(points), dtype=bool)
    normal = normal / length
    height = np.median(np.abs((centres - place) @ normal))
    return np.abs((points - place) @ normal) < WITHIN * height

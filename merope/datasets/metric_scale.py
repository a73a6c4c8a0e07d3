"""Metres for paths of arbitrary scale: from a known speed, or from how high the camera stands above the road."""

import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from merope.errors import invalid

Floats = NDArray[np.float64]

STEP_S = 0.25  # over which a path is measured: noise of single frames would make it longer
WITHIN = 0.04  # of its depth below the camera: how far the points of a road may differ
NEAR = 10.0  # in heights of the camera: points so far away are still exact
COMMON = 0.6  # of the points at the most frequent depth: as many make a surface of their own
LEAST_POINTS = 16
LEAST_DEPTH = 1e-3  # of the way: points higher than this are beside the camera
LEVEL = 0.01  # share of the cameras' own axes in what is down, along the way
ROUNDS = 3


def path_length(
    world_from_camera: Tensor,  # [T, 4, 4]
    fps: float,
) -> float:
    """Way along a path, in its own unit."""
    centres = world_from_camera[:, :3, 3]
    every = max(1, round(STEP_S * fps))
    rows = [*range(0, len(centres) - 1, every), len(centres) - 1]
    return float(centres[rows].diff(dim=0).norm(dim=-1).sum())


def read_speed_log(file: Path) -> tuple[Floats, Floats]:  # seconds, metres per second
    """The log of a video's speed, a CSV file with columns time_s and speed_m_s. Backwards is as far as forwards."""
    expected, columns = "a CSV file with columns time_s and speed_m_s", list[str]()
    fix = "write a line time_s,speed_m_s and one line per time below it"
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:  # Excel begins with a byte order mark
            reader = csv.DictReader(lines, skipinitialspace=True)
            columns = list(reader.fieldnames or ())
            rows = [(float(row["time_s"]), abs(float(row["speed_m_s"]))) for row in reader]
    except KeyError:
        raise invalid(str(file), expected, f"columns {', '.join(columns)}", fix) from None
    except (TypeError, ValueError, OSError) as error:
        raise invalid(str(file), expected, f"{error}", fix) from None
    times_s, speeds_m_s = np.array(rows, dtype=np.float64).reshape(-1, 2).T
    if len(times_s) < 2 or not (np.diff(times_s) > 0).all() or not np.isfinite(speeds_m_s).all():
        raise invalid(str(file), "at least two rows in order of time", f"{len(times_s)} rows", "sort and complete it")
    return times_s, speeds_m_s


def logged_way(file: Path, start_s: float, end_s: float) -> float:
    """Metres between two times of a video, by the log of its speed."""
    times_s, speeds_m_s = read_speed_log(file)
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
    """How high the cameras stand above the road, in the unit of the path; None where too few points show one.

    Down is where the cameras' y axes point, but for what lies along the way: a camera may look down at the road. Each
    point has a depth below the camera that is nearest. Houses and cars have all depths; the road has one, and nothing
    is below it: of several depths that many points share (pavements, bonnets of parked cars) it is the deepest.
    """
    poses, places = world_from_camera.numpy(), points.numpy()
    offsets = places[:, None] - poses[None, :, :3, 3]  # [N, T, 3]
    distance = np.linalg.norm(offsets, axis=-1)
    nearest = distance.argmin(axis=1)
    rows = np.arange(len(places))
    depth, distance = offsets[rows, nearest] @ _down(poses), distance[rows, nearest]
    is_below = depth > LEAST_DEPTH * np.linalg.norm(np.diff(poses[:, :3, 3], axis=0), axis=-1).sum()
    depth, distance = depth[is_below], distance[is_below]
    if len(depth) < LEAST_POINTS:
        return None
    order = np.sort(depth)
    like = np.searchsorted(order, order * (1 + WITHIN)) - np.searchsorted(order, order * (1 - WITHIN))
    height = float(order[like >= COMMON * like.max()].max())
    for _ in range(ROUNDS):  # near points are the exact ones
        is_road = (np.abs(depth / height - 1) < 2 * WITHIN) & (distance < NEAR * height)
        if is_road.sum() < LEAST_POINTS // 2:
            return None if like.max() < LEAST_POINTS else height
        height = float(np.median(depth[is_road]))
    return height


def _down(poses: Floats) -> Floats:  # [T, 4, 4] -> [3]
    """The mean y axis of the cameras without its share along the directions of travel."""
    steps = np.diff(poses[:, :3, 3], axis=0)
    spread = steps.T @ steps / np.square(steps).sum()
    down: Floats = np.linalg.solve(spread + LEVEL * np.eye(3), poses[:, :3, 1].mean(axis=0))
    return down / np.linalg.norm(down)

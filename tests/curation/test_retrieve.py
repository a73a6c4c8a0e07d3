"""Retrieved history against brute force: place, traversal, gates, neighbouring lanes, times."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenes import random_rotations

from merope.curation.retrieve import HISTORY_TIME_TAG, FrameTable, Gates, HistoryIndex, Target, spread_frames
from merope.geometry.poses import rigid


def heading_poses(x_m: np.ndarray, z_m: np.ndarray, yaw_rad: np.ndarray) -> torch.Tensor:  # [n, 4, 4]
    """Level cameras; yaw turns from z (north) towards x (east)."""
    c, s, zero, one = np.cos(yaw_rad), np.sin(yaw_rad), np.zeros_like(yaw_rad), np.ones_like(yaw_rad)
    rotation = np.stack((c, zero, s, zero, one, zero, -s, zero, c), axis=-1).reshape(-1, 3, 3)
    return rigid(torch.from_numpy(rotation), torch.from_numpy(np.stack((x_m, zero, z_m), axis=-1)))


def drive(
    lane_m: float, frames: int = 13, step_m: float = 1.5, yaw_rad: float = 0.0, start_m: float = 0.0
) -> torch.Tensor:
    """North along x = lane_m, all cameras turned by yaw_rad."""
    along = start_m + step_m * np.arange(frames)
    return heading_poses(np.full(frames, lane_m), along, np.full(frames, yaw_rad))


def table_of(drives: dict[str, torch.Tensor], location: str = "town") -> FrameTable:
    traversal = [name for name, poses in drives.items() for _ in range(len(poses))]
    stamps = torch.cat([1000.0 * i + torch.arange(len(p)) / 12 for i, p in enumerate(drives.values())])
    return FrameTable(torch.cat(list(drives.values())), [location] * len(traversal), traversal, stamps)


def crowded(seed: int, frames: int = 400) -> tuple[FrameTable, Target, torch.Tensor]:
    """Random frames of five drives in two places, a target among them, all in an arbitrarily turned map far away."""
    random = np.random.default_rng(seed)
    centres, yaw = random.uniform(-25, 25, (2, frames)), random.normal(0.0, 0.8, frames)
    world = rigid(random_rotations(seed=seed), torch.tensor([4e5, -2e6, 30.0], dtype=torch.float64))
    poses = world @ heading_poses(centres[0], centres[1], yaw)
    location = [str(place) for place in random.choice(["north", "south"], frames)]
    traversal = [str(name) for name in random.choice(["a", "b", "c", "d", "e"], frames)]
    table = FrameTable(poses, location, traversal, torch.arange(frames, dtype=torch.float64))
    path = world @ heading_poses(random.uniform(-5, 5, 9), np.linspace(-15, 15, 9), random.normal(0.0, 0.3, 9))
    return table, Target(path, "north", "c"), poses


def admissible(table: FrameTable, target: Target, gates: Gates, frame: int) -> list[dict[str, float]]:
    """Every donor for one frame of the target, by the definitions, one at a time."""
    here, found = target.world_from_camera[frame], []
    for row, pose in enumerate(table.world_from_camera):
        x, _, z = (here[:3, :3].T @ (pose[:3, 3] - here[:3, 3])).tolist()
        forward = here[:3, :3].T @ pose[:3, 2]
        heading_rad = math.atan2(forward[0], forward[2])
        distance_m = float((pose[:3, 3] - here[:3, 3]).norm())
        same_place = table.location[row] == target.location and table.traversal[row] != target.traversal
        if (
            same_place
            and distance_m <= gates.max_distance_m
            and abs(math.degrees(heading_rad)) <= gates.max_heading_deg
        ):
            found.append({"row": row, "distance_m": distance_m, "x": x, "z": z, "heading_rad": heading_rad})
    return found


@given(st.integers(0, 10_000), st.sampled_from([2.0, 5.0, 12.0]), st.sampled_from([15.0, 45.0, 180.0]))
def test_nearest_is_exact(seed: int, max_distance_m: float, max_heading_deg: float) -> None:
    table, target, _ = crowded(seed, frames=150)
    gates = Gates(max_distance_m, max_heading_deg, lane_m=(0.5, 2.0))
    history = HistoryIndex(table, gates).nearest(target, range(9))
    expected: dict[int, tuple[float, int]] = {}  # donor: distance, target frame
    for frame in range(9):
        donors = admissible(table, target, gates, frame)
        if donors:
            best = min(donors, key=lambda donor: donor["distance_m"])
            mine = (best["distance_m"], frame)
            expected[int(best["row"])] = min(mine, expected.get(int(best["row"]), mine))
    pairs = sorted((frame, row) for row, (_, frame) in expected.items())
    assert list(zip(history.target.tolist(), history.frame.tolist(), strict=True)) == pairs
    for row, frame, distance_m in zip(history.frame.tolist(), history.target, history.distance_m, strict=True):
        assert float(distance_m) == pytest.approx(expected[row][0], abs=1e-8)
        assert expected[row][1] == frame


@given(st.integers(0, 10_000))
def test_neighbouring_lane_is_exact(seed: int) -> None:
    table, target, _ = crowded(seed, frames=250)
    gates = Gates(min_overlap=1 / 3)
    history = HistoryIndex(table, gates).neighbouring_lane(target, range(9))
    lanes: dict[tuple[str, bool], dict[int, list[tuple[float, int]]]] = {}
    for frame in range(9):
        for donor in admissible(table, target, gates, frame):
            if gates.lane_m[0] <= abs(donor["x"]) <= gates.lane_m[1] and abs(donor["z"]) <= gates.abreast_m:
                lane = lanes.setdefault((table.traversal[int(donor["row"])], donor["x"] > 0), {})
                lane.setdefault(frame, []).append((abs(donor["z"]), int(donor["row"])))
    lanes = {key: lane for key, lane in lanes.items() if len(lane) >= 3}
    best: dict[tuple[str, bool], dict[int, tuple[float, int]]] = {}
    for key, lane in lanes.items():
        serves: dict[int, tuple[float, int]] = {}
        for frame, donors in lane.items():
            offset_m, row = min(donors)
            serves[row] = min((offset_m, frame), serves.get(row, (offset_m, frame)))
        best[key] = serves
    if not best:
        assert history is None
        return
    assert history is not None
    chosen = min(best.values(), key=lambda serves: (-len(serves), sum(offset_m for offset_m, _ in serves.values())))
    pairs = sorted((frame, row) for row, (_, frame) in chosen.items())
    assert list(zip(history.target.tolist(), history.frame.tolist(), strict=True)) == pairs
    assert len({table.traversal[row] for row in history.frame.tolist()}) == 1
    assert len(set((history.lateral_m > 0).tolist())) == 1


@given(st.integers(0, 10_000), st.sampled_from([0.0, 1.0]))
def test_gates_and_traversals_are_respected(seed: int, conflict_rate: float) -> None:
    table, target, poses = crowded(seed)
    before = target.world_from_camera.clone()
    gates = Gates(max_distance_m=8.0, max_heading_deg=30.0)
    history = HistoryIndex(table, gates).retrieve(target, 5, torch.Generator().manual_seed(seed), conflict_rate)
    rows = history.frame.tolist()
    assert len(set(rows)) == len(set(history.target.tolist())) == history.count
    assert all(table.location[row] == "north" and table.traversal[row] != "c" for row in rows)
    offset = poses[rows, :3, 3] - before[history.target, :3, 3]
    assert torch.allclose(offset.norm(dim=-1), history.distance_m, atol=1e-8)
    assert (history.distance_m <= 8.0).all()
    assert (history.heading_rad.rad2deg().abs() <= 30.0).all()
    if history.is_conflict:
        assert ((history.lateral_m.abs() >= 2.5) & (history.lateral_m.abs() <= 6.0)).all()
        assert (history.longitudinal_m.abs() <= 2.5).all()
    assert torch.equal(target.world_from_camera, before)


def test_history_carries_tagged_times_and_timestamps() -> None:
    table = table_of({"mine": drive(0.0), "other": drive(0.4)})
    target = Target(drive(0.0), "town", "mine")
    history = HistoryIndex(table).retrieve(target, 3, torch.Generator(), conflict_rate=0.0)
    assert history.target.tolist() == [2, 6, 10]
    assert history.frame.tolist() == [15, 19, 23]
    assert history.time.tolist() == [2 + HISTORY_TIME_TAG, 6 + HISTORY_TIME_TAG, 10 + HISTORY_TIME_TAG]
    assert torch.allclose(history.timestamp_s, 1000 + torch.tensor([2, 6, 10]) / 12)
    assert torch.allclose(history.lateral_m, torch.full((3,), 0.4, dtype=torch.float64))
    assert HistoryIndex(table).nearest(target, [4]).time.tolist() == [104.0]


def test_lateral_is_right_and_heading_turns_right() -> None:
    table = table_of({"other": drive(3.0, yaw_rad=0.2, start_m=1.0)})
    history = HistoryIndex(table).neighbouring_lane(Target(drive(0.0), "town", "mine"), [3, 5, 8])
    assert history is not None
    assert torch.allclose(history.lateral_m, torch.full((3,), 3.0, dtype=torch.float64))
    assert torch.allclose(history.heading_rad, torch.full((3,), 0.2, dtype=torch.float64))
    assert torch.allclose(history.longitudinal_m, torch.full((3,), -0.5, dtype=torch.float64))


def test_neighbour_is_chosen_by_overlap_then_by_offset() -> None:
    target, asked = Target(drive(0.0), "town", "mine"), spread_frames(13, 6)
    lanes = {"short": drive(3.0, frames=7), "left": drive(-3.5, start_m=0.5), "right": drive(3.5, start_m=0.4)}
    index = HistoryIndex(table_of(lanes))
    history = index.neighbouring_lane(target, asked)
    assert history is not None
    assert {index.table.traversal[row] for row in history.frame.tolist()} == {"right"}
    assert history.target.tolist() == asked
    too_short = HistoryIndex(table_of({"short": drive(3.0, frames=3)}))  # abreast of 2 of 6, and half are asked for
    assert too_short.neighbouring_lane(target, asked) is None


@pytest.mark.parametrize(
    "other",
    [
        {"oncoming": drive(3.5, yaw_rad=math.pi)},
        {"same lane": drive(0.5)},
        {"far lane": drive(7.0)},
        {"ahead": drive(3.5, start_m=40.0)},
        {"mine": drive(3.5)},
    ],
)
def test_who_is_no_neighbour(other: dict[str, torch.Tensor]) -> None:
    index = HistoryIndex(table_of(other))
    assert index.neighbouring_lane(Target(drive(0.0), "town", "mine"), spread_frames(13, 4)) is None


def test_rate_of_conflicts() -> None:
    index = HistoryIndex(table_of({"near": drive(0.5), "lane": drive(3.5)}))
    target, generator = Target(drive(0.0), "town", "mine"), torch.Generator().manual_seed(0)
    for rate in (0.0, 0.25, 0.6, 1.0):
        drawn = [index.retrieve(target, 2, generator, rate).is_conflict for _ in range(400)]
        assert abs(sum(drawn) / 400 - rate) <= 4 * math.sqrt(rate * (1 - rate) / 400)
    default = [index.retrieve(target, 2, torch.Generator().manual_seed(s)).is_conflict for s in range(400)]
    assert abs(sum(default) / 400 - 0.25) <= 4 * math.sqrt(0.25 * 0.75 / 400)


def test_same_generator_same_history_and_one_draw_a_clip() -> None:
    rich = HistoryIndex(table_of({"near": drive(0.5), "lane": drive(3.5)}))
    poor = HistoryIndex(table_of({"near": drive(0.5)}))
    target = Target(drive(0.0), "town", "mine")
    a, b = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    for _ in range(20):
        with_lane, without = rich.retrieve(target, 2, a, 0.5), poor.retrieve(target, 2, b, 0.5)
        assert not without.is_conflict
        if not with_lane.is_conflict:
            assert torch.equal(with_lane.frame, without.frame)
    assert torch.equal(a.get_state(), b.get_state())


def test_nothing_to_retrieve_is_an_empty_history() -> None:
    index = HistoryIndex(table_of({"mine": drive(0.0)}))
    for target in (Target(drive(0.0), "town", "mine"), Target(drive(0.0), "elsewhere", "other")):
        history = index.retrieve(target, 3, torch.Generator(), conflict_rate=1.0)
        assert history.count == 0
        assert not history.is_conflict
        assert all(len(column) == 0 for name, column in vars(history).items() if name != "is_conflict")


def test_distance_gate_is_sharp() -> None:
    target = Target(drive(0.0), "town", "mine")
    for offset_m, found in ((10.0, 1), (10.0 + 5e-9, 0)):
        assert HistoryIndex(table_of({"other": drive(offset_m, frames=1)})).nearest(target, [0]).count == found


def test_the_edges_of_a_lane_belong_to_it() -> None:
    target = Target(drive(0.0), "town", "mine")
    for lane_m, ahead_m in ((2.5, 0.0), (6.0, 0.0), (3.5, 2.5)):
        index = HistoryIndex(table_of({"other": drive(lane_m, frames=1, start_m=ahead_m)}))
        assert index.neighbouring_lane(target, [0]) is not None


def test_half_a_turn_switches_the_heading_gate_off() -> None:
    oncoming = table_of({"oncoming": drive(0.5, yaw_rad=math.pi)})
    index = HistoryIndex(oncoming, Gates(max_heading_deg=180.0))
    assert index.nearest(Target(drive(0.0), "town", "mine"), [0]).count == 1


def test_ties_go_to_the_smaller_row_the_first_name_and_the_left() -> None:
    target = Target(drive(0.0), "town", "mine")
    twins = HistoryIndex(table_of({"a": drive(0.5), "b": drive(0.5)}))
    assert twins.nearest(target, [3, 8]).frame.tolist() == [3, 8]
    both_sides = {"b": drive(-3.5), "a": torch.cat((drive(3.5), drive(-3.5)))}
    history = HistoryIndex(table_of(both_sides)).neighbouring_lane(target, [0, 5])
    assert history is not None
    assert history.frame.tolist() == [26, 31]  # rows of a begin at 13, those on its left at 26


def test_spread_frames() -> None:
    assert spread_frames(13, 3) == [2, 6, 10]
    assert spread_frames(13, 1) == [6]
    assert spread_frames(3, 10) == [0, 1, 2]


def test_bad_input_is_named() -> None:
    poses = drive(0.0, frames=2)
    stamps = torch.zeros(2)
    for match, make in {
        "location must be one entry for each of 2 frames, got 1": lambda: FrameTable(poses, ["a"], ["b", "b"], stamps),
        "timestamp_s must be finite": lambda: FrameTable(poses, ["a"] * 2, ["b"] * 2, stamps / 0),
        r"world_from_camera must be \[F, 4, 4\]": lambda: FrameTable(poses[0], ["a"], ["b"], stamps),
        r"world_from_camera must be \[T, 4, 4\]": lambda: Target(poses[0], "a", "b"),
        "lane_m must be rising": lambda: Gates(max_distance_m=4.0),
        "gates must be": lambda: Gates(max_heading_deg=0.0),
        "abreast_m, min_overlap must be": lambda: Gates(min_overlap=0.0),
        "count must be at least 1": lambda: spread_frames(13, 0),
    }.items():
        with pytest.raises(ValueError, match=match):
            make()
    index, target = HistoryIndex(table_of({"a": poses})), Target(poses, "town", "b")
    for asked in ([0, 2], [-1, 1], []):
        with pytest.raises(ValueError, match="asked must be frames of the clip"):
            index.nearest(target, asked)
    with pytest.raises(ValueError, match="conflict_rate must be a probability"):
        index.retrieve(target, 1, torch.Generator(), conflict_rate=1.5)
    nan = poses.clone()
    nan[1, 0, 3] = math.nan
    with pytest.raises(ValueError, match="NaN or inf at index"):
        Target(nan, "town", "b")

"""Curation keeps what it must, repeats itself, and reads what it wrote."""

import itertools
import json
import math
import time
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from scenes import curved_drive, random_poses, random_rotations, straight_drive

from merope.curation import frechet_distance
from merope.curation.curate import (
    Curation,
    _cluster_hues,
    curate,
    curate_trajectories,
    draw_curation,
    ground_paths,
    read_manifest,
    summary,
    write_manifest,
)
from merope.curation.frechet_distance import discrete_frechet, frechet_below, suppress_groups
from merope.formats.trajectory import Trajectory
from merope.geometry.poses import rigid
from tests.curation.drives import drives


def test_equal_paths_are_one_prototype_and_paths_exactly_at_the_threshold_are_two() -> None:
    paths = torch.zeros(4, 5, 2)
    paths[2:, :, 0] = 1.0
    for scope in ("cluster", "global"):
        assert curate(paths, clusters=1, suppression_m=1.0, scope=scope).prototype.tolist() == [0, 0, 2, 2]
        assert curate(paths, clusters=1, suppression_m=1.01, scope=scope).prototype.tolist() == [0, 0, 0, 0]


@pytest.fixture(scope="module")
def many() -> torch.Tensor:
    return drives(4000)


@pytest.fixture(scope="module")
def by_cluster(many: torch.Tensor) -> Curation:
    return curate(many, clusters=24)


@pytest.mark.parametrize("scope", ["cluster", "global"])
def test_kept_are_apart_and_dropped_are_near(many: torch.Tensor, scope: str) -> None:
    curation, paths = curate(many, clusters=24, scope=scope), many.numpy()
    kept = curation.kept.nonzero().squeeze(-1).tolist()
    assert 200 < len(kept) < 2000
    group = curation.cluster.tolist() if scope == "cluster" else [0] * len(paths)
    for a, b in itertools.combinations(kept, 2):
        if group[a] == group[b]:
            assert not frechet_below(paths[a], paths[b], 1.0)
    for path, prototype in enumerate(curation.prototype.tolist()):
        assert curation.kept[prototype]
        assert group[path] == group[prototype]
        assert frechet_below(paths[path], paths[prototype], 1.0)
    for path in range(0, len(paths), 100):
        assert discrete_frechet(paths[path], paths[int(curation.prototype[path])]) < 1.0


def test_global_suppression_keeps_fewer(many: torch.Tensor, by_cluster: Curation) -> None:
    assert int(curate(many, clusters=24, scope="global").kept.sum()) < int(by_cluster.kept.sum())


def test_same_seed_same_result_with_any_number_of_threads(
    many: torch.Tensor, by_cluster: Curation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frechet_distance, "usable_cores", lambda: 1)
    again = curate(many, clusters=24)
    assert torch.equal(again.cluster, by_cluster.cluster)
    assert torch.equal(again.prototype, by_cluster.prototype)
    assert not torch.equal(curate(many, clusters=24, seed=1).cluster, by_cluster.cluster)


def test_path_nearest_to_the_centre_is_kept() -> None:
    paths = drives(500, seed=3)
    features = paths[:, ::6].flatten(1)
    medoid = int((features - features.mean(0)).norm(dim=-1).argmin())
    prototype = curate(paths, clusters=1, suppression_m=5.0).prototype
    assert prototype[medoid] == medoid
    near = [i for i in range(500) if frechet_below(paths[i].numpy(), paths[medoid].numpy(), 25.0)]
    assert len(near) > 20
    assert (prototype[near] == medoid).all()


def test_clusters_separate_kinds_of_motion() -> None:
    left, right = drives(60) * 0.01, drives(60) * 0.01
    s = torch.linspace(0, 20, 49)
    left[..., 0] -= s
    right[..., 0] += s
    cluster = curate(torch.cat((left, right)), clusters=2).cluster
    assert len(set(cluster[:60].tolist())) == len(set(cluster[60:].tolist())) == 1
    assert cluster[0] != cluster[60]


@pytest.mark.parametrize("point", [25, 49], ids=["bulge", "end"])
def test_paths_that_differ_on_the_way_or_in_the_last_point_are_of_different_kinds(point: int) -> None:
    paths = 0.01 * drives(60, points=50)
    width = 6.0 if point == 25 else 0.1  # the last point is none of every sixth
    aside_m = 5.0 * torch.exp(-((torch.arange(50) - point) / width).square())
    paths[..., 0] += torch.cat((aside_m.expand(30, 50), -aside_m.expand(30, 50)))
    cluster = curate(paths, clusters=2).cluster
    assert len(set(cluster[:30].tolist())) == len(set(cluster[30:].tolist())) == 1
    assert cluster[0] != cluster[30]


def test_ground_paths_are_the_first_cameras_right_and_forward() -> None:
    poses = torch.stack((straight_drive(7), curved_drive(7)))
    paths = ground_paths(poses)
    assert torch.allclose(paths, poses[..., (0, 2), 3], atol=1e-12)
    world = rigid(random_rotations(seed=2), torch.tensor([4e6, -1e6, 3e6], dtype=torch.float64))
    assert (ground_paths(world @ poses) - paths).abs().max() < 1e-8
    tilted = random_poses(3, 5, seed=4)
    first, last = tilted[1, 0], tilted[1, 4]
    expected = first[:3, :3].T @ (last[:3, 3] - first[:3, 3])
    assert torch.allclose(ground_paths(tilted)[1, 4], expected[[0, 2]], atol=1e-12)


def test_real_highway_is_straight_ahead(highway: torch.Tensor) -> None:
    path = ground_paths(highway[None])[0]
    assert path[-1, 1] > 50
    assert path[-1, 0].abs() < 0.2 * path[-1, 1]


def test_bad_input_is_named() -> None:
    paths, nan = drives(10), drives(10)
    nan[3, 2, 0] = math.nan
    for match, arguments in {
        "paths must be a tensor": {"paths": paths[0]},
        "NaN or inf in path 3": {"paths": nan},
        "clusters must be between 1 and the 10 paths, got 11": {"paths": paths, "clusters": 11},
        "suppression_m must be a positive": {"paths": paths, "clusters": 2, "suppression_m": 0.0},
        "seed must be an integer in .*, got -1": {"paths": paths, "clusters": 2, "seed": -1},
        "seed must be an integer in .*, got 4294967296": {"paths": paths, "clusters": 2, "seed": 2**32},
        "scope must be": {"paths": paths, "clusters": 2, "scope": "everywhere"},
    }.items():
        with pytest.raises(ValueError, match=match):
            curate(**arguments)
    with pytest.raises(ValueError, match=r"world_from_camera must be a tensor \[N, T, 4, 4\]"):
        ground_paths(straight_drive(4))
    broken = straight_drive(4)[None].clone()
    broken[0, 2, 0, 3] = math.nan
    with pytest.raises(ValueError, match=r"NaN or inf at index \[0, 2\]"):
        ground_paths(broken)


def test_manifest_round_trip(tmp_path: Path, by_cluster: Curation) -> None:
    ids = [f"scene-{index:05d}/ä" for index in range(len(by_cluster.cluster))]
    write_manifest(tmp_path / "manifest.jsonl", ids, by_cluster)
    manifest = read_manifest(tmp_path / "manifest.jsonl")
    assert manifest.ids == tuple(ids)
    assert torch.equal(manifest.curation.cluster, by_cluster.cluster)
    assert torch.equal(manifest.curation.prototype, by_cluster.prototype)
    assert torch.equal(manifest.curation.kept, by_cluster.kept)
    assert [file.name for file in tmp_path.iterdir()] == ["manifest.jsonl"]


ROW = {"id": "a", "cluster": 0, "prototype": "a", "is_prototype": True}
CHAIN = [ROW, {**ROW, "id": "b", "is_prototype": False}, {**ROW, "id": "c", "prototype": "b", "is_prototype": False}]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "manifest.jsonl must be a manifest with at least one clip, got an empty file"),
        ("\n \n", "an empty file"),
        (json.dumps(ROW) + '\n{"id": "b", "clu', "manifest.jsonl, line 2 must be a JSON object"),
        ("[1, 2]", "line 1 must be a JSON object"),
        (json.dumps({**ROW, "cluster": "0"}), "line 1 must be an object with id"),
        (json.dumps({**ROW, "cluster": -1}), "line 1 must be a cluster from 0 on"),
        (json.dumps({**ROW, "is_prototype": 1}), "line 1 must be an object with id"),
        (json.dumps(ROW) + "\n" + json.dumps(ROW), "'a' at position 1"),
        (json.dumps({**ROW, "prototype": "z", "is_prototype": False}), "'z' for clip 'a'"),
        (json.dumps({**ROW, "is_prototype": False}), "'a' for clip 'a'"),
        (json.dumps(ROW) + "\n" + json.dumps({**ROW, "id": "b"}), "'a' for clip 'b'"),
        ("\n".join(json.dumps(row) for row in CHAIN), "'b' for clip 'c'"),
    ],
)
def test_broken_manifest_is_named(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "manifest.jsonl").write_text(text)
    with pytest.raises(ValueError, match=match):
        read_manifest(tmp_path / "manifest.jsonl")


def test_interrupted_writing_leaves_the_old_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, curation = tmp_path / "manifest.jsonl", Curation(torch.tensor([0, 0]), torch.tensor([0, 0]))
    write_manifest(file, ["a", "b"], curation)

    def interrupt(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("json.dumps", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_manifest(file, ["c", "d"], curation)
    assert read_manifest(file).ids == ("a", "b")


def test_ids_must_be_complete_and_different(tmp_path: Path) -> None:
    curation = Curation(torch.tensor([0, 0]), torch.tensor([0, 0]))
    for ids, match in ((["a"], "one for each of the 2 paths"), (["a", "a"], "'a' at position 1"), (["", "a"], "''")):
        with pytest.raises(ValueError, match=match):
            write_manifest(tmp_path / "manifest.jsonl", ids, curation)


def named_drive(name: str, step_m: float, count: int = 13, is_metric: bool = True) -> Trajectory:
    return Trajectory(straight_drive(count, step_m=step_m), is_metric, "made for a test", name=name)


def test_trajectories_to_files(tmp_path: Path) -> None:
    trajectories = [named_drive(f"clip{index}", 0.05 * index) for index in range(40)]
    curation = curate_trajectories(trajectories, tmp_path / "out", clusters=3, suppression_m=0.5)
    manifest = read_manifest(tmp_path / "out" / "manifest.jsonl")
    assert manifest.ids[7] == "clip7"
    assert torch.equal(manifest.curation.prototype, curation.prototype)
    report = json.loads((tmp_path / "out" / "curation.json").read_text())
    assert report["clips"] == 40
    assert report["suppression_m"] == 0.5
    # End points lie 0.6 m apart, more than the threshold of 0.5 m: nothing is suppressed.
    assert report["prototypes"] == sum(report["prototypes_per_cluster"]) == 40
    assert len(matplotlib.image.imread(tmp_path / "out" / "curation.png")) > 300


def test_trajectories_that_do_not_belong_are_named(tmp_path: Path) -> None:
    good = named_drive("good", 1.0)
    for bad, match in {
        named_drive("sfm", 1.0, is_metric=False): "'sfm' must be metric",
        named_drive("short", 1.0, count=5): "'short' must be 13 poses long like 'good', got 5",
        named_drive("good", 2.0): "'good' at position 1",
        named_drive("", 2.0): "'' at position 1",
    }.items():
        with pytest.raises(ValueError, match=match):
            curate_trajectories([good, bad], tmp_path)
    with pytest.raises(ValueError, match="trajectories must be at least one"):
        curate_trajectories([], tmp_path)


def test_picture_shows_prototypes_in_colour(tmp_path: Path, many: torch.Tensor, by_cluster: Curation) -> None:
    draw_curation(by_cluster, many, tmp_path / "curation.png")
    picture = matplotlib.image.imread(tmp_path / "curation.png")[..., :3]
    for half in np.array_split(picture, 2, axis=1):
        assert (np.ptp(half, axis=-1) > 0.3).mean() > 0.03


def test_summary_counts(by_cluster: Curation) -> None:
    numbers = summary(by_cluster)
    assert numbers["clips"] == sum(numbers["clips_per_cluster"]) == 4000
    assert numbers["prototypes"] == sum(numbers["prototypes_per_cluster"]) == int(by_cluster.kept.sum())
    assert numbers["clips_per_cluster"][3] == int((by_cluster.cluster == 3).sum())
    with_a_gap = summary(Curation(torch.tensor([0, 2, 2]), torch.tensor([0, 1, 1])))
    assert with_a_gap["occupied_clusters"] == 2
    assert with_a_gap["clips_per_cluster"] == [1, 0, 2]
    assert with_a_gap["prototypes_per_cluster"] == [1, 0, 1]


def test_colours_go_from_paths_that_end_left_to_those_that_end_right() -> None:
    ends = torch.tensor([[9.0, 10.0], [-9.0, 10.0], [0.5, 10.0]])  # right, left, ahead
    assert _cluster_hues(torch.arange(3), ends[:, None]).tolist() == [1.0, 0.0, 0.5]


def test_progress_is_shown_for_long_work(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = itertools.count(0.0, 0.7)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    curate(drives(50), clusters=2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("clustering: ")
    assert "clustering: 400 of 400 steps" in lines
    assert len(lines) < 100


def test_interruption_stops_the_suppression(many: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def slowly(paths: np.ndarray, marks: np.ndarray, order: np.ndarray, *_: object) -> None:
        started.append(int(order[0]))
        time.sleep(0.01)

    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(frechet_distance, "_suppress_group", slowly)
    with pytest.raises(KeyboardInterrupt):
        suppress_groups(many.numpy(), np.array_split(np.arange(len(many)), 200), 1.0, interrupt)
    assert len(started) < 100

"""Mixtures of data sets: drawn by weights or clusters, the same after a stop and on any ranks, alike or refused."""

import json
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scenes import curved_drive

from merope.cli import main
from merope.curation.curate import Curation, write_manifest
from merope.curation.path_tables import PathTable, curate_table
from merope.datasets.cache import CachedSource
from merope.datasets.kinds import MixtureData
from merope.datasets.mixture import joined
from merope.datasets.sampler import ClusterSampler
from merope.formats.video import write_image, write_video
from merope.train.caching import cache_clips
from merope.train.clip_streams import ClipStream
from merope.train.config import HistorySection, TrainConfig
from merope.train.loop import train
from merope.train.mixed_streams import mixed_curation, mixed_stream
from merope.train.model import Model, build_model
from merope.train.streams import Share
from merope.train.toml_config import build, read_config, read_table
from tests.tiny_pipelines import HEIGHT, WIDTH
from tests.train.ranks import run_ranks

DRAWS = 20_000
SIZE = f"frames = 5\nheight = {HEIGHT}\nwidth = {WIDTH}\n"
MIXTURE = f"""
base = "tiny.toml"

[run]
batch_size = 4
validation_clips = 2

[data]
kind = "mixture"
workers = 0
may_differ = ["frame_rate", "scale"]

[[data.sources]]
kind = "world"
weight = 1
worlds = 10
frame_rate_hz = 12.0
{SIZE}
[[data.sources]]
kind = "nuscenes"
weight = 2
root = "{{root}}/nuscenes"
version = "v1.0-mini"
split_file = "{{root}}/splits.json"
clusters = "{{root}}/clusters.jsonl"
{SIZE}
[[data.sources]]
kind = "panshot"
weight = 1
root = "{{root}}/panshot"
samples = "{{root}}/panshot/samples.json"
{SIZE}
"""


def write_panshot(root: Path) -> None:
    """Two shots of a panorama through unified cameras."""
    root.mkdir()
    rows = []
    for number, (fov_deg, xi) in enumerate([(90.0, 0.0), (170.0, 1.6)]):
        name = f"pan-{number}-0-no_rot_aug_0"
        np.save(root / f"{name}.npy", curved_drive(5, step_m=0.5 + number)[:, :3].numpy())
        images = torch.full((5, HEIGHT, WIDTH, 3), 60 * number, dtype=torch.uint8)
        write_video(images, root / f"{name}.mp4", fps=16.0)
        rows.append({"pose_path": f"{name}.npy", "video_path": f"{name}.mp4", "x_fov": fov_deg, "xi": xi})
    (root / "samples.json").write_text(json.dumps(rows))


@pytest.fixture(scope="module")
def files(tiny_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three sources. Of the ten windows of nuScenes, seven are in one cluster and three in another."""
    root = tmp_path_factory.mktemp("mixture")
    for name in ("wan", "nuscenes", "splits.json", "tiny.toml"):
        (root / name).symlink_to(tiny_files / name)
    write_panshot(root / "panshot")
    names = [
        f"{scene}/CAM_FRONT/{start}"
        for scene, first in (("scene-0000", 0), ("scene-0001", 9))
        for start in range(first, first + 5)
    ]
    cluster = torch.tensor([0] * 7 + [4] * 3)
    write_manifest(root / "clusters.jsonl", names, Curation(cluster, torch.arange(10)))
    (root / "mixture.toml").write_text(MIXTURE.format(root=root))
    return root


def mixture(files: Path, out: Path, *changes: str) -> TrainConfig:
    return read_config(TrainConfig, files / "mixture.toml", [f"run.out={out}", *changes])


@pytest.fixture(scope="module")
def model(files: Path) -> Model:
    return build_model(mixture(files, files), torch.device("cpu"), sharded=False)


def stream(config: TrainConfig, model: Model, rank: int = 0, ranks: int = 1, micro_batch: int = 1) -> ClipStream:
    assert isinstance(config.data, MixtureData)
    return mixed_stream(config, config.data, model, Share(rank, ranks, micro_batch))


def learn(files: Path, out: Path, *changes: str) -> None:
    train(mixture(files, out, *changes))


def log_rows(out: Path) -> list[dict[str, float]]:
    times = ("clips_per_s", "memory_gib")
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in times} for row in rows]


def test_two_ranks_train_on_three_kinds_and_resume_to_the_bit(files: Path, tmp_path: Path) -> None:
    run_ranks(2, learn, files, tmp_path / "whole", "run.steps=2")
    for steps, workers in ((1, 0), (2, 1)):
        run_ranks(2, learn, files, tmp_path / "parts", f"run.steps={steps}", f"data.workers={workers}")
    assert log_rows(tmp_path / "whole") == log_rows(tmp_path / "parts")
    weights = [
        load_file(tmp_path / run / "trained/branch/diffusion_pytorch_model.safetensors") for run in ("whole", "parts")
    ]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    _check_log(log_rows(tmp_path / "whole"))


def _check_log(rows: list[dict[str, float]]) -> None:
    """The losses of the sources, weighed by their clips, are the loss of the step."""
    sources, total = ("world", "nuscenes", "panshot"), Counter[str]()
    for row in rows:
        counts = {name: row.get(f"clips/{name}", 0.0) for name in sources}
        assert sum(counts.values()) == 4
        losses = [row[f"loss/{name}"] * count for name, count in counts.items() if count]
        assert sum(losses) / 4 == pytest.approx(row["loss"], rel=1e-12)
        total.update(counts)
    assert all(total[name] for name in sources)
    (validated,) = [row for row in rows if row["step"] == 2]
    assert validated["validation_clips/world"] == validated["validation_clips/nuscenes"] == 1  # as many of each


def test_a_batch_of_ranks_is_that_of_one_process(files: Path, model: Model, tmp_path: Path) -> None:
    config = mixture(files, tmp_path)
    alone = [part for step in range(3) for part in stream(config, model).step(step)]
    both = [list(stream(config, model, rank, 2).step(0)) for rank in range(2)]
    assert {part.places[0]: part.names[0] for part in alone[:4]} == {
        part.places[0]: part.names[0] for parts in both for part in parts
    }
    for part in alone:
        assert part.names[0].split("/")[0] == config.data.source_names[part.sources[0]]
        assert part.clean.shape == alone[0].clean.shape


def draws(config: TrainConfig, model: Model) -> Counter[str]:
    """Names of so many draws, without a single clip read."""
    loader = stream(config, model).loader
    sampler = loader.sampler
    found: list[int] = []
    while len(found) < DRAWS:
        found += islice(sampler, DRAWS - len(found))
    return Counter(loader.source.name(index) for index in found)


def is_as_often(counts: Counter[str], expected: Callable[[str], float]) -> bool:
    """Every clip within five standard deviations of its share."""
    shares = {name: expected(name) for name in counts}
    assert sum(shares.values()) == pytest.approx(1.0)
    return all(
        abs(counts[name] / DRAWS - share) < 5 * (share * (1 - share) / DRAWS) ** 0.5 for name, share in shares.items()
    )


def test_weights_and_clusters_decide_how_often_a_clip_is_drawn(files: Path, model: Model, tmp_path: Path) -> None:
    """A quarter of the draws are worlds, half nuScenes, a quarter PanShot; the two clusters of nuScenes are equal."""
    counts = draws(mixture(files, tmp_path), model)
    first_cluster = {f"nuscenes/scene-0000/CAM_FRONT/{k}" for k in range(5)}
    first_cluster |= {f"nuscenes/scene-0001/CAM_FRONT/{k}" for k in (9, 10)}

    def expected(name: str) -> float:
        source = name.split("/")[0]
        if source == "nuscenes":
            return 1 / 4 / (7 if name in first_cluster else 3)
        return 1 / 4 / (10 if source == "world" else 2)

    assert len(counts) == 22
    assert is_as_often(counts, expected)
    assert not is_as_often(counts, lambda name: 1 / 22)


def without_world(files: Path) -> dict[str, object]:
    """The two sources with files, as the manifest of both names them."""
    config = mixture(files, files)
    assert isinstance(config.data, MixtureData)
    _, nuscenes, panshot = config.data.sources
    return {"sources": (replace(nuscenes, weight=1.0, clusters=None), panshot)}  # type: ignore[call-arg]


def test_one_set_of_clusters_over_all_sources(files: Path, model: Model, tmp_path: Path) -> None:
    """As in the paper: clusters are drawn alike, whatever their clips are from."""
    config = mixture(files, tmp_path)
    data = replace(config.data, **without_world(files))  # type: ignore[arg-type]
    table = data.training_clips()
    names = [table.name(index) for index in range(len(table))]
    clusters = torch.tensor([0] * 6 + [1] * 4 + [1, 2])  # the second one is shared
    write_manifest(tmp_path / "both.jsonl", names, Curation(clusters, torch.arange(12)))
    config = replace(config, data=replace(data, clusters=tmp_path / "both.jsonl"))
    sizes = {0: 6, 1: 5, 2: 1}
    number = dict(zip(names, clusters.tolist(), strict=True))
    assert is_as_often(draws(config, model), lambda name: 1 / 3 / sizes[number[name]])


def test_a_source_without_a_drawn_cluster_keeps_its_share() -> None:
    sparse = Curation(torch.tensor([5, 5, 2]), torch.tensor([0, 0, 2]))
    curation, chances = joined([sparse, Curation(torch.zeros(4, dtype=torch.long), torch.arange(4))], [3.0, 1.0])
    assert curation.prototype.tolist() == [0, 0, 2, 3, 4, 5, 6]
    assert chances[curation.cluster.unique()].tolist() == pytest.approx([0.375, 0.375, 0.25])
    sampler = ClusterSampler(curation, prototypes_only=True, chances=chances, epoch_length=DRAWS)
    counts = Counter(sampler)
    assert set(counts) == {0, 2, 3, 4, 5, 6}
    assert counts[0] / DRAWS == pytest.approx(0.375, abs=0.02)


def test_another_weight_is_another_run(files: Path, model: Model, tmp_path: Path) -> None:
    config = mixture(files, tmp_path)
    assert isinstance(config.data, MixtureData)
    state = stream(config, model).state_dict()
    sources = (replace(config.data.sources[0], weight=3.0), *config.data.sources[1:])
    with pytest.raises(ValueError, match="fingerprint"):
        stream(replace(config, data=replace(config.data, sources=sources)), model).load_state_dict(state)


def test_a_cache_of_one_source_mixes_with_frames_of_another(files: Path, model: Model, tmp_path: Path) -> None:
    config = mixture(files, tmp_path)
    assert isinstance(config.data, MixtureData)
    panshot = config.data.sources[2]
    assert cache_clips(replace(config, data=panshot), tmp_path / "cache", validation=False) == {}
    start = MIXTURE.index('[[data.sources]]\nkind = "nuscenes"')
    cached = f'[[data.sources]]\nkind = "cache"\nname = "panshot"\nroot = "{tmp_path}/cache"\n'
    text = MIXTURE[:start].replace('"tiny.toml"', f'"{files}/tiny.toml"') + cached
    (tmp_path / "cached.toml").write_text(text)
    both = read_config(TrainConfig, tmp_path / "cached.toml", [f"run.out={tmp_path}"])
    parts = list(stream(both, model).step(0))
    assert {part.names[0].split("/")[0] for part in parts} <= {"panshot", "world"}
    assert {part.clean.shape for part in parts} == {(1, 4, 2, 2, 4)}


DIFFER = 'may_differ = ["frame_rate", "scale"]'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (DIFFER, "", "frame rate, got world with 12 Hz, nuscenes with 12 Hz, panshot with 16 Hz"),
        (DIFFER, 'may_differ = ["frame_rate"]', "of one scale, got .*panshot with an arbitrary one"),
        ("12.0\nframes = 5", "12.0\nframes = 9", "got world with 9×32×64, nuscenes with 5×32×64"),
        ("worlds = 10", "worlds = 10\nrig_yaw_deg = [0, 90]", "got world with 2×5×32×64, nuscenes with 1×5×32×64"),
        ("weight = 1\nworlds", "weight = 0\nworlds", "weight of source 'world' of the mixture must be positive"),
        ('"panshot"', '"panshot"\nname = "nuscenes"', "names of data.sources must be different, got 'nuscenes' twice"),
        ("worlds = 10", "worlds = 10\nnoise_draws = 2", "noise_draws of source 'world' .* not given"),
        ("workers = 0", 'clusters = "{root}/clusters.jsonl"', "clips that a manifest can name, got 'world'"),
    ],
)
def test_what_cannot_be_mixed_is_named(
    files: Path, model: Model, tmp_path: Path, old: str, new: str, message: str
) -> None:
    text = MIXTURE.replace(old, new, 1).replace("{root}", str(files)).replace('"tiny.toml"', f'"{files}/tiny.toml"')
    assert old in MIXTURE
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        stream(read_config(TrainConfig, tmp_path / "run.toml", [f"run.out={tmp_path}"]), model)


def test_lenses_of_several_kinds_come_one_at_a_time(files: Path, model: Model, tmp_path: Path) -> None:
    config = mixture(files, tmp_path, "run.micro_batch=2")
    with pytest.raises(ValueError, match=r"lens within a batch, got world with Pinhole, .*panshot with UnifiedCamera"):
        stream(config, model, micro_batch=2)
    assert isinstance(config.data, MixtureData)
    pinholes = replace(config.data, sources=config.data.sources[:2])
    (first, *_) = stream(replace(config, data=pinholes), model, micro_batch=2).step(0)
    assert first.clean.shape[0] == len(first.sources) == first.cameras.world_from_camera.shape[0] == 2


def test_history_needs_a_source_that_knows_places(files: Path, model: Model, tmp_path: Path) -> None:
    config = mixture(files, tmp_path)
    assert isinstance(config.data, MixtureData)
    panshot = replace(config.data, sources=config.data.sources[2:])
    asked = replace(config, data=panshot)
    object.__setattr__(asked, "history", HistorySection())  # the branch of this model has none
    with pytest.raises(ValueError, match=r"data.sources with \[history\] must be one at least that knows places"):
        stream(asked, model)


def test_a_weight_belongs_to_a_mixture(files: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.weight must be left out, as nothing else is drawn, got 2"):
        read_config(TrainConfig, files / "tiny.toml", ["data.weight=2.0"])


def test_a_config_is_curated_under_the_names_of_its_training(files: Path, tmp_path: Path) -> None:
    """And the manifest is one set of clusters over all of its sources."""
    text = MIXTURE.format(root=files).replace('"tiny.toml"', f'"{files}/tiny.toml"')
    first, _, nuscenes, _ = text.split("[[data.sources]]")
    nuscenes = nuscenes.replace("weight = 2", "").replace(f'clusters = "{files}/clusters.jsonl"', "")
    kept = first + "".join(f"[[data.sources]]{part}" for part in (nuscenes, f'{nuscenes}name = "again"\n'))
    (tmp_path / "run.toml").write_text(kept)
    assert main(["curate", "--config", str(tmp_path / "run.toml"), "--clusters", "2", "--out", str(tmp_path)]) == 0
    data = replace(read_config(TrainConfig, tmp_path / "run.toml").data, clusters=tmp_path / "manifest.jsonl")  # type: ignore[call-arg]
    assert isinstance(data, MixtureData)
    curation, chances = mixed_curation(data, data.training_clips())
    assert chances is None
    assert torch.equal(curation.cluster[:10], curation.cluster[10:])  # the same drives
    assert len(curation.cluster.unique()) == 2


def write_openscene(root: Path, drives: int) -> None:
    """Renders in OpenScene's layout, a meta file each."""
    (root / "meta").mkdir(parents=True)
    for drive in range(drives):
        frames: list[dict[str, Any]] = []
        for index, pose in enumerate(curved_drive(5, yaw_step_rad=0.1 * drive)):
            camera = {"data_path": f"CAM_F0/{drive}-{index}.png", "cam_intrinsic": np.diag([50.0, 50.0, 1.0])}
            camera |= {"sensor2lidar_rotation": np.eye(3), "sensor2lidar_translation": np.zeros(3)}
            write_image(torch.full((HEIGHT, WIDTH, 3), 40 * drive, dtype=torch.uint8), root / camera["data_path"])
            times = {"timestamp": 100_000 * index, "lidar2global": pose.numpy()}
            frames.append({**times, "cams": {"CAM_F0": camera}})
        (root / "meta" / f"variant-{drive}.pkl").write_bytes(pickle.dumps(frames))


def test_the_papers_recipe_in_miniature(files: Path, model: Model, tmp_path: Path) -> None:
    """The data of the shipped config, curated together and drawn over the clusters of both."""
    write_openscene(tmp_path, drives=3)
    table = read_table(Path("nuscenes-wan22-5b"))["data"]
    size = {"frames": 5, "height": HEIGHT, "width": WIDTH}
    real, rendered = table["sources"]
    real |= {"root": str(files / "nuscenes"), "version": "v1.0-mini", "split_file": str(files / "splits.json"), **size}
    places = {"root": str(tmp_path), "meta": str(tmp_path / "meta")}
    rendered |= {**places, "image_size": [WIDTH, HEIGHT], **size}
    table |= {"clusters": str(tmp_path / "out" / "manifest.jsonl"), "workers": 0}
    config = build(TrainConfig, read_table(files / "mixture.toml") | {"data": table})
    assert isinstance(config.data, MixtureData)
    clips = config.data.training_clips()
    names = [clips.name(index) for index in range(len(clips))]
    assert [name.split("/")[0] for name in names] == ["nuscenes"] * 10 + ["world-engine"] * 3
    curation = curate_table(PathTable(names, clips.trajectory), tmp_path / "out", clusters=4)
    sizes = torch.bincount(curation.cluster)
    shares = {name: 1 / 4 / int(sizes[cluster]) for name, cluster in zip(names, curation.cluster, strict=True)}
    assert is_as_often(draws(config, model), shares.__getitem__)
    examples = [part for step in range(3) for part in stream(config, model).step(step)]
    assert {part.sources[0] for part in examples} == {0, 1}


def test_one_source_of_a_mixture_is_cached_by_its_name(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "data",
        "cache",
        str(files / "mixture.toml"),
        "--set",
        f"run.out={tmp_path}",
        "--out",
        str(tmp_path / "c"),
    ]
    assert main([*command, "--source", "panshot"]) == 0
    assert len(CachedSource.open(tmp_path / "c")) == 2
    for extra, message in (([], "add --source"), (["--source", "lidar"], "one of world, nuscenes, panshot")):
        assert main([*command, *extra]) == 2
        assert message in capsys.readouterr().err


def test_missing_files_of_a_source_are_named(files: Path, tmp_path: Path) -> None:
    config = mixture(files, tmp_path)
    assert isinstance(config.data, MixtureData)
    panshot = replace(config.data.sources[2], root=tmp_path / "nowhere")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"data.sources\[1\].root must be a file or folder that exists"):
        replace(config.data, sources=(config.data.sources[0], panshot)).check_files()


def test_weighted_sources_have_chances_and_joint_clusters_do_not(files: Path) -> None:
    data = mixture(files, files).data
    assert isinstance(data, MixtureData)
    rest = replace(data, sources=data.sources[1:])
    curation, chances = mixed_curation(rest, rest.training_clips())
    assert chances is not None
    assert len(curation.cluster) == 12

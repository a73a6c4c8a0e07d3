"""Files that version 0.1.0 wrote are read as they were meant."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from merope.curation.curate import read_manifest
from merope.datasets import nuscenes
from merope.datasets.cache import CachedSource, collate_cached, write_cache
from merope.datasets.nuscenes import NuScenes
from merope.datasets.nuscenes_clips import NuScenesSource
from merope.train.caching import contents, of_source
from merope.train.config import TrainConfig
from merope.train.toml_config import read_config

OLD = Path(__file__).parents[1] / "data" / "written-by-0.1.0" / "datasets"
CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = ("scene-0000/CAM_FRONT/0", "scene-0000/CAM_FRONT/1", "scene-0001/CAM_FRONT/6", "scene-0001/CAM_FRONT/7")
WRITTEN_NS = 1_600_000_000 * 10**9  # when the tables were written: kept tables go by it


@pytest.fixture
def tables(tmp_path: Path) -> NuScenes:
    """The old data set with its kept tables and no images."""
    shutil.copytree(OLD / "nuscenes", tmp_path / "nuscenes")
    for file in (tmp_path / "nuscenes" / "v1.0-mini").glob("*.json"):
        os.utime(file, ns=(WRITTEN_NS, WRITTEN_NS))
    return NuScenes(tmp_path / "nuscenes", "v1.0-mini")


def test_a_manifest() -> None:
    manifest = read_manifest(OLD / "curation" / "manifest.jsonl")
    assert manifest.ids == NAMES
    assert set(manifest.curation.cluster.tolist()) == {0, 1}


def test_kept_tables_of_nuscenes_are_used(tables: NuScenes, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = nuscenes.read_frames(tables.root / "v1.0-mini", "CAM_FRONT")
    monkeypatch.setattr(nuscenes, "read_frames", None)  # from here on tables cannot be joined
    kept = NuScenes(tables.root, "v1.0-mini")
    assert tuple(kept.name(window) for window in kept.windows(5)) == NAMES
    assert np.abs(kept.frames.world_from_camera - fresh.world_from_camera).max() < 1e-9
    assert kept.frames.filename.tolist() == fresh.filename.tolist()


def test_a_cache_is_read_and_goes_on(tables: NuScenes, tmp_path: Path) -> None:
    """What is there is not encoded again, and no frame is read."""
    folder = shutil.copytree(OLD / "cache", tmp_path / "cache")
    clips = [CachedSource.open(folder).clip(index) for index in (0, 1)]
    assert tuple(clip.name for clip in clips) == NAMES[:2]
    assert clips[0].text.shape == (8, 6)
    assert clips[0].text[:, 0].tolist() == [8.5, 8.5, *[0.0] * 6]  # of the caption "street 1"
    torch.testing.assert_close(clips[1].latents.flatten().float(), torch.arange(64.0) / 7, rtol=2**-8, atol=0)
    assert collate_cached(clips).cameras.world_from_camera.shape == (2, 5, 4, 4)
    source = NuScenesSource(tables, tables.windows(5)[:2], 32, 48)
    about = json.loads((folder / "cache.json").read_text())

    def encode(_: object) -> torch.Tensor:
        raise AssertionError("everything is there")

    assert write_cache(folder, source, encode, encode, about) == {}
    assert CachedSource.open(folder).rows == CachedSource.open(OLD / "cache").rows


@pytest.mark.parametrize("name", ["nuscenes-wan22-5b.toml", "panshot-wan21-1.3b.toml"])
def test_caches_of_the_shipped_configs_are_theirs(name: str) -> None:
    """A cache with another description would be refused, or encoded again."""
    old, config = json.loads((OLD / "about-caches.json").read_text()), read_config(TrainConfig, CONFIGS / name)
    config = config if name.startswith("panshot") else of_source(config, "nuscenes")
    assert contents(config, "training") == old[name]

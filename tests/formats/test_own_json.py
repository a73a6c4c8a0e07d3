"""Our JSON: files of before, files that people write by hand, and all that is wrong with one at once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import random_trajectory

from merope import formats
from merope.geometry.lenses import Pinhole
from merope.geometry.trajectories import unicycle_path

OLD_FILES = Path(__file__).parents[1] / "data" / "written-by-0.1.0" / "formats"
POSE = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]


def test_files_of_version_0_1_0_are_read() -> None:
    expected = unicycle_path(torch.full((4,), 8.0), torch.full((4,), 0.3), 12.0)
    bend, bare = formats.read(OLD_FILES / "bend.json"), formats.read(OLD_FILES / "bare.json")
    for path in (bend, bare):
        torch.testing.assert_close(path.world_from_camera, expected, rtol=0, atol=1e-12)
    assert (bend.name, bend.convention, bend.is_metric) == ("bend", "a bend, 8 m/s", True)
    assert bend.frame_names == tuple(f"{k:06d}.png" for k in range(5))
    assert bend.timestamps_s is not None
    torch.testing.assert_close(bend.timestamps_s, torch.arange(5, dtype=torch.float64) / 12, rtol=0, atol=1e-15)
    assert isinstance(bend.lens, Pinhole)
    assert torch.as_tensor(bend.lens.fx).tolist() == [450.0, 451.0, 452.0, 453.0, 454.0]
    assert (bare.lens, bare.timestamps_s, bare.frame_names, bare.is_metric) == (None, None, None, False)
    assert bend.time_origin_ns == bare.time_origin_ns == 0


def test_four_entries_are_enough(tmp_path: Path) -> None:
    document = {"format": "merope-trajectory", "version": 1, "is_metric": True, "frames": [{"world_from_camera": POSE}]}
    (tmp_path / "path.json").write_text(json.dumps(document))
    path = formats.read(tmp_path / "path.json")
    assert (path.count, path.is_metric, path.lens, path.name) == (1, True, None, "")
    assert "camera-to-world" in path.convention


def changed(path: Path, **entries: Any) -> None:
    """Write a good file with other entries; those that are None are left out."""
    formats.write(replace(random_trajectory("merope"), is_metric=True), path)
    document = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))


def test_all_that_is_missing_or_wrong_is_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "path.json"
    changed(path, version=None, frames=None, axes="OpenGL", unit="mile", name=7, is_metric="yes")
    with pytest.raises(ValueError, match=r"path.json: version, frames must be there") as error:
        formats.read(path)
    said = str(error.value)
    assert "axes must be 'x right, y down, z forward', got 'OpenGL'" in said
    assert "name must be text, got 7" in said
    assert "is_metric must be true or false, got 'yes'" in said
    assert "docs/formats.md" in said
    assert "damaged" not in said


def test_every_other_entry_may_be_left_out(tmp_path: Path) -> None:
    for key in ("name", "source", "pose", "axes", "unit", "lens"):
        changed(tmp_path / "path.json", **{key: None})
        assert formats.read(tmp_path / "path.json").count == 7


LENS = {"model": "Pinhole", "fx": 500, "fy": 500, "cx": 320, "cy": 240, "width": 640, "height": 480}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"lens": {"model": "Pinhole", "fx": 3}},
            "lens must be a Pinhole with .* got no fy, cx, cy, width, height; see",
        ),
        ({"lens": LENS | {"k1": 0.1}}, "lens must be a Pinhole with .* got also k1; see"),
        ({"lens": LENS | {"fx": [None]}}, "lens must be the parameters of a Pinhole, got"),
        ({"lens": {"fx": 3}}, "lens.model must be one of Pinhole, .* got None"),
        ({"lens": [3]}, r"lens must be an object with model, got \[3\]"),
        ({"frames": [{"time_s": 0}]}, r"frames\[0\] must be an object with world_from_camera, got only \['time_s'\]"),
        ({"frames": [7]}, r"frames\[0\] must be an object with world_from_camera, got 7"),
    ],
)
def test_an_entry_that_is_missing_is_named(tmp_path: Path, entries: dict[str, Any], message: str) -> None:
    changed(tmp_path / "path.json", **entries)
    with pytest.raises(ValueError, match=message) as error:
        formats.read(tmp_path / "path.json")
    assert "damaged" not in str(error.value)
    assert "__init__" not in str(error.value)


def test_the_origin_of_times_is_kept(tmp_path: Path) -> None:
    path = replace(random_trajectory("merope"), time_origin_ns=1403636579758555392)
    formats.write(path, tmp_path / "path.json")
    assert formats.read(tmp_path / "path.json").time_origin_ns == 1403636579758555392

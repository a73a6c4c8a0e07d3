"""PanShot clips with their frames: cut to length, one lens per clip, and what is wrong is named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scenes import curved_drive

from merope.datasets.loader import collate
from merope.datasets.panshot_clips import PanShotSource
from merope.formats.video import read_video, write_video
from merope.geometry.lenses import UnifiedCamera

HEIGHT, WIDTH = 32, 64


def write_samples(root: Path, frames: int = 6, **changes: Any) -> Path:
    """Two shots of one panorama through different lenses; returns the sample list."""
    rows = []
    for number, (fov_deg, xi) in enumerate([(90.0, 0.0), (170.0, 1.6)]):
        name = f"pan-{number}-0-no_rot_aug_0"
        np.save(root / f"{name}.npy", curved_drive(8, step_m=0.5 + number)[:, :3].numpy())
        images = torch.arange(frames, dtype=torch.uint8).view(-1, 1, 1, 1) * 20 + 60 * number
        write_video(images.expand(-1, HEIGHT, WIDTH, 3), root / f"{name}.mp4", fps=16.0)
        rows.append({"pose_path": f"{name}.npy", "video_path": f"{name}.mp4", "x_fov": fov_deg, "xi": xi} | changes)
    (root / "samples.json").write_text(json.dumps(rows))
    depths = [{"video_id": "pan", "clip_id": number, "near_depth": 0.5 + number} for number in (0, 1)]
    (root / "near.jsonl").write_text("".join(json.dumps(row) + "\n" for row in depths))
    return root / "samples.json"


def opened(root: Path, frames: int = 5, near_depths: Path | None = None) -> PanShotSource:
    return PanShotSource.open(root / "samples.json", root, frames, HEIGHT, WIDTH, near_depths)


def test_clips_have_the_frames_and_poses_that_were_asked_for(tmp_path: Path) -> None:
    write_samples(tmp_path)
    source = opened(tmp_path)
    assert [source.name(index) for index in range(len(source))] == ["pan-0-0-no_rot_aug_0", "pan-1-0-no_rot_aug_0"]
    clip = source.clip(1)
    assert clip.frames is not None
    assert torch.equal(clip.frames, read_video(tmp_path / "pan-1-0-no_rot_aug_0.mp4", list(range(5)), HEIGHT, WIDTH))
    assert clip.frames[:, 0, 0, 0].tolist() == pytest.approx([60, 80, 100, 120, 140], abs=3)
    assert torch.allclose(clip.world_from_camera, curved_drive(5, step_m=1.5), atol=1e-6)
    assert clip.timestamps_s.tolist() == [0.0, 1 / 16, 2 / 16, 3 / 16, 4 / 16]


def test_lenses_of_different_shots_share_a_batch(tmp_path: Path) -> None:
    write_samples(tmp_path)
    source = opened(tmp_path)
    batch = collate([source.clip(0), source.clip(1)])
    lens = batch.cameras.lens
    assert isinstance(lens, UnifiedCamera)
    assert lens.xi.flatten().tolist() == [0.0, 1.6]
    assert batch.frames.shape == (2, 5, HEIGHT, WIDTH, 3)


def test_near_depths_divide_the_translations_of_their_own_clip(tmp_path: Path) -> None:
    write_samples(tmp_path)
    off, on = opened(tmp_path), opened(tmp_path, near_depths=tmp_path / "near.jsonl")
    for index, depth in enumerate((0.5, 1.5)):
        expected = off.clip(index).world_from_camera[:, :3, 3] / depth
        assert torch.allclose(on.clip(index).world_from_camera[:, :3, 3], expected, atol=1e-12)


def test_a_broken_clip_does_not_keep_the_others_from_training(tmp_path: Path) -> None:
    """A path that cannot be read and a view that the lens does not reach: the loader names and replaces such clips."""
    write_samples(tmp_path)
    rows = json.loads((tmp_path / "samples.json").read_text())
    (tmp_path / "cut.npy").write_bytes((tmp_path / rows[0]["pose_path"]).read_bytes()[:200])
    rows += [rows[0] | {"pose_path": "cut.npy"}, rows[0] | {"x_fov": 230.0, "xi": 3.0}]
    (tmp_path / "samples.json").write_text(json.dumps(rows))
    source = opened(tmp_path)
    assert source.clip(0).frames is not None
    for index, message in ((2, r"cut\.npy"), (3, "x_fov_deg")):
        with pytest.raises(ValueError, match=message):
            source.clip(index)


def test_depths_of_another_list_are_refused_at_once(tmp_path: Path) -> None:
    write_samples(tmp_path)
    (tmp_path / "near.jsonl").write_text(json.dumps({"video_id": "pan", "clip_id": 0, "near_depth": 1.0}))
    with pytest.raises(ValueError, match=r"near\.jsonl must be a depth for every clip of .*, got 1 .* first pan-1"):
        opened(tmp_path, near_depths=tmp_path / "near.jsonl")


def test_what_is_missing_or_too_short_is_named(tmp_path: Path) -> None:
    write_samples(tmp_path)
    with pytest.raises(ValueError, match=r"poses of pan-0-0-no_rot_aug_0 must be at least 9, got 8"):
        opened(tmp_path, frames=9).clip(0)
    with pytest.raises(ValueError, match=r"pan-0-0-no_rot_aug_0\.mp4 ends before frame 6"):
        opened(tmp_path, frames=7).clip(0)
    (tmp_path / "pan-1-0-no_rot_aug_0.mp4").unlink()
    with pytest.raises(FileNotFoundError, match=r"pan-1-0-no_rot_aug_0\.mp4 is missing"):
        opened(tmp_path).clip(1)
    rows = json.loads((tmp_path / "samples.json").read_text())
    del rows[1]["video_path"]
    (tmp_path / "samples.json").write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=r"video_path in .* must be in every row, got missing in row 1"):
        opened(tmp_path)

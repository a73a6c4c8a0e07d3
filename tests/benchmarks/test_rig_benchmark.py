"""benchmarks/rig.py: three models, trained and measured once."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import rig

from tests.train.tiny_runs import SMALLER

TINY = ("run.steps=1", "run.batch_size=1", "run.sample_every=0", "run.validate_every=0", "data.frames=3")
VIEWS = ("data.rig_yaw_deg=[0, 55]", "data.rig_fov_deg=[70, 70]")


@pytest.mark.parametrize("prefix_frames", [0, 1])
def test_overlaps_are_measured_beside_the_truth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix_frames: int
) -> None:
    """Without given frames nothing is compared with the true ones: what is made is another world."""
    prefix = f"objective.prefix_frames={prefix_frames}"
    changes = [word for change in (*SMALLER, *TINY, *VIEWS, prefix) for word in ("--set", change)]
    places = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "rig.json")]
    options = ["--config", "tiny-rig", "--worlds", "1", "--denoising-steps", "1"]
    monkeypatch.setattr(sys, "argv", ["rig.py", *options, *changes, *places])
    rig.main()
    first = json.loads((tmp_path / "rig.json").read_text())
    assert [row["model"] for row in first["rows"]] == ["true frames", *rig.MODELS]
    assert all(row["pixels"] > 0 for row in first["rows"])
    assert all(("psnr_db" in row) == (prefix_frames > 0) for row in first["rows"][1:])
    assert first["rows"][0]["overlap_psnr_db"] > max(row["overlap_psnr_db"] for row in first["rows"][1:])
    monkeypatch.setattr(rig, "train", None)  # nothing is trained twice
    rig.main()
    assert json.loads((tmp_path / "rig.json").read_text()) == first

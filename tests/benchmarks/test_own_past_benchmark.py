"""benchmarks/own_past.py by its command line, on a latent model that is as small as can be."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from latent_folder import CLIPS, STEPS, write_latent_model

from merope.world.clips_file import write_clips

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import own_past

WAYS = ["VAE alone", "after true blocks", "after its own blocks"]


def command(model: Path, out: Path, *more: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["own_past.py", "--model", str(model), "--worlds", "1", "--out", str(out), *more])
        own_past.main()


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks of one latent frame, the first two given, two made."""
    folder = tmp_path_factory.mktemp("causal")
    write_latent_model(folder)
    write_clips(folder, replace(CLIPS, frames=13), STEPS)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(
        json.dumps(index | {"causal_block_frames": 1, "denoising_levels": [1, 0.5]})
    )
    return folder


def test_every_block_is_measured_after_either_past(causal: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    for name in ("first", "again"):
        command(causal, out, "--name", name)
    (row,) = json.loads(out.read_text())  # the same weights are written over
    assert (row["name"], row["clips"]) == ("again", 3)
    first, second = row["blocks"]
    assert list(first) == list(second) == WAYS
    # The first block that is made comes after given ones, which are the same in either past.
    assert first["after true blocks"] == first["after its own blocks"]
    assert second["after true blocks"] != second["after its own blocks"]
    assert first["VAE alone"] != first["after true blocks"]


def test_true_frames_have_the_sharpness_of_true_frames() -> None:
    video = torch.randint(256, (6, 8, 8, 3), dtype=torch.uint8)
    assert own_past.numbers_of([video], [video], range(2, 4)) == {"psnr_db": pytest.approx(60.0), "sharpness": 1.0}
    darker = torch.cat((video[:2], video[2:4] // 2, video[4:]))
    assert own_past.numbers_of([darker], [video], range(2, 4))["sharpness"] == pytest.approx(0.25, abs=0.02)
    assert own_past.numbers_of([darker], [video], range(4, 6))["sharpness"] == 1.0


def test_a_model_of_whole_clips_is_refused(tmp_path: Path) -> None:
    write_latent_model(tmp_path / "model")
    with pytest.raises(SystemExit, match="must be a causal model"):
        command(tmp_path / "model", tmp_path / "rows.json")

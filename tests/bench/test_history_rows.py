"""Rows with retrieved history: what they are shown of an earlier drive, and how far they agree with it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from merope.bench import generated
from merope.bench.generated import generate_row, generated_file
from merope.bench.groups import MINIATURE
from merope.bench.references import history_of, reference_cameras, seen_earlier
from merope.bench.rows import run_rows
from merope.bench.scorer import Scorer
from merope.bench.stills import earlier_stills, read_stills, stills_file
from merope.bench.table import read_rows, tables
from merope.evaluate.seen_before import shown_by_references_alone
from merope.evaluate.workers import InThisProcess
from merope.evaluate.world_scores import recalled_psnr_db, score_clip
from merope.formats.video import as_bytes
from merope.train.config import TrainConfig
from merope.train.toml_config import read_config
from merope.world.clips import WorldClips
from merope.world.commanded import FIRST_TEST_SEED, CommandedClip, WorldTest, clips_of_world
from merope.world.revisits import EarlierDrives
from tests.bench.made_up_results import write_result
from tests.bench.test_latent_rows import CONFIGS, latent_config

CPU = torch.device("cpu")
CLIPS = WorldClips(frames=9, height=48, width=96, prefix_frames=3)
EARLIER = EarlierDrives(CLIPS, count=3, latent_stride=1)
TEST = WorldTest(worlds=1, steps=1)
ROWS = MINIATURE["Retrieved history"]


def commanded() -> list[CommandedClip]:
    return clips_of_world(TEST.paths(CLIPS, FIRST_TEST_SEED), CLIPS, FIRST_TEST_SEED, CPU)


def test_an_earlier_drive_saw_each_path_in_the_same_world() -> None:
    clips = commanded()
    history = history_of(clips, EARLIER)
    assert history.latents.shape == (3, 3, 3, 48, 96)
    assert history.moments.tolist() == [101.0, 104.0, 107.0]
    for k, clip in enumerate(clips):
        own = clip.cameras.at(slice(1, None, 3))
        assert (as_bytes(seen_earlier(clip, own).image).int() - clip.true[1::3].int()).abs().max() <= 1
        apart_m = (history.posed.world_from_camera[k] - own.world_from_camera)[:, :3, 3].norm(dim=-1)
        assert 0.0 < float(apart_m.max()) < 10.0
        image = history.latents[k, :, 2].permute(1, 2, 0)
        assert (image.int() - clip.true[7].int()).abs().float().mean() < 40  # near the frame, but not the frame
        assert not torch.equal(image, clip.true[7])


def test_recall_is_scored_where_references_alone_show_the_street() -> None:
    clip = commanded()[1]
    cameras = reference_cameras(clip, EARLIER)
    seen = seen_earlier(clip, cameras)
    alone = shown_by_references_alone(clip.seen, clip.cameras, 3, seen, cameras)
    assert 0.1 < 4 * float(alone[-3:].double().mean()) < 0.9  # of every second row and column

    def recalled(video: torch.Tensor) -> float | None:
        return recalled_psnr_db(clip, video, 3, seen, cameras)

    forgot, invented = (torch.where(wrong[..., None], 255 - clip.true, clip.true) for wrong in (alone, ~alone))
    assert recalled(clip.true) == recalled(invented) == 60.0
    told = recalled(forgot)
    assert told is not None
    assert told < 20.0
    late = replace(score_clip(clip, clip.true, 3), recalled_psnr_db=told)
    assert (late.late_psnr_db, late.as_dict()["recalled_psnr_db"]) == (60.0, told)
    spoilt = clip.true.clone()
    spoilt[:6] = 0
    assert score_clip(clip, spoilt, 3).late_psnr_db == 60.0
    spoilt[6] = 0
    assert score_clip(clip, spoilt, 3).late_psnr_db < 60.0


def row_config(folder: Path, name: str) -> TrainConfig:
    """A tiny row like that of configs/miniature."""
    own = read_config(TrainConfig, CONFIGS / f"{name}.toml", [])
    assert own.branch != "none"
    changes = ["run.micro_batch=2"]
    if own.history is not None:
        changes += [f"branch.history={own.branch.history}", f"history.frames={own.history.frames}"]
        changes += ["history.conflict_rate=0.0"]
    config = latent_config(folder, *changes)
    return replace(config, run=replace(config.run, out=folder / f"{name}-seed0"))


def test_rows_are_trained_generated_scored_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs, shown = [row_config(tmp_path, name) for name in ROWS], list[Any]()

    def noted(*given: Any) -> Any:
        shown.append(history_of(*given))
        return shown[-1]

    monkeypatch.setattr(generated, "history_of", noted)
    scorer = Scorer(InThisProcess(), tmp_path / "results")
    assert run_rows(configs, [TEST], scorer)
    assert len(shown) == 2  # of ca and sa
    for result in scorer.written:
        assert all({"late_psnr_db", "psnr_db"} <= clip.keys() for clip in result["clips"].values())
        assert any("recalled_psnr_db" in clip for clip in result["clips"].values())
        assert 0.0 < result["rows"]["generated"]["all"]["recalled_psnr_db"] < 60.0
    for config in configs:
        stills = read_stills(stills_file(config, tmp_path / "results"))
        assert (stills.earlier is None) == (config.history is None)
        if stills.earlier is not None:
            seen = earlier_stills(stills, stills.earlier, world=0).permute(0, 4, 1, 2, 3)
            assert (seen.int() - shown[1].latents.int()).abs().max() <= 1
    text = tables(read_rows(tmp_path / "results"), groups=MINIATURE)
    text = text.partition("### Retrieved history")[2].partition("###")[0]
    (head,) = [line for line in text.splitlines() if "| late PSNR dB |" in line]
    assert "recalled PSNR dB − history-none" in head
    assert "* recalled PSNR dB (higher is better, one seed): " in text
    assert sum(line.startswith(f"| {name} |") for line in text.splitlines() for name in ROWS[1:]) == 2
    inverted = replace(shown[1], latents=255 - shown[1].latents)
    monkeypatch.setattr(generated, "history_of", lambda *_: inverted)
    before = load_file(generated_file(configs[2], TEST))
    generated_file(configs[2], TEST).unlink()
    again = load_file(generate_row(configs[2], TEST, CPU))
    assert any(not torch.allclose(again[name], latents) for name, latents in before.items())


def test_a_table_of_rows_without_history_has_no_columns_for_it(tmp_path: Path) -> None:
    """Rows that were scored before there were such columns may stand beside those that were not."""
    write_result(tmp_path, "merope", 0, 1.0)
    assert "late PSNR" not in tables(read_rows(tmp_path), groups=MINIATURE)
    write_result(tmp_path, "history-sa", 0, 1.0, branch={"history": "sa"})
    assert "| late PSNR dB | recalled PSNR dB |" in tables(read_rows(tmp_path), groups=MINIATURE)

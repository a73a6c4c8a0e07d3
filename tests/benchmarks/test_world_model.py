"""benchmarks/world_model.py by its command line, on a latent model that is as small as can be."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from latent_folder import CLIPS, STEPS, write_latent_model

from merope.bench.generated import about_videos, generate_clips
from merope.demo.drive import loaded
from merope.evaluate.world_scores import psnr_db
from merope.world.clips import WorldClips
from merope.world.commanded import FIRST_TEST_SEED, MANOEUVRES, WorldTest, clips_of_world

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import world_model

CPU = torch.device("cpu")
KINDS = ("generated", "true", "vae")
NAMES = [f"world-{FIRST_TEST_SEED}-{name}" for name in MANOEUVRES]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and with what the whole command made of it."""
    place = tmp_path_factory.mktemp("measured")
    write_latent_model(place / "model")
    command(place)
    return place


def command(place: Path, *more: str) -> None:
    options = ["--model", place / "model", "--work", place / "work", "--out", place / "result.json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["world_model.py", *map(str, options), "--worlds", "1", "--workers", "1", *more])
        patch.setattr(world_model, "COLMAP_ROWS", 72)  # how much it finds is no matter here
        world_model.main()


def test_every_clip_is_measured_in_three_kinds(place: Path) -> None:
    result = json.loads((place / "result.json").read_text())
    assert [(row["kind"], row["clip"]) for row in result["rows"]] == [(k, n) for k in KINDS for n in sorted(NAMES)]
    assert (result["steps"], result["clips"]["frames"], result["generated_on"]) == (STEPS, 9, ["CPU"])
    assert list(result["means"]) == list(KINDS)
    for kind in KINDS:
        mean, rows = result["means"][kind], [row for row in result["rows"] if row["kind"] == kind]
        registered = sum(row["colmap"]["registered"] for row in rows)
        assert (mean["clips"], mean["frames"]) == (3, 27)
        assert mean["colmap_registered_percent"] == pytest.approx(100 * registered / 27)
    assert result["means"]["generated"]["generated_frames"] == 3 * 4


def test_latents_score_as_the_frames_that_the_pipeline_makes(place: Path) -> None:
    test = WorldTest(1, steps=STEPS)
    commanded = clips_of_world(test.paths(CLIPS, FIRST_TEST_SEED), CLIPS, FIRST_TEST_SEED, CPU)
    videos = generate_clips(loaded(place / "model", CPU), commanded, test, CLIPS.prefix_frames, cameras=True)
    rows = {row["clip"]: row for row in json.loads((place / "result.json").read_text())["rows"][:3]}
    for clip in commanded:
        expected = psnr_db(videos[clip.name][5:], clip.true[5:])
        assert rows[clip.name]["psnr_db"] == pytest.approx(expected, abs=0.01)  # latents are kept in float16
        steps = [np.diff(np.float64(x[5:]), axis=axis) for x in (videos[clip.name], clip.true) for axis in (1, 2)]
        made_down, made_across, true_down, true_across = (np.mean(each**2) for each in steps)
        sharp = (made_down + made_across) / (true_down + true_across)
        assert rows[clip.name]["sharpness"] == pytest.approx(sharp, rel=0.02)


def test_what_is_done_is_kept_and_the_rest_is_measured(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = place / "work" / "rows.jsonl"
    lines, result = kept.read_text().splitlines(), json.loads((place / "result.json").read_text())
    kept.write_text("\n".join(lines[:-1]) + "\n")
    monkeypatch.setattr(world_model, "generate_clips", None)  # a call would be an error
    command(place)
    again = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [(row["kind"], row["clip"]) for row in again] == [
        (row["kind"], row["clip"]) for row in map(json.loads, lines)
    ]
    assert json.loads((place / "result.json").read_text())["means"] == result["means"]


def test_latents_of_other_steps_are_not_scored(place: Path) -> None:
    with pytest.raises(SystemExit, match=r"0 of 1 worlds of this model and 3 steps; run --only generate first"):
        command(place, "--only", "score", "--steps", "3")


def test_the_first_stage_writes_latents_and_nothing_else(place: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(place / "model")
    command(tmp_path, "--only", "generate", "--steps", "1")
    assert [file.name for file in (tmp_path / "work").iterdir()] == ["latents-0000.safetensors"]
    assert not (tmp_path / "result.json").exists()
    about = about_videos(tmp_path / "work" / "latents-0000.safetensors")
    assert (about["steps"], about["generated_on"]) == ("1", "CPU")


def test_latents_of_72_clips_go_into_few_files(tmp_path: Path) -> None:
    config = SimpleNamespace(in_channels=24)
    strides = SimpleNamespace(latent_size=lambda *_: (18, 32), latent_frames=lambda _: 13)
    pipeline = SimpleNamespace(transformer=SimpleNamespace(config=config), strides=strides)
    trial = world_model.Trial(tmp_path, tmp_path, worlds=24, steps=10)
    size = world_model.clip_bytes(trial, pipeline)
    files = world_model.latent_files(trial, size)
    assert size == 2 * 24 * 13 * 18 * 32
    assert [seed for group in files.values() for seed in group] == list(range(FIRST_TEST_SEED, FIRST_TEST_SEED + 24))
    assert len(files) == 2
    assert max(3 * len(group) * size for group in files.values()) <= 15_000_000


def test_a_stranger_registers_true_renders() -> None:
    """Small ones are enlarged for it."""
    clips = WorldClips(frames=9, height=72, width=128, frame_rate_hz=16.0, prefix_frames=5)
    clip = clips_of_world({"original": clips.path(FIRST_TEST_SEED)}, clips, FIRST_TEST_SEED, CPU)[0]
    found = world_model.stranger(clip.true, clip)
    assert found["registered"] == 9
    assert found["rot_deg"] < 1.0
    assert world_model.stranger(torch.zeros_like(clip.true), clip)["registered"] == 0


def scored(psnr_db: float, rot_deg: float | None, world: int, name: str) -> world_model.Row:
    numbers = {"psnr_db": psnr_db, "rot_deg": rot_deg, "metric_tr_percent": 1.0}
    return {"kind": "generated", "clip": f"world-{world}-{name}"} | numbers


def test_gains_are_of_the_same_clips() -> None:
    """A clip without a number counts in neither; worlds are what is drawn."""
    before = [scored(20.0 + world, 2.0, world, name) for world in range(4) for name in MANOEUVRES]
    rows = [scored(21.0 + 2 * world, 1.5, world, name) for world in range(4) for name in MANOEUVRES]
    rows[0] = scored(21.0, None, 0, MANOEUVRES[0])
    found = world_model.gains(rows, before[::-1])
    assert found["psnr_db"].mean == pytest.approx(2.5)  # 1, 2, 3, 4
    assert 1.0 <= found["psnr_db"].low < 2.5 < found["psnr_db"].high <= 4.0
    turned = found["rot_deg"]
    assert (turned.mean, turned.low, turned.high, turned.count) == pytest.approx((-0.5, -0.5, -0.5, 11))
    with pytest.raises(SystemExit, match="other generated clips"):
        world_model.gains(rows[1:], before)


def test_two_files_are_compared_without_a_model(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(place, "--against", str(place / "result.json"))
    assert "psnr_db            +0.000" in capsys.readouterr().out

"""benchmarks/model.py on a small model and the CPU: the gate closes when it must, and rows hold what the docs read."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from merope.adapters import camera_attention
from merope.adapters.attachment import attached_branch
from merope.attention.dispatch import attend

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import model
import model_scenes
from model import Results, denoise, forward_rows, train
from model_branch import branch_rows
from model_picture import draw, filled, tables
from model_scenes import GTA, METHODS, NO_BRANCH, OURS, PAPERS, UCPE, Clip, Row, Scene, gate, visit
from train_step import random_model, random_pipeline

SMALL = {
    "num_layers": 2,
    "freq_dim": 32,
    "num_attention_heads": 4,
    "attention_head_dim": 128,
    "ffn_dim": 64,
    "in_channels": 48,
    "out_channels": 48,
    "text_dim": 4096,
}
CLIP = Clip("denoise-49", 13, 64, 96, METHODS, rounds=2, steps=1)
CPU = torch.device("cpu")
PAGE = Path(__file__).parents[2] / "docs" / "cost.md"


@pytest.fixture(scope="module")
def scene() -> Scene:
    torch.manual_seed(0)
    pipeline = random_pipeline(SMALL, torch.float32, CPU)
    pipeline.transformer.eval().requires_grad_(False)
    return Scene.random(pipeline, CLIP)


@pytest.fixture(scope="module")
def denoised_rows(scene: Scene) -> list[Row]:
    *_, rows = denoise(scene, METHODS, compiled=False)
    return rows


@pytest.fixture(autouse=True)
def _attention_stays() -> Iterator[None]:
    yield
    assert camera_attention.attend is attend


def test_the_gate_compares_two_ways_of_one_branch(scene: Scene) -> None:
    numbers = gate(scene)
    assert max(numbers["attention"], numbers["latents"]) < 1e-4 < 1e-3 < numbers["effect"]
    assert attached_branch(scene.pipeline.transformer) is None


@pytest.mark.parametrize("wrong", ["other attention", "silent branch"])
def test_the_gate_closes(scene: Scene, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong == "silent branch":
        monkeypatch.setattr(model_scenes, "SPEAKS", 0.0)
    else:
        monkeypatch.setattr(model_scenes, "papers_way", lambda q, k, v, plan: v)
    with pytest.raises(SystemExit, match="latents"):
        gate(scene)


def test_denoising_rows_are_those_of_the_clip(scene: Scene, denoised_rows: list[Row]) -> None:
    rows = denoised_rows
    assert [row["method"] for row in rows] == [method.name for method in METHODS]
    for row in rows:
        assert row["steps_run"] == CLIP.rounds * CLIP.steps
        assert row["step_p10_s"] <= row["step_s"] <= row["step_p90_s"]
        assert row["clip_s"] == pytest.approx(row["first_step_s"] + 49 * row["step_s"])
        assert row["throughput_to_no_branch"] == pytest.approx(rows[0]["clip_s"] / row["clip_s"])
        assert row["throughput_to_ucpe"] == pytest.approx(rows[2]["clip_s"] / row["clip_s"])
    latents = visit(scene, NO_BRANCH, 1).latents
    assert torch.equal(latents[:, :, :3], scene.clean)
    assert (latents[:, :, 3:] - scene.noise[:, :, 3:]).abs().max() > 1e-2


def test_what_does_not_compile_runs_eagerly_and_says_so(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = visit(scene, NO_BRANCH, 1)
    tries = []

    def fails_at_first(*_: object) -> object:
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("no graph\nfor this")
        return seen

    monkeypatch.setattr(model, "visit", fails_at_first)
    *_, (row,) = denoise(scene, (UCPE,), compiled=True)
    assert (row["compiled"], row["note"]) == (False, "not compiled: ValueError: no graph")
    *_, (row,) = denoise(scene, (UCPE,), compiled=True)
    assert (row["compiled"], row["note"]) == (True, "")


def test_one_branch_forward_and_backward() -> None:
    for backward in (False, True):
        rows = branch_rows(CLIP, 4, backward, SMALL, CPU, repeats=2)
        assert [row["method"] for row in rows] == [method.name for method in (GTA, UCPE, PAPERS, OURS)]
        assert all(row["branch_s"] > 0 for row in rows)


def test_forward_rows_cover_timesteps_and_guidance(scene: Scene) -> None:
    rows = forward_rows(scene, 1, (1, 2))
    assert {(row["timesteps"], row["samples"]) for row in rows} == {
        ("per token", 1),
        ("per clip", 1),
        ("per token", 2),
        ("per clip", 2),
    }


@pytest.mark.parametrize(("trainable", "methods"), [("branch", (UCPE, OURS)), ("all", (NO_BRANCH, OURS))])
def test_training_rows(
    trainable: str, methods: tuple[model_scenes.Method, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "TRAIN_ROUNDS", 2)
    monkeypatch.setattr(model, "TRAIN_WARM_UP", 0)
    monkeypatch.setattr(model, "TRAIN_STEPS", 1)
    trained = random_model(trainable, CPU, SMALL)  # type: ignore[arg-type]
    *_, rows = train(trained, trainable, CLIP, methods)  # type: ignore[arg-type]
    branch_alone = 4 * 512 * 128 + 3 * 128 + 512
    assert [row["method"] for row in rows] == [method.name for method in methods]
    assert rows[1]["parameters"] - rows[0]["parameters"] == (branch_alone if trainable == "all" else 0)
    assert rows[1]["trained_parameters"] == (branch_alone if trainable == "branch" else rows[1]["parameters"])
    assert all(row["steps_run"] == 2 for row in rows)
    assert all(row["kernels"] == 0 for row in rows)  # of a GPU
    assert attached_branch(trained.transformer) is None


def test_results_keep_other_parts_of_the_same_machine(tmp_path: Path) -> None:
    path, about = tmp_path / "rows.json", {"gpu": "one"}
    Results(path, ["train"], about).put(("train",), [{"what": "train"}])
    Results(path, ["branch"], about).put(("branch",), [{"what": "branch"}])
    assert [row["what"] for row in json.loads(path.read_text())["rows"]] == ["train", "branch"]
    Results(path, ["branch"], {"gpu": "another"}).put(("branch",), [{"what": "branch"}])
    assert [row["what"] for row in json.loads(path.read_text())["rows"]] == ["branch"]


def test_results_say_of_which_trees_their_rows_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, about = tmp_path / "rows.json", {"gpu": "one"}
    for part, tree in (("train", "aaa"), ("branch", "bbb"), ("branch", "ccc")):
        monkeypatch.setattr(model, "commit", lambda tree=tree: tree)
        Results(path, [part], about).put((part,), [{"what": part}])
    assert json.loads(path.read_text())["commit"] == "aaa, bbb, ccc"
    Results(path, ["train", "branch"], about).put(("train",), [{"what": "train"}])
    assert json.loads(path.read_text())["commit"] == "ccc"


def test_tables_and_picture_from_the_rows(scene: Scene, denoised_rows: list[Row], tmp_path: Path) -> None:
    rows = denoised_rows + branch_rows(CLIP, 4, False, SMALL, CPU, repeats=1) + forward_rows(scene, 1, (1,))
    draw(rows, tmp_path / "cost.png")
    assert (tmp_path / "cost.png").stat().st_size > 10_000
    by_name = tables(rows)
    assert by_name["denoise-49"].count("\n") == 1 + len(METHODS)
    assert f"| {rows[0]['step_s']:#.3g} |" in by_name["denoise-49"].splitlines()[2]
    once = filled(PAGE.read_text(), by_name)
    assert "| MeRoPE, paper's way | eager |" in once
    assert filled(once, by_name) == once
    assert tables([])["forward"] == "Open: not measured yet."
    assert set(re.findall(r"<!-- rows ([\w-]+) -->", once)) == set(by_name)

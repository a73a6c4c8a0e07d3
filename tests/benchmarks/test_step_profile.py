"""benchmarks/step_profile.py on a tiny model and the CPU: every millisecond of a step has a kind."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import step_profile

SMALL = ("run.sample_every=0", "data.frames=3", "data.height=16", "data.width=24", "objective.prefix_frames=1")


def test_a_step_is_timed_and_its_kernels_are_sorted_into_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, changes = tmp_path / "step.json", [word for change in SMALL for word in ("--set", change)]
    words = ["step_profile", "tiny", "--clips", "1", "--warm-up", "0", "--steps", "1", "--device", "cpu", *changes]
    monkeypatch.setattr(sys, "argv", [*words, "--out", str(out)])
    step_profile.main()
    row = json.loads(out.read_text())
    assert sum(row["kinds_ms"].values()) == pytest.approx(row["kernels_ms"])
    assert row["clips_per_s"] == pytest.approx(1 / row["step_s"])
    assert row["launches"] > 100
    times_ms = [ms for _, ms, _ in row["longest"]]
    assert times_ms == sorted(times_ms, reverse=True)


def test_kernels_are_told_apart_by_their_names() -> None:
    kernels = {"attend_bf16": (2.0, 1), "nvjet_tst_128x64": (3.0, 2), "triton_per_fused_0": (4.0, 1), "copy": (5.0, 1)}
    assert list(step_profile.kinds_ms(kernels).values()) == [2.0, 3.0, 4.0, 0.0, 5.0]

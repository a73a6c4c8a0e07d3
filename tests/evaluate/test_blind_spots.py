"""What the paper's metrics cannot see, and what is reported beside them; the table of the docs is what is printed."""

import runpy
from pathlib import Path

import pytest
import torch

from merope.evaluate.auc import pose_auc
from merope.evaluate.metrics import PoseMetrics, looks_inverted, pose_metrics

ROOT = Path(__file__).parents[2]
BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "metric_blind_spots.py"))
PATH = BENCHMARK["commanded_path"]()
ESTIMATES: dict[str, torch.Tensor] = BENCHMARK["estimates"](PATH)


def measured(name: str) -> tuple[PoseMetrics, float]:
    """Metrics and AUC@10."""
    return pose_metrics(PATH, ESTIMATES[name], is_metric=True), pose_auc([(PATH, ESTIMATES[name])])


def test_half_the_speed_is_perfect_but_for_metres() -> None:
    metrics, auc = measured("half the speed")
    assert (metrics.rot_deg, auc) == (0.0, 100.0)
    assert max(metrics.tr_percent, metrics.cammc, metrics.trans_err) < 1e-7
    assert metrics.scale == pytest.approx(2.0)
    assert metrics.metric_tr_percent == pytest.approx(51.60 / 2, abs=0.01)
    assert metrics.ate_m == pytest.approx(7.21, abs=0.01)


def test_driving_backwards_is_perfect_in_tr_and_auc() -> None:
    metrics, auc = measured("driven backwards")
    assert (metrics.tr_percent, auc) == (pytest.approx(0.0, abs=1e-9), 100.0)
    assert metrics.cammc == pytest.approx(49.5, abs=0.05)
    assert (metrics.scale, metrics.reversed_motion) == (pytest.approx(-1.0), True)


def test_an_error_in_the_first_frame_weighs_fifty_times_as_much() -> None:
    first, auc_first = measured("2.5° yaw in frame 1 only")
    later, auc_later = measured("2.5° yaw in frame 25 only")
    assert (first.rot_deg, later.rot_deg) == (pytest.approx(2.5), pytest.approx(2.5 / 48))
    assert (first.tr_percent, later.tr_percent) == (pytest.approx(2.25, abs=0.01), pytest.approx(0.0, abs=1e-9))
    assert (first.cammc, later.cammc) == (pytest.approx(3.20, abs=0.01), pytest.approx(0.062, abs=0.001))
    assert auc_first == pytest.approx(auc_later, abs=0.1)


def test_one_outlier_moves_the_max_norm() -> None:
    metrics, auc = measured("last camera 25 m too far")
    assert metrics.cammc == pytest.approx(11.93, abs=0.01)
    assert metrics.tr_percent == pytest.approx(6.65, abs=0.01)
    assert auc > 96


def test_standing_still_has_a_scale_of_zero() -> None:
    metrics, auc = measured("standing still, turning")
    assert (metrics.scale, metrics.static_estimate, auc) == (0.0, True, 0.0)
    assert metrics.tr_percent == pytest.approx(51.60, abs=0.01)
    assert metrics.cammc == pytest.approx(24.77, abs=0.01)


def test_the_wrong_convention_is_loud_and_recognised() -> None:
    metrics, _ = measured("world-to-camera matrices")
    assert metrics.rot_deg > 15
    assert metrics.cammc > 50
    assert [name for name in ESTIMATES if looks_inverted(PATH, ESTIMATES[name])] == ["world-to-camera matrices"]


@pytest.mark.parametrize("name", ESTIMATES)
def test_no_error_lies_on_a_threshold_of_the_auc(name: str) -> None:
    """There it would be counted or not by its last bits, and the table would be another one on another CPU."""
    generator = torch.Generator().manual_seed(0)
    nearly = ESTIMATES[name] * (1.0 + 1e-12 * torch.randn(ESTIMATES[name].shape, generator=generator).double())
    for tau in (3, 10):
        assert pose_auc([(PATH, nearly)], tau) == pytest.approx(pose_auc([(PATH, ESTIMATES[name])], tau), abs=1e-9)


def test_the_table_of_the_docs_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    BENCHMARK["main"]()
    assert capsys.readouterr().out in (ROOT / "docs" / "evaluation.md").read_text()

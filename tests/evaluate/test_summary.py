"""Means over clips, their intervals, and counts of what the means leave out."""

import math

import numpy as np
import pytest
import torch
from scenes import curved_drive, random_poses, straight_drive
from torch import Tensor

from merope.evaluate.auc import PairErrors, pair_errors, pose_auc
from merope.evaluate.metrics import CLOSED_COMMAND, STATIC_COMMAND, TOO_FEW_FRAMES, pose_metrics
from merope.evaluate.summary import bootstrap_ratio, summarise
from merope.geometry.poses import rigid

NO_POSE = torch.zeros(6, dtype=torch.bool)


def clips(count: int) -> list[tuple[Tensor, Tensor]]:
    """The third is twice as long as the others and has no error."""
    drives = [(curved_drive(6), random_poses(6, seed=seed)) for seed in range(count)]
    if count > 2:
        drives[2] = (curved_drive(12), curved_drive(12))
    return drives


def test_means_are_over_clips_and_auc_over_pairs() -> None:
    metrics = [pose_metrics(*clip) for clip in clips(7)]
    pairs = [pair_errors(*clip) for clip in clips(7)]
    summary = summarise(metrics, pairs)
    for name in ("rot_deg", "tr_percent", "cammc", "rot_err", "trans_err"):
        value = summary.values[name]
        assert value.mean == pytest.approx(np.mean([getattr(clip, name) for clip in metrics]))
        assert value.low < value.mean < value.high
        assert value.count == 7
    for tau in (3, 10):
        assert summary.values[f"auc_{tau}"].mean == pytest.approx(pose_auc(pairs, tau))
        assert pose_auc(pairs, tau) != pytest.approx(pose_auc(pairs, tau, per_clip=True))
        assert summary.values[f"auc_{tau}_per_clip"].mean == pytest.approx(pose_auc(pairs, tau, per_clip=True))
    assert not {"ate_m", "metric_tr_percent", "scale"} & set(summary.values)
    assert (summary.clips, summary.frames, summary.failed_frames, summary.undefined) == (7, 48, 0, {})


def test_metric_estimates_also_average_scale_and_metres() -> None:
    metrics = [pose_metrics(*clip, is_metric=k > 0) for k, clip in enumerate(clips(3))]
    values = summarise(metrics).values
    assert [values[name].count for name in ("rot_deg", "scale", "ate_m", "metric_tr_percent")] == [3, 2, 2, 2]
    assert values["scale"].mean == pytest.approx((metrics[1].scale + metrics[2].scale) / 2)


def test_nothing_is_left_out_in_silence() -> None:
    path, parked = curved_drive(6), straight_drive(6, step_m=0.0)
    loop = torch.cat((straight_drive(3), straight_drive(3).flip(0)))
    still = rigid(path[:, :3, :3], 0 * path[:, :3, 3])
    backwards = rigid(path[:, :3, :3], -path[:, :3, 3])
    some = torch.tensor([True, True, False, True, True, False])
    cases = [(path, path, None), (parked, path, None), (loop, loop, None), (path, path, NO_POSE), (path, path, some)]
    cases += [(path, still, None), (path, backwards, None)]
    summary = summarise([pose_metrics(*case) for case in cases], [pair_errors(*case) for case in cases])
    assert summary.undefined == {STATIC_COMMAND: 1, CLOSED_COMMAND: 1, TOO_FEW_FRAMES: 1}
    assert (summary.failed_clips, summary.incomplete_clips, summary.failed_frames, summary.frames) == (1, 2, 8, 42)
    assert (summary.reversed_clips, summary.static_estimates) == (1, 1)
    counts = {name: value.count for name, value in summary.values.items()}
    assert (counts["rot_deg"], counts["cammc"], counts["tr_percent"], counts["auc_10"]) == (6, 5, 4, 7)


def test_the_interval_covers_the_mean_of_a_known_distribution() -> None:
    """In 60 experiments of 40 clips the 95 % interval holds the true mean in 52 or more, and is about 3.9 σ/√n wide."""
    generator = torch.Generator().manual_seed(1)
    covered, widths = 0, []
    for _ in range(60):
        values = 5 + 2 * torch.randn(40, dtype=torch.float64, generator=generator)
        interval = bootstrap_ratio(values, torch.ones_like(values), seed=0)
        covered += interval.low <= 5 <= interval.high
        widths.append(interval.high - interval.low)
    assert covered >= 52
    assert np.mean(widths) == pytest.approx(2 * 1.96 * 2 / math.sqrt(40), rel=0.08)


def test_the_interval_leaves_out_as_much_on_either_side() -> None:
    """Resampled means of many clips are normal: 2.5 % lie 1.96 standard errors below the mean, and as many above."""
    values = torch.randn(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    interval = bootstrap_ratio(values, torch.ones_like(values), seed=0)
    error = float(values.std(correction=0)) / math.sqrt(2000)
    assert (interval.mean - interval.low) / error == pytest.approx(1.96, abs=0.1)
    assert (interval.high - interval.mean) / error == pytest.approx(1.96, abs=0.1)


def test_pooled_intervals_resample_clips_not_pairs() -> None:
    """Pairs of a clip are as one: ten clips that hit or miss entirely leave the AUC uncertain by tens of percent."""
    hit, missed = torch.zeros(1000, dtype=torch.float64), torch.full((1000,), 90.0, dtype=torch.float64)
    pairs = [PairErrors(errors, errors) for errors in [hit] * 5 + [missed] * 5]
    auc = summarise([pose_metrics(*clips(1)[0])] * 10, pairs).values["auc_10"]
    assert auc.mean == 50.0
    assert auc.high - auc.low == pytest.approx(60.0, abs=11.0)


def test_a_ratio_of_sums_is_resampled_on_both_sides() -> None:
    sizes = torch.tensor([1.0, 5.0, 20.0, 100.0], dtype=torch.float64)
    interval = bootstrap_ratio(3.0 * sizes, sizes, seed=0)
    assert (interval.mean, interval.low, interval.high) == (3.0, pytest.approx(3.0), pytest.approx(3.0))


def test_the_seed_fixes_the_interval() -> None:
    metrics = [pose_metrics(*clip) for clip in clips(7)]
    assert summarise(metrics, seed=3) == summarise(metrics, seed=3)
    assert summarise(metrics, seed=3).values["cammc"].low != summarise(metrics, seed=4).values["cammc"].low


def test_one_clip_has_no_interval_and_none_no_mean() -> None:
    metrics = pose_metrics(*clips(1)[0])
    value = summarise([metrics]).values["cammc"]
    assert (value.mean, value.count) == (metrics.cammc, 1)
    assert math.isnan(value.low)
    assert math.isnan(value.high)
    failed = summarise([pose_metrics(curved_drive(6), curved_drive(6), NO_POSE)]).values["cammc"]
    assert math.isnan(failed.mean)
    assert failed.count == 0


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="metrics must be at least one clip"):
        summarise([])
    with pytest.raises(ValueError, match="pairs must be 2 clips like metrics"):
        summarise([pose_metrics(*clip) for clip in clips(2)], [pair_errors(*clip) for clip in clips(1)])

"""Means over clips with bootstrap intervals, and counts of everything that a mean leaves out."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from merope.errors import invalid
from merope.evaluate.auc import PairErrors, auc_counts
from merope.evaluate.metrics import TOO_FEW_FRAMES, PoseMetrics

RESAMPLES = 2000
METRICS = ("rot_deg", "tr_percent", "cammc", "rot_err", "trans_err", "scale", "ate_m", "metric_tr_percent")
AUC_DEGREES = (3, 10)


@dataclass(frozen=True)
class Interval:
    """A mean over `count` clips and the central 95 % of its bootstrap distribution (NaN below two clips)."""

    mean: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Summary:
    """One row of a table: every metric over the clips in which it is defined, and what happened in the others."""

    clips: int
    values: dict[str, Interval]  # METRICS that were measured; auc_3, auc_10 pooled and auc_3_per_clip, auc_10_per_clip
    undefined: dict[str, int]  # reason -> clips in which some numbers are undefined
    failed_clips: int  # fewer than half of the frames with a pose: in no mean, but in the AUC
    incomplete_clips: int  # some frames without a pose
    failed_frames: int
    frames: int
    reversed_clips: int
    static_estimates: int


def summarise(
    metrics: Sequence[PoseMetrics],
    pairs: Sequence[PairErrors] = (),  # one per clip, in the order of `metrics`
    seed: int = 0,
) -> Summary:
    """Equal weight for every clip, as in the paper; AUC also pooled over pairs. Intervals resample clips.

    A clip in which a metric is undefined is not in that metric's mean, and `Interval.count` shows it. Clips without any
    pose belong in `metrics` (all frames not valid) and in `pairs`, where they count as misses.
    """
    if not metrics:
        raise invalid("metrics", "at least one clip", "none", "pass the result of pose_metrics for every clip")
    if pairs and len(pairs) != len(metrics):
        raise invalid("pairs", f"{len(metrics)} clips like metrics", len(pairs), "pass pair_errors of every clip")
    columns = {name: torch.tensor(_measured(metrics, name), dtype=torch.float64) for name in METRICS}
    values = {name: _mean(column[~column.isnan()], seed) for name, column in columns.items() if len(column)}
    for tau in AUC_DEGREES if pairs else ():
        values |= _auc(pairs, tau, seed)
    return Summary(
        clips=len(metrics),
        values=values,
        undefined=dict(Counter(reason for clip in metrics for reason in clip.undefined)),
        failed_clips=sum(TOO_FEW_FRAMES in clip.undefined for clip in metrics),
        incomplete_clips=sum(clip.valid_frames < clip.frames for clip in metrics),
        failed_frames=sum(clip.frames - clip.valid_frames for clip in metrics),
        frames=sum(clip.frames for clip in metrics),
        reversed_clips=sum(clip.reversed_motion for clip in metrics),
        static_estimates=sum(clip.static_estimate for clip in metrics),
    )


def _measured(metrics: Sequence[PoseMetrics], name: str) -> list[float]:
    """One number per clip that has it. Errors in metres, and s* as a number to average, need a metric estimate."""
    needs_metres = name in ("scale", "ate_m", "metric_tr_percent")
    return [getattr(clip, name) for clip in metrics if clip.ate_m is not None or not needs_metres]


def _auc(pairs: Sequence[PairErrors], tau: int, seed: int) -> dict[str, Interval]:
    hits, chances = auc_counts(pairs, tau)
    return {
        f"auc_{tau}": bootstrap_ratio(100.0 * hits, chances, seed),
        f"auc_{tau}_per_clip": _mean(100.0 * hits / chances, seed),
    }


def _mean(values: Tensor, seed: int) -> Interval:  # [clips]
    return bootstrap_ratio(values, torch.ones_like(values), seed)


def bootstrap_ratio(
    numerator: Tensor,  # [clips]
    denominator: Tensor,  # [clips]
    seed: int,
) -> Interval:
    """Σ numerator / Σ denominator with its percentile interval; a mean is the ratio with denominators of one."""
    top, bottom = numerator.numpy(), denominator.numpy()
    count = len(top)
    mean = float(top.sum() / bottom.sum()) if count else math.nan
    if count < 2:
        return Interval(mean, math.nan, math.nan, count)
    draws = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    low, high = np.quantile(top[draws].sum(1) / bottom[draws].sum(1), (0.025, 0.975))
    return Interval(mean, float(low), float(high), count)

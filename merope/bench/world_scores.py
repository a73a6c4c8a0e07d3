"""Scores of generated worlds: poses in metres against what was commanded, PSNR against what would be seen."""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from merope.bench.world import MANOEUVRES, CommandedClip, WorldTest, clips_of_world
from merope.data.world_clips import WorldClips
from merope.evaluate.auc import PairErrors, pair_errors
from merope.evaluate.estimators.render_anchored import RenderAnchoredEstimator
from merope.evaluate.metrics import PoseMetrics, pose_metrics
from merope.evaluate.summary import summarise
from merope.train.build import world_clips
from merope.train.config import TrainConfig

Job = tuple[WorldTest, WorldClips, int, dict[str, Tensor], int]
"""Test, clips, seed of the world, generated videos by name, frames of the prefix."""


@dataclass(frozen=True, eq=False)
class Score:
    """One clip."""

    name: str
    manoeuvre: str
    metrics: PoseMetrics
    pairs: PairErrors
    psnr_db: float  # mean over generated frames
    recovered: Tensor  # [T, 4, 4]


def score_clip(clip: CommandedClip, video: Tensor, prefix_frames: int) -> Score:  # uint8 [T, H, W, 3]
    """Recover the poses of a video of a world and compare them with the command.

    The prefix was given and is always right: a clip of which nothing else was recovered has failed.
    """
    estimate = RenderAnchoredEstimator(clip.world, clip.cameras)(video)
    commanded, valid = clip.cameras.world_from_camera, estimate.valid
    valid = valid & valid[prefix_frames:].any()
    return Score(
        name=clip.name,
        manoeuvre=clip.manoeuvre,
        metrics=pose_metrics(commanded, estimate.world_from_camera, valid, is_metric=True),
        pairs=pair_errors(commanded, estimate.world_from_camera, valid),
        psnr_db=psnr_db(video[prefix_frames:], clip.true[prefix_frames:]),
        recovered=estimate.world_from_camera,
    )


def psnr_db(video: Tensor, true: Tensor) -> float:  # uint8 [T, H, W, 3] twice
    """Mean over frames of the peak signal-to-noise ratio, at most 60 dB a frame."""
    error = (video.double() - true.double()).square().mean(dim=(1, 2, 3)).clamp(min=255.0**2 * 1e-6)
    return float((10.0 * torch.log10(255.0**2 / error)).mean())


def score_row(config: TrainConfig, test: WorldTest, workers: int) -> dict[str, Any]:
    """Score the generated clips of a row, and the same estimator on true renders: the floor of the measurement."""
    videos = load_file(config.run.out / "generated.safetensors")
    clips, prefix = world_clips(config), config.objective.prefix_frames
    jobs = [(test, clips, seed, {n: v for n, v in videos.items() if f"-{seed}-" in n}, prefix) for seed in test.seeds]
    scored = [pair for world in _mapped(jobs, workers) for pair in world]
    result: dict[str, Any] = {"test": asdict(test), "clips": {}, "rows": {}}
    for kind, index in (("generated", 0), ("floor", 1)):
        scores = [pair[index] for pair in scored]
        groups = {"all": scores} | {m: [s for s in scores if s.manoeuvre == m] for m in MANOEUVRES}
        result["rows"][kind] = {name: _summary(group) for name, group in groups.items()}
    result["clips"] = {score.name: score.metrics.as_dict() | {"psnr_db": score.psnr_db} for score, _ in scored}
    text = json.dumps(result, indent=1)
    (config.run.out / "scores.json").write_text(text)
    return json.loads(text)


def _mapped(jobs: Sequence[Job], workers: int) -> Iterator[list[tuple[Score, Score]]]:
    """The scores of every job in order, with a line of progress."""
    with (
        ProcessPoolExecutor(workers, torch.multiprocessing.get_context("spawn"))
        if workers > 1
        else nullcontext() as pool
    ):
        scored = map(_score_world, jobs) if pool is None else pool.map(_score_world, jobs)
        for count, scores in enumerate(scored, start=1):
            print(f"scored world {count} of {len(jobs)}", end="\r", file=sys.stderr, flush=True)
            yield scores
    print(file=sys.stderr)


def _score_world(job: Job) -> list[tuple[Score, Score]]:
    """All clips of one world, each with the score of its true render."""
    test, clips, seed, videos, prefix = job
    commanded = clips_of_world(test, clips, seed, torch.device("cpu"))
    return [(score_clip(clip, videos[clip.name], prefix), score_clip(clip, clip.true, prefix)) for clip in commanded]


def _summary(scores: list[Score]) -> dict[str, Any]:
    summary = summarise([score.metrics for score in scores], [score.pairs for score in scores])
    psnr = torch.tensor([score.psnr_db for score in scores])
    plain = asdict(summary) | {"psnr_db": float(psnr.mean())}
    return json.loads(json.dumps(plain), parse_constant=lambda _: None)


def table(results: dict[str, dict[str, Any]]) -> str:
    """The rows of several methods as text: mean and 95 % interval over all clips."""
    columns = {"rot_deg": "rot°", "metric_tr_percent": "metric tr%", "cammc": "CamMC", "auc_10": "AUC@10"}
    lines = [
        "method".ljust(28) + "".join(title.rjust(22) for title in columns.values()) + "PSNR".rjust(8) + "lost".rjust(8)
    ]
    for method, result in results.items():
        row = result["rows"]["generated"]["all"]
        cells = [_cell(row["values"].get(name)) for name in columns]
        lost = f"{row['failed_frames']}/{row['frames']}"
        lines.append(method.ljust(28) + "".join(c.rjust(22) for c in cells) + f"{row['psnr_db']:8.2f}" + lost.rjust(8))
    return "\n".join(lines)


def _cell(interval: dict[str, float] | None) -> str:
    if interval is None or interval["mean"] is None or math.isnan(interval["mean"]):
        return "–"
    if interval["low"] is None:
        return f"{interval['mean']:.2f}"
    return f"{interval['mean']:.2f} [{interval['low']:.2f}, {interval['high']:.2f}]"


def with_seed(config: TrainConfig, seed: int) -> TrainConfig:
    """The same row with other dice, in a folder of its own."""
    out = config.run.out.with_name(f"{config.run.out.name}-seed{seed}")
    return replace(config, run=replace(config.run, seed=seed, out=out))

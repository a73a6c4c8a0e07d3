"""Scores of a row: poses are recovered world by world, in any process, then put together test by test."""

import hashlib
import json
import math
import pickle
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merope.bench.generated import UNSAID_PRECISION, about_videos, generated_file, kept_video
from merope.bench.lens_kinds import lens_kind
from merope.bench.references import reference_cameras, seen_earlier
from merope.bench.result_files import SCORING
from merope.bench.run_facts import latent_stride, vae_folder
from merope.evaluate.summary import summarise
from merope.evaluate.world_scores import (
    FLOOR_NOISE,
    FLOOR_STRETCH,
    FLOOR_YAW_RAD,
    Score,
    colmap_score,
    recalled_psnr_db,
    score_clip,
    score_floor,
)
from merope.train.build import world_clips
from merope.train.config import HistorySection, TrainConfig
from merope.train.provenance import device_name
from merope.world.clips import WorldClips
from merope.world.commanded import MANOEUVRES, CommandedClip, WorldTest, clips_of_world
from merope.world.revisits import EarlierDrives

COLMAP_ROWS = 144
"""Height from which on COLMAP finds the poses of true renders."""
COLMAP_WORLDS = 12
"""So many worlds of a test are given to COLMAP: it takes twice as long for a clip as everything else together."""


@dataclass(frozen=True)
class WorldJob:
    """The three clips of one world, to be scored in some process."""

    test: WorldTest
    clips: WorldClips
    seed: int
    prefix_frames: int
    videos: Path | None  # generated.safetensors; None scores the floor
    vae: Path | None = None  # what its latents are decoded with; None: it holds frames
    references: int = 3  # pictures of an earlier drive along each path

    @property
    def delay(self) -> float:
        """Jobs of the least are scored first: those of the benchmark's own test, then those of its sweep."""
        return abs(math.log(self.test.stretch))


def world_jobs(config: TrainConfig, test: WorldTest, videos: Path | None) -> list[WorldJob]:
    """One job per world: of a row's generated videos, or of the floor, which does not depend on the row."""
    clips, prefix = world_clips(config), config.objective.prefix_frames
    decoder = None if videos is None else vae_folder(config)
    references = (config.history or HistorySection()).frames
    return [WorldJob(test, clips, seed, prefix, videos, decoder, references) for seed in test.seeds]


def bench_device() -> torch.device:
    """Where clips are generated, worlds rendered and latents decoded; poses are recovered on a core."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def score_world(job: WorldJob) -> bytes:
    """The scores of a job, pickled: tensors that processes share hold a file handle each, and a row has hundreds.

    Worlds are rendered and latents decoded on a GPU where there is one: on a core both take longer than the poses.
    """
    device = bench_device()
    commanded = clips_of_world(job.test.paths(job.clips, job.seed), job.clips, job.seed, device)
    if job.videos is None:
        floors = [score_floor(clip, job.prefix_frames) for clip in commanded]
        return pickle.dumps(
            [_by_both(floor, clip, clip.true, job) for floor, clip in zip(floors, commanded, strict=True)]
        )
    scores = []
    for clip in commanded:
        video = kept_video(job.videos, clip.name, job.vae, device)
        score = score_clip(clip, video, job.prefix_frames)
        scores.append(_by_both(_with_recall(score, clip, video, job), clip, video, job))
    return pickle.dumps(scores)


def _with_recall(score: Score, clip: CommandedClip, video: Tensor, job: WorldJob) -> Score:  # uint8 [T, H, W, 3]
    """The score with how far the video agrees with what an earlier drive saw, whether the model was shown it or not.

    A sweep goes without: it asks for metres.
    """
    if job.test.stretch != 1.0:
        return score
    cameras = reference_cameras(clip, EarlierDrives(job.clips, job.references, latent_stride(job.vae)))
    recalled = recalled_psnr_db(clip, video, job.prefix_frames, seen_earlier(clip, cameras), cameras)
    return replace(score, recalled_psnr_db=recalled)


def _by_both(score: Score, clip: CommandedClip, video: Tensor, job: WorldJob) -> Score:  # uint8 [T, H, W, 3]
    """The score with what COLMAP says of the video, in some worlds, where frames are large enough for it. A sweep goes
    without: it asks for metres, which COLMAP does not know."""
    is_in_view = job.seed in job.test.seeds[:COLMAP_WORLDS] and job.test.stretch == 1.0
    is_asked = is_in_view and video.shape[1] >= COLMAP_ROWS
    return replace(score, colmap=colmap_score(clip, video)) if is_asked else score


def scores_of(worlds: Iterable[bytes]) -> list[Score]:
    """What `score_world` returned, unpacked."""
    return [score for world in worlds for score in pickle.loads(world)]


def floor_file(config: TrainConfig, test: WorldTest) -> Path:
    """Where the floor of a test lies, beside the rows' folders: all rows with the same paths and lenses share it."""
    clips, settings = world_clips(config), (SCORING, FLOOR_YAW_RAD, FLOOR_STRETCH, FLOOR_NOISE, COLMAP_WORLDS)
    turn_deg, stretch = float(test.turn_deg), float(test.stretch)  # 2 and 2.0 are the same test
    what = repr((test.seeds, turn_deg, stretch, clips, config.objective.prefix_frames, settings))
    return config.run.out.parent / f"floor-{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"


def summaries(scores: list[Score], clips: WorldClips) -> dict[str, Any]:
    """Means with intervals over clips: all, by manoeuvre and, where lenses differ, by lens."""
    groups: dict[str, list[Score]] = {"all": scores} | {name: [] for name in MANOEUVRES}
    for score in scores:
        groups[score.manoeuvre].append(score)
        if clips.fov_deg[0] < clips.fov_deg[1] or clips.xi[0] < clips.xi[1]:
            groups.setdefault(lens_kind(clips.lens(score.seed)), []).append(score)
    return {name: _summary(group) for name, group in groups.items()}


def _summary(scores: list[Score]) -> dict[str, Any]:
    summary = summarise([score.metrics for score in scores], [score.pairs for score in scores])
    plain = asdict(summary) | {
        "psnr_db": statistics.mean(score.psnr_db for score in scores),
        "late_psnr_db": statistics.mean(score.late_psnr_db for score in scores),
    }
    recalled = [score.recalled_psnr_db for score in scores if score.recalled_psnr_db is not None]
    if recalled:
        plain["recalled_psnr_db"] = statistics.mean(recalled)
    registered = [score.colmap["percent"] for score in scores if score.colmap is not None]
    if registered:
        plain["colmap_percent"] = statistics.mean(percent for percent in registered if percent is not None)
    return json.loads(json.dumps(plain), parse_constant=lambda _: None)


def scores_of_test(config: TrainConfig, test: WorldTest, scores: list[Score], floor: dict[str, Any]) -> dict[str, Any]:
    """One test of a row, as its results file has it."""
    about, clips = about_videos(generated_file(config, test)), world_clips(config)
    return {
        "test": asdict(test),
        "weights": about.get("trained", ""),
        "scoring": SCORING,
        "generated_s": float(about["generated_s"]) if "generated_s" in about else None,
        "generated_on": about.get("gpu", ""),
        "generated_in": about.get("precision", UNSAID_PRECISION),
        "scored_on": device_name(bench_device()),
        "rows": {"generated": summaries(scores, clips), "floor": floor},
        "clips": {score.name: score.as_dict() | {"lens": lens_kind(clips.lens(score.seed))} for score in scores},
    }


def with_seed(config: TrainConfig, seed: int) -> TrainConfig:
    """The same row with another seed, in a folder of its own. {seed} in what it starts from becomes the seed."""
    out, start = config.run.out.with_name(f"{config.run.out.name}-seed{seed}"), config.model.pretrained
    model = replace(config.model, pretrained=None if start is None else start.replace("{seed}", str(seed)))
    return replace(config, run=replace(config.run, seed=seed, out=out), model=model)

"""Scores of generated worlds: poses in metres against what was commanded, PSNR against what would be seen.

Poses are recovered world by world, in any process (`score_world`); `scores_of_test` puts the worlds of a test together,
`put_together` the tests of a row. All tests of a results file are of the same weights, and none is ever lost.
"""

import hashlib
import json
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from merope.bench.provenance import provenance, steps_done
from merope.bench.table import parts_of
from merope.bench.world_tests import (
    MANOEUVRES,
    CommandedClip,
    WorldTest,
    about_videos,
    clips_of_world,
    generated_file,
    stretched,
    weights_digest,
)
from merope.errors import invalid
from merope.evaluate.auc import PairErrors, pair_errors
from merope.evaluate.estimators.render_anchored import RenderAnchoredEstimator
from merope.evaluate.metrics import PoseMetrics, pose_metrics
from merope.evaluate.summary import summarise
from merope.formats.video import as_bytes
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Lens
from merope.geometry.trajectories import turn_by
from merope.train.build import world_clips
from merope.train.config import TrainConfig
from merope.world.clips import WorldClips
from merope.world.render import render

FLOOR_YAW_RAD, FLOOR_STRETCH, FLOOR_NOISE = math.radians(2.0), 1.03, 0.04
"""How far from the command, and how noisy (of full scale), the true renders are that the estimator is tried on."""

SCORING = 2
"""Raised when the same frames get other scores: floors that were kept are then measured again."""

UNSAID_SCORING = 2
"""That of results files which do not say theirs."""

SAME_RUN = ("row", "seed", "steps", "batch_size", "parameters", "commit", "trained_s", "final_loss", "validation_loss")
"""What tells one run from another in results files which do not say the digest of their weights."""

WIDE_DEG, FISHEYE_DEG, FISHEYE_XI = 90.0, 120.0, 0.5


@dataclass(frozen=True, eq=False)
class Score:
    """One clip."""

    seed: int  # of its world
    manoeuvre: str
    metrics: PoseMetrics
    pairs: PairErrors
    psnr_db: float  # mean over generated frames
    recovered: Tensor  # [T, 4, 4]
    valid: Tensor  # bool [T], frames with a recovered pose

    @property
    def name(self) -> str:
        return f"world-{self.seed}-{self.manoeuvre}"

    def as_dict(self) -> dict[str, object]:
        """Every number of the clip, for JSON."""
        chances = len(self.pairs.rotation_deg)
        auc = {f"auc_{tau}": 100.0 * self.pairs.hits(tau) / (tau * chances) for tau in (3, 10)}
        plain = self.metrics.as_dict() | auc | {"psnr_db": self.psnr_db}
        lost = self.metrics.frames - self.metrics.valid_frames
        return {"world": self.seed, "manoeuvre": self.manoeuvre, "failed_frames": lost} | plain


def score_clip(clip: CommandedClip, video: Tensor, prefix_frames: int) -> Score:  # uint8 [T, H, W, 3]
    """Recover the poses of a video of a world and compare them with the command.

    The prefix was given and is always right: a clip of which nothing else was recovered has failed.
    """
    return _score(clip, video, clip.cameras.world_from_camera, prefix_frames)


def score_floor(clip: CommandedClip, prefix_frames: int) -> Score:
    """What the estimator alone gets wrong: a true, noisy render of a path that strays from the command.

    A video that obeys exactly would be compared with itself and prove nothing.
    """
    turned = turn_by(clip.cameras.world_from_camera, FLOOR_YAW_RAD, prefix_frames)
    path = stretched(turned, FLOOR_STRETCH)
    height, width = clip.true.shape[1:3]
    image = render(clip.world, Cameras(path, clip.cameras.lens), height, width).image
    noise = FLOOR_NOISE * torch.randn(image.shape, generator=torch.Generator().manual_seed(clip.seed))
    return _score(clip, as_bytes((image + noise).clamp(0.0, 1.0)), path, prefix_frames)


def _score(
    clip: CommandedClip,
    video: Tensor,  # uint8 [T, H, W, 3]
    world_from_camera: Tensor,  # [T, 4, 4] where its cameras should be
    prefix_frames: int,
) -> Score:
    estimate = RenderAnchoredEstimator(clip.world, clip.cameras, clip.seen)(video)
    valid = estimate.valid & estimate.valid[prefix_frames:].any()
    return Score(
        seed=clip.seed,
        manoeuvre=clip.manoeuvre,
        metrics=pose_metrics(world_from_camera, estimate.world_from_camera, valid, is_metric=True),
        pairs=pair_errors(world_from_camera, estimate.world_from_camera, valid, given_frames=prefix_frames),
        psnr_db=psnr_db(video[prefix_frames:], clip.true[prefix_frames:]),
        recovered=estimate.world_from_camera,
        valid=valid,
    )


def psnr_db(video: Tensor, true: Tensor) -> float:  # uint8 [T, H, W, 3] twice
    """Mean over frames of the peak signal-to-noise ratio, at most 60 dB a frame."""
    error = (video.double() - true.double()).square().mean(dim=(1, 2, 3)).clamp(min=255.0**2 * 1e-6)
    return float((10.0 * torch.log10(255.0**2 / error)).mean())


@dataclass(frozen=True)
class WorldJob:
    """The three clips of one world, to be scored in some process."""

    test: WorldTest
    clips: WorldClips
    seed: int
    prefix_frames: int
    videos: Path | None  # generated.safetensors; None scores the floor


def row_jobs(config: TrainConfig, test: WorldTest) -> list[WorldJob]:
    """One job per world of a row's generated videos."""
    return _jobs(config, test, generated_file(config, test))


def floor_jobs(config: TrainConfig, test: WorldTest) -> list[WorldJob]:
    """One job per world of a test; the results do not depend on the row."""
    return _jobs(config, test, None)


def _jobs(config: TrainConfig, test: WorldTest, videos: Path | None) -> list[WorldJob]:
    clips, prefix = world_clips(config), config.objective.prefix_frames
    return [WorldJob(test, clips, seed, prefix, videos) for seed in test.seeds]


def score_world(job: WorldJob) -> bytes:
    """The scores of a job, pickled: tensors that processes share hold a file handle each, and a row has hundreds."""
    commanded = clips_of_world(job.test, job.clips, job.seed, torch.device("cpu"))
    if job.videos is None:
        return pickle.dumps([score_floor(clip, job.prefix_frames) for clip in commanded])
    with safe_open(job.videos, "pt") as videos:
        return pickle.dumps([score_clip(clip, videos.get_tensor(clip.name), job.prefix_frames) for clip in commanded])


def scores_of(worlds: Iterable[bytes]) -> list[Score]:
    """What `score_world` returned, unpacked."""
    return [score for world in worlds for score in pickle.loads(world)]


def floor_file(config: TrainConfig, test: WorldTest) -> Path:
    """Where the floor of a test lies, beside the rows' folders: all rows with the same paths and lenses share it."""
    clips, settings = world_clips(config), (SCORING, FLOOR_YAW_RAD, FLOOR_STRETCH, FLOOR_NOISE)
    what = repr((test.seeds, test.turn_deg, test.stretch, clips, config.objective.prefix_frames, settings))
    return config.run.out.parent / f"floor-{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"


def summaries(scores: list[Score], clips: WorldClips) -> dict[str, Any]:
    """Means with intervals over clips: all, by manoeuvre and, where lenses differ, by lens."""
    groups: dict[str, list[Score]] = {"all": scores} | {name: [] for name in MANOEUVRES}
    for score in scores:
        groups[score.manoeuvre].append(score)
        if clips.fov_deg[0] < clips.fov_deg[1] or clips.xi[0] < clips.xi[1]:
            groups.setdefault(lens_kind(clips.lens(score.seed)), []).append(score)
    return {name: _summary(group) for name, group in groups.items()}


def lens_kind(lens: Lens) -> str:
    """What a lens is called where lenses are mixed, by its horizontal field of view and mirror parameter."""
    middle = lens.height / 2.0
    edges, _ = lens.unproject(torch.tensor([[0.0, middle], [lens.width, middle]], dtype=torch.float64))
    off_axis_rad = torch.atan2(edges[:, :2].norm(dim=-1), edges[:, 2])  # the angle between the edges ends at 180°
    fov_deg, xi = math.degrees(off_axis_rad.sum()), float(getattr(lens, "xi", 0.0))
    if fov_deg < WIDE_DEG:
        return "pinhole-like"
    return "fisheye" if fov_deg >= FISHEYE_DEG and xi >= FISHEYE_XI else "wide"


def _summary(scores: list[Score]) -> dict[str, Any]:
    summary = summarise([score.metrics for score in scores], [score.pairs for score in scores])
    plain = asdict(summary) | {"psnr_db": sum(score.psnr_db for score in scores) / len(scores)}
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
        "rows": {"generated": summaries(scores, clips), "floor": floor},
        "clips": {score.name: score.as_dict() | {"lens": lens_kind(clips.lens(score.seed))} for score in scores},
    }


def results_file(config: TrainConfig, results: Path) -> Path:
    """Where a row lies in a results folder."""
    return results / f"{config.run.out.name}.json"


def is_scored(config: TrainConfig, tests: Sequence[WorldTest], results: Path) -> bool:
    """Whether a results folder has this row: as long a training on the same clips, and all tests of it."""
    row = read_result(results_file(config, results))
    if row is None:
        return False
    found = [part["test"] for part in parts_of(row)]
    same = {"steps": config.run.steps, "batch_size": config.run.batch_size, "data": about_clips(config)}
    return all(row[key] == value for key, value in same.items()) and all(asdict(test) in found for test in tests)


def about_clips(config: TrainConfig) -> dict[str, Any]:
    """The clips of a row, as its results file has them."""
    return json.loads(json.dumps(asdict(world_clips(config))))


def check_nothing_is_trained_again(config: TrainConfig, results: Path | None) -> None:
    """Refuse to train a row that has results: those of another training can neither be added to them nor lost."""
    done, wanted = steps_done(config), config.run.steps
    files = {config.run.out / "scores.json": 1}  # a longer run in the same folder replaces its own
    if results is not None:
        files[results_file(config, results)] = wanted
    for file, least in files.items():
        result = read_result(file)
        if result is not None and done < least:
            what = ", ".join(f"×{part['test']['stretch']:g}" for part in parts_of(result))
            got = f"{what} of {result['steps']:,} steps, while {config.run.out} has {done:,} of {wanted:,} steps"
            raise left_alone(file, got)


def left_alone(file: Path, got: str) -> ValueError:
    """The error for a results file that must not be overwritten."""
    fix = (
        "it was left as it is, and nothing was trained; bring the folder of its run back to add tests to it, "
        "or move it away or name another results folder to make the row anew"
    )
    return invalid(str(file), "absent, or made from the weights of this run with the same test", got, fix)


def read_result(file: Path) -> dict[str, Any] | None:
    """A results file, None where there is none."""
    return json.loads(file.read_text()) if file.exists() else None


def what_differs(before: Mapping[str, Any], config: TrainConfig, tests: Sequence[WorldTest]) -> str:
    """Why tests of a row's trained weights may not stand in one file with what is in it; empty if they may."""
    weights, asked = weights_digest(config.run.out / "trained"), {test.stretch: asdict(test) for test in tests}
    if before["data"] != about_clips(config):
        return f"clips like {before['data']}, not {about_clips(config)}"
    now = provenance(config)
    is_same_run = now["trained_s"] is not None and all(before.get(key) == now[key] for key in SAME_RUN)
    for part in parts_of(before):
        stretch = part["test"]["stretch"]
        wanted = asdict(tests[0]) if part is before else asked.get(stretch)
        if part.get("weights", weights if is_same_run else "") != weights:
            return f"×{stretch:g} of other weights"
        if wanted is not None and part["test"] != wanted:
            return f"×{stretch:g} tested with {part['test']}, not {wanted}"
        if wanted is None and part.get("scoring", UNSAID_SCORING) != SCORING:
            return f"×{stretch:g} with scores of another version (name it after --stretch to score it again)"
    return ""


def put_together(
    about: Mapping[str, Any],
    parts: Sequence[Mapping[str, Any]],  # of the benchmark's own test, then of its sweep
    earlier: Iterable[Mapping[str, Any]],  # results of the same weights, see what_differs
) -> dict[str, Any]:
    """What a results file says: the tests that were just made, and those that were made earlier and not again.

    What was said of the training then stays: how many rows were trained at once is not how many are tested at once.
    """
    plain, sweep = dict(about), dict[float, Mapping[str, Any]]()
    for result in earlier:
        plain |= {key: value for key, value in result.items() if key not in parts[0]}
        sweep |= {part["test"]["stretch"]: part for part in result["sweep"]}
    sweep |= {part["test"]["stretch"]: part for part in parts[1:]}
    return plain | dict(parts[0]) | {"sweep": [sweep[stretch] for stretch in sorted(sweep)]}


def with_seed(config: TrainConfig, seed: int) -> TrainConfig:
    """The same row with other dice, in a folder of its own; {seed} in what it starts from is the seed."""
    out, start = config.run.out.with_name(f"{config.run.out.name}-seed{seed}"), config.model.pretrained
    model = replace(config.model, pretrained=None if start is None else start.replace("{seed}", str(seed)))
    return replace(config, run=replace(config.run, seed=seed, out=out), model=model)

"""`merope demo`: the model in the package continues one street along three commanded paths, and is measured.

Nothing here is special to the demo: the street is the procedural world, the clips are made by `CameraVideoPipeline`,
poses are recovered by the render-anchored estimator of the evaluation.
"""

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from torch import Tensor

from merope import formats
from merope.adapters.attachment import load_branch
from merope.demo.given_paths import LENSES, beyond_training, given_path, seen_through
from merope.demo.pictures import Film, animation_frames, film_frames, poster, stacked_films
from merope.draw.progress import show_line
from merope.errors import invalid
from merope.evaluate.discover import ClipName, Problem
from merope.evaluate.estimators.render_anchored import RenderAnchoredEstimator
from merope.evaluate.metrics import PoseMetrics
from merope.evaluate.record import Record, Thumbnail, thumbnails
from merope.evaluate.report import write_report
from merope.evaluate.results import measure
from merope.evaluate.run import versions
from merope.evaluate.world_scores import Score, score_clip, score_floor
from merope.formats.trajectory import Trajectory
from merope.formats.video import write_animation, write_image, write_video
from merope.formats.writing import require_writable
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.causal_clips import made_clip
from merope.generate.conditions import check_prefix_count
from merope.generate.preflight import ModelOutline, check_branch, check_model_weights, no_loading_bars, outline_model
from merope.world.clips import HELD_OUT_SEEDS, WorldClips
from merope.world.clips_file import CLIPS_FILE, EXAMPLE, read_clips
from merope.world.commanded import FIRST_TEST_SEED, CommandedClip, WorldTest, clips_of_world

NEEDED = ("av", "PIL", "cv2")
"""Packages that measure and write what was driven, after minutes of work."""

SHIPPED_MODEL = Path(__file__).parent / "world_model"
WORLDS = HELD_OUT_SEEDS - FIRST_TEST_SEED
METHOD = "generated"
FLOOR_RATE_HZ = 4.0  # frames of a clip whose floor is measured: it takes as long as measuring the clip


@dataclass(frozen=True)
class DemoConfig:
    """What is driven, and where the pictures go.

    model: a pipeline folder with the camera branch in branch/ and what its clips are like in clips.json.
    world: number of a street that was kept out of training.
    trajectory: a pose file, put with its first pose at the start of the street; None drives the benchmark's three.
    steps: of denoising; None for what the model's folder names.
    device: "auto" for the GPU if there is one.
    """

    out: Path
    model: Path = SHIPPED_MODEL
    world: int = 4
    trajectory: Path | None = None
    assume_metric: bool = False
    lens: Literal["pinhole", "fisheye"] = "pinhole"
    steps: int | None = None
    seed: int = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        if not 0 <= self.world < WORLDS:
            raise invalid("world", f"from 0 to {WORLDS - 1}, the worlds kept out of training", self.world, "try 4")
        if self.steps is not None and self.steps < 1:
            raise invalid("steps", "at least 1", self.steps, "leave it out to take what suits the model")
        if self.lens not in LENSES:
            raise invalid("lens", f"one of {', '.join(LENSES)}", repr(self.lens), "choose one of them")

    @property
    def world_seed(self) -> int:
        return FIRST_TEST_SEED + self.world

    @cached_property
    def trained(self) -> tuple[WorldClips, int]:
        """The clips that the model knows, and the denoising steps that suit it."""
        return read_clips(self.model)

    @property
    def clips(self) -> WorldClips:
        """What is driven: the model's clips through the chosen lens."""
        return seen_through(self.trained[0], self.lens)

    @property
    def run_steps(self) -> int:
        return self.steps or self.trained[1]

    @property
    def run_device(self) -> torch.device:
        """The device itself; one that is not there is refused."""
        return device_here("device", self.device)


def device_here(option: str, name: str) -> torch.device:
    """A device of this machine, "auto" for the GPU if there is one."""
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    here = ["cpu", *(["cuda", *gpus] if gpus else [])]
    if name not in ("auto", *here):
        raise invalid(option, f"auto or, on this machine, {', '.join(here)}", repr(name), "use auto")
    return torch.device(("cuda" if gpus else "cpu") if name == "auto" else name)


@dataclass(frozen=True, eq=False)
class Drive:
    """One path: what was commanded, what was generated, and where that camera went."""

    clip: CommandedClip
    video: Tensor  # uint8 [T, H, W, 3]
    record: Record
    score: Score
    floor: Score  # of the measurement, on this path

    @property
    def name(self) -> str:
        return self.clip.manoeuvre

    @property
    def metrics(self) -> PoseMetrics:
        return self.score.metrics

    @property
    def psnr_db(self) -> float:
        return self.score.psnr_db

    def numbers(self) -> dict[str, object]:
        """For JSON."""
        lost = {"frames_without_pose": self.metrics.frames - self.metrics.valid_frames}
        own = self.metrics.as_dict() | lost | {"psnr_db": self.psnr_db}
        return own | {"floor": self.floor.metrics.as_dict()}


def run(config: DemoConfig) -> list[Drive]:
    """Drive, measure and write everything to the folder `out`; files appear when all is done.

    All that can be wrong with the input is said before weights are read.
    """
    began_s = time.perf_counter()
    for package in NEEDED:
        import_module(package)
    device = config.run_device
    require_writable("--out", config.out.absolute())
    if not config.model.is_dir():
        missing = "install the package again, or pass --model FOLDER"
        raise FileNotFoundError(f"model folder {config.model} is missing; {missing}")
    check_model("model", config.model, config.model / "branch", config.clips)
    given = None if config.trajectory is None else given_path(config.trajectory, config.clips, config.assume_metric)
    paths = WorldTest().paths(config.clips, config.world_seed) if given is None else {"trajectory": given}
    notes = beyond_training(given, config.clips, config.trained[0])
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    pipeline = loaded(config.model, device)
    commanded = clips_of_world(paths, config.clips, config.world_seed, torch.device("cpu"))
    begun_s = time.perf_counter()
    videos = [generated(pipeline, clip, config, f"{k} of {len(commanded)}") for k, clip in enumerate(commanded, 1)]
    generated_s = time.perf_counter()
    drives = [measured(clip, video, config.clips) for clip, video in zip(commanded, videos, strict=True)]
    measured_s = time.perf_counter()
    wall_s = {"load": begun_s - began_s, "generate": generated_s - begun_s, "measure": measured_s - generated_s}
    write(config, drives, notes, wall_s)
    return drives


def check_model(name: str, folder: Path, branch: Path, clips: WorldClips) -> ModelOutline:
    """Refuse a folder that is incomplete, or a model that cannot make clips of this size and lens; its outline."""
    outline = outline_model(str(folder.absolute()))
    if outline.strides.pixels > 1 and not (folder / CLIPS_FILE).is_file():
        fix = f"write what its clips are like, such as {EXAMPLE}"
        raise invalid(name, f"a folder with {CLIPS_FILE}, as every model with a VAE needs", str(folder), fix)
    outline.strides.check(clips.height, clips.width, clips.frames)
    check_prefix_count(clips.prefix_frames, outline.strides, clips.frames)
    check_branch(str(branch.absolute()), outline, clips.cameras([0]))
    check_model_weights(outline)
    return outline


def loaded(
    folder: Path,
    device: torch.device,
    branch: Path | None = None,  # by default branch/ in the model's folder
    dtype: torch.dtype | dict[str, torch.dtype] = torch.float32,  # however it is stored
) -> CameraVideoPipeline:
    """The model with its branch."""
    with no_loading_bars():  # it takes a second
        pipeline: CameraVideoPipeline = CameraVideoPipeline.from_pretrained(str(folder.absolute()), dtype=dtype)
        load_branch(pipeline.transformer, str((branch or folder / "branch").absolute()))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(device)


def generated(
    pipeline: CameraVideoPipeline, clip: CommandedClip, config: DemoConfig, which: str
) -> Tensor:  # uint8 [T, H, W, 3]
    """Continue the prefix of a clip along its cameras. Paths share the noise, so that only the command differs."""
    clips = config.clips

    def tell(done: int, of: int) -> None:
        show_line(f"driving {clip.manoeuvre} ({which}): step {done} of {of}", keep=done == of)

    return made_clip(
        pipeline,
        clips.frames,
        clip.cameras,
        clip.true[: clips.prefix_frames],
        tell,
        seed=config.seed,
        height=clips.height,
        width=clips.width,
        num_inference_steps=config.run_steps,
        guidance_scale=1.0,
    )[0]


def measured(clip: CommandedClip, video: Tensor, clips: WorldClips) -> Drive:  # uint8 [T, H, W, 3]
    """Recover where the camera of a video went. The prefix was given: alone it does not count as recovered."""
    show_line(f"recovering the path of {clip.manoeuvre}")
    score = score_clip(clip, video, clips.prefix_frames)
    name = ClipName(f"world-{clip.seed - FIRST_TEST_SEED}", clip.manoeuvre)
    path = clip.cameras.world_from_camera
    record = recovered_record(name, path, score.recovered, score.valid, thumbnails(video))
    every = max(round(clips.frame_rate_hz / FLOOR_RATE_HZ), 1)
    return Drive(clip, video, record, score, score_floor(clip, clips.prefix_frames, every))


def recovered_record(
    clip: ClipName,
    commanded: Tensor,  # [T, 4, 4]
    recovered: Tensor,  # [T, 4, 4]
    valid: Tensor,  # bool [T]
    pictures: tuple[Thumbnail, ...],
) -> Record:
    """What the report shows of a generated video, in metres on both sides."""
    found, count = int(valid.sum()), len(valid)
    problems = []
    if found < count:
        kind = "recovery failed" if found < 2 else "partial recovery"
        problems.append(Problem(METHOD, str(clip), kind, f"{found} of {count} frames have a pose"))
    return Record(
        method=METHOD,
        clip=clip,
        commanded=commanded,
        recovered=recovered,
        valid=valid,
        is_metric=True,
        command_is_metric=True,
        estimator=RenderAnchoredEstimator.name,
        problems=tuple(problems),
        thumbnails=pictures,
    )


def table(drives: Sequence[Drive]) -> str:
    """The numbers of every path, and beside them what the measurement itself gets wrong."""
    lines = [
        "Poses recovered from the generated video, against the command; floor: the same on a true, noisy render.",
        "",
        f"{'path':<12}{'rot°':>8}{'metric tr%':>12}{'ATE m':>8}{'PSNR dB':>9}{'no pose':>10}"
        f"{'floor rot°':>13}{'metric tr%':>12}",
    ]
    for drive in drives:
        own, floor = drive.metrics, drive.floor.metrics
        cells = f"{_cell(own.rot_deg):>8}{_cell(own.metric_tr_percent):>12}{_cell(own.ate_m):>8}{drive.psnr_db:9.1f}"
        lost = f"{own.frames - own.valid_frames} of {own.frames}"
        ground = f"{_cell(floor.rot_deg, 3):>13}{_cell(floor.metric_tr_percent, 3):>12}"
        lines.append(f"{drive.name:<12}{cells}{lost:>10}{ground}")
    if drives and all(_cell(drive.metrics.rot_deg) == "–" for drive in drives):
        height, width = drives[0].video.shape[1:3]
        why = f"frames of {height}×{width} are too small for it, or the model is too little trained"
        lines += ["", f"Too few frames have a pose to measure a path: {why}."]
    return "\n".join([*lines, ""])


def _cell(value: float | None, digits: int = 2) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def write(config: DemoConfig, drives: Sequence[Drive], notes: Sequence[str], wall_s: Mapping[str, float]) -> None:
    """All files, made aside and moved when they are complete."""
    show_line("writing pictures")
    films = [film_of(drive, config.clips) for drive in drives]
    videos = [film_frames(film) for film in films]
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(config).items()}
    settings["steps"], rate_hz = config.run_steps, config.clips.frame_rate_hz
    config.out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=config.out, prefix=".unfinished-") as folder:
        aside = Path(folder)
        for drive, frames in zip(drives, videos, strict=True):
            write_video(frames, aside / f"{drive.name}.mp4", rate_hz)
            write_video(drive.video, aside / "clips" / f"{drive.name}.mp4", rate_hz)
            formats.write(_camera_file(drive, rate_hz), aside / "clips" / f"{drive.name}.cameras.json")
        write_video(stacked_films(videos), aside / "demo.mp4", rate_hz)
        write_animation(animation_frames(films), aside / "demo.webp", rate_hz)
        write_image(poster(films), aside / "poster.png")
        records = [replace(drive.record, video=aside / "clips" / f"{drive.name}.mp4") for drive in drives]
        write_report(measure(records, [], settings | _floors(drives), versions()), aside / "report.html")
        document = {
            "settings": settings,
            "notes": list(notes),
            "paths": {drive.name: drive.numbers() for drive in drives},
            "wall_s": {name: round(value, 2) for name, value in wall_s.items()},
            "versions": versions(),
        }
        (aside / "results.json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        (config.out / "clips").mkdir(exist_ok=True)
        for made in sorted(file for file in aside.rglob("*") if file.is_file()):
            made.replace(config.out / made.relative_to(aside))
    show_line("")


def _floors(drives: Sequence[Drive]) -> dict[str, str]:
    """The floor of the measurement in the words of the report's settings."""
    metrics = {f"floor, {drive.name}": drive.floor.metrics for drive in drives}
    return {name: f"rot° {one.rot_deg:.3f}, metric tr% {one.metric_tr_percent:.3f}" for name, one in metrics.items()}


def film_of(drive: Drive, clips: WorldClips) -> Film:
    """What the pictures of a path show."""
    return Film(
        title=drive.name,
        true=drive.clip.true,
        generated=drive.video,
        commanded=drive.record.commanded,
        recovered=drive.record.recovered,
        valid=drive.record.valid,
        prefix_frames=clips.prefix_frames,
        frame_rate_hz=clips.frame_rate_hz,
    )


def _camera_file(drive: Drive, rate_hz: float) -> Trajectory:
    """The commanded path, to be edited and driven again."""
    cameras = drive.clip.cameras
    times_s = torch.arange(cameras.count, dtype=torch.float64) / rate_hz
    convention = "commanded path of merope demo"
    return Trajectory(cameras.world_from_camera, True, convention, times_s, cameras.lens, name=drive.name)

"""A minute of driving, block by block: does the model still follow, and is a place that was left still the same?

    python benchmarks/long_drive.py --model FOLDER [--seconds 60] [--worlds 2] [--steps 4] [--work FOLDER]
        [--out benchmarks/results/long-drive.json]

Two paths in each of some worlds that no model was trained on:

* road: along the main street, to the right into a side street, and on in gentle curves;
* laps: a circle of 20 m that is driven twice. Every frame of the second lap was seen from the same place before.

Rows are settings of a stream: window, sink and noise on the past on the road, recalled views on the laps. The first
rows are the true frames: what both rulers say where nothing is wrong. There are two stages, and each goes on where it
was:

* `--only drive` wants a GPU. For every row it keeps PSNR of all frames against the true render, on laps also against
  the frame of the lap before, and windows of 49 frames as JPEG, one every ten seconds.
* `--only score` measures the windows and wants CPU cores. The render-anchored estimator knows the true world: errors in
  metres for every 6th frame, as long as the video shows that world. COLMAP knows the pictures and the lens alone:
  errors within a window, its path laid on the command by a similarity.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from merope.adapters.recorded_passes import is_bound_by_launches
from merope.bench.run_facts import weights_digest
from merope.demo.drive import loaded
from merope.draw.progress import ProgressLine
from merope.errors import invalid
from merope.evaluate.estimators.render_anchored import RenderAnchoredEstimator
from merope.evaluate.estimators.structure_from_motion import ColmapEstimator
from merope.evaluate.metrics import pose_metrics
from merope.evaluate.workers import pool_or_this_process
from merope.evaluate.world_scores import frame_psnr_db
from merope.formats.video import as_bytes
from merope.formats.writing import replace_text, replacing
from merope.geometry.cameras import Cameras
from merope.geometry.poses import relative
from merope.geometry.trajectories import unicycle_path
from merope.train.provenance import commit, device_name
from merope.world.clips import WorldClips
from merope.world.clips_file import read_clips
from merope.world.commanded import FIRST_TEST_SEED
from merope.world.render import render
from merope.world.scene import World
from merope.world.street import LANE_M, street_coordinates

CPU = torch.device("cpu")
ROAD_M_S, LAP_M, TURN_RADIUS_M = 5.0, 20.0, 9.0
CURVE_RAD_S, CURVE_S = math.radians(6.0), 3.0  # to the right, and back
SECOND_CROSSING_M = (80.0, 160.0)  # along the main street
WINDOW_FRAMES, EVERY_S, ANCHORED_EVERY = 49, 10.0, 6
RENDERED_AT_ONCE, LEAST_S = 96, 50.0
REMEMBERED = 600  # latent frames, all of them

Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """How a stream is asked to drive, in latent frames; a window of 0 is no stream, but the true frames."""

    path: str
    window: int = 12
    sink: int = 3
    recall: int = 0
    past_noise: float = 0.0

    @property
    def name(self) -> str:
        if not self.window:
            return f"{self.path}-true"
        more = f"-recall{self.recall}" if self.recall else ""
        more += f"-noise{self.past_noise:g}" if self.past_noise else ""
        return f"{self.path}-window{self.window}-sink{self.sink}{more}"


SETTINGS = (
    *(Setting("road", 0, 0), Setting("laps", 0, 0)),
    *(Setting("road", 12, 3), Setting("road", 12, 0), Setting("road", 6, 3), Setting("road", 24, 3)),
    *(Setting("road", 12, 3, past_noise=level) for level in (0.1, 0.2)),
    *(Setting("laps", 12, 3), Setting("laps", 12, 3, recall=3)),
)


@dataclass(frozen=True)
class Trial:
    """A model and how long it drives; processes share it."""

    model: Path
    work: Path
    seconds: float
    steps: int | None

    @property
    def clips(self) -> WorldClips:
        return read_clips(self.model)[0]

    @property
    def frames(self) -> int:
        """Whole blocks of 12 after the given frames."""
        clips = self.clips
        return clips.prefix_frames + 12 * round((self.seconds * clips.frame_rate_hz) / 12)

    @property
    def lap_frames(self) -> int:
        """Two of them after the given frames."""
        return (self.frames - self.clips.prefix_frames) // 2

    @property
    def windows(self) -> list[int]:
        """First frames of what is scored; the last window ends with the drive."""
        every, last = round(EVERY_S * self.clips.frame_rate_hz), self.frames - WINDOW_FRAMES
        return [min(start, last) for start in range(0, last + every // 2, every)]

    def __post_init__(self) -> None:
        if self.seconds < LEAST_S:
            raise invalid("--seconds", f"at least {LEAST_S:g}", self.seconds, "the turn is later")

    def file(self, seed: int, setting: Setting) -> Path:
        return self.work / f"world-{seed}-{setting.name}.safetensors"

    def cameras(self, seed: int, path: str) -> Cameras:
        clips, frames = self.clips, self.frames
        poses = road(seed, frames, clips) if path == "road" else laps(frames, self.lap_frames, clips)
        return Cameras(poses, clips.lens(seed), plan_dtype=torch.float32)


def laps(frames: int, lap_frames: int, clips: WorldClips) -> Tensor:  # [T, 4, 4]
    """Around and around a circle to the left, whatever stands there."""
    rate = torch.full((frames - 1,), 2 * math.pi * clips.frame_rate_hz / lap_frames, dtype=torch.float64)
    return unicycle_path(LAP_M * rate, -rate, clips.frame_rate_hz)


def road(seed: int, frames: int, clips: WorldClips) -> Tensor:  # [T, 4, 4]
    """The main street until its second crossing, then the side street, in whose right lane the turn ends."""
    streets, rate_hz = World(seed).streets, clips.frame_rate_hz
    main, side = (streets.each(lambda of_all, n=n: of_all[0, n].double()) for n in (0, 3))
    lateral_m = -main.origin_x_m
    bend = float(main.curvature_per_m / (1 - main.curvature_per_m * lateral_m))

    def driven(straight: int) -> Tensor:  # [T, 4, 4]
        yaw = torch.zeros(frames - 1, dtype=torch.float64)
        yaw[:straight] = ROAD_M_S * bend
        turned = float(side.heading_rad) - ROAD_M_S * bend * straight / rate_hz
        steps = max(1, round(abs(turned) * TURN_RADIUS_M / ROAD_M_S * rate_hz))
        yaw[straight : straight + steps] = turned * rate_hz / steps
        rest = torch.arange(len(yaw) - straight - steps) / rate_hz
        phase = torch.remainder(rest, 4 * CURVE_S) / CURVE_S
        side_to = torch.where((phase < 1) | (phase >= 3), 1.0, -1.0) * (rest >= 4 * CURVE_S)
        yaw[straight + steps :] = CURVE_RAD_S * side_to * (1 - (2 * phase.frac() - 1).abs())
        return unicycle_path(torch.full_like(yaw, ROAD_M_S), yaw, rate_hz)

    def off_lane(straight: int) -> float:
        x_m, _, z_m = driven(straight)[straight + round(4 * CURVE_S * rate_hz), :3, 3]
        return abs(float(street_coordinates(side, x_m, z_m)[0]) - LANE_M / 2)

    nearest, farthest = (round(metres / ROAD_M_S * rate_hz) for metres in SECOND_CROSSING_M)
    return driven(min(range(nearest, farthest), key=off_lane))


def world_of(seed: int, cameras: Cameras, device: torch.device) -> World:
    """A world in which nothing stands in the way."""
    return World(seed, device).cleared(cameras.world_from_camera[None].to(device))


def true_frames(world: World, cameras: Cameras, clips: WorldClips) -> Tensor:  # uint8 [T, H, W, 3]
    """What the cameras would see."""
    parts = [
        render(world, cameras.at(slice(start, start + RENDERED_AT_ONCE)).to(world.device), clips.height, clips.width)
        for start in range(0, cameras.count, RENDERED_AT_ONCE)
    ]
    return torch.cat([as_bytes(part.image).cpu() for part in parts])


@torch.no_grad()
def drive(trial: Trial, seed: int, setting: Setting) -> None:
    """One row: drive, compare every frame, keep the windows."""
    file, clips = trial.file(seed, setting), trial.clips
    about = {"weights": weights_digest(trial.model), "trial": repr((trial.seconds, trial.steps)), **text(setting)}
    if file.exists() and about.items() <= metadata(file).items():
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cameras, first = trial.cameras(seed, setting.path), clips.prefix_frames
    true, began_s = true_frames(world_of(seed, cameras, device), cameras, clips), time.perf_counter()
    video = streamed(trial, setting, cameras, true[:first], device) if setting.window else true
    took_s = time.perf_counter() - began_s
    kept = {"psnr_db": frame_psnr_db(video, true).float()}
    if setting.path == "laps":
        lap = trial.lap_frames
        kept["psnr_to_lap_before_db"] = frame_psnr_db(video[first + lap :], video[first : first + lap]).float()
        kept["true_psnr_to_lap_before_db"] = frame_psnr_db(true[first + lap :], true[first : first + lap]).float()
    for start in trial.windows:
        kept[f"window-{start}"] = packed(video[start : start + WINDOW_FRAMES])
    with replacing(file) as part:
        fps = f"{(len(video) - first) / took_s:.1f}" if setting.window else ""
        save_file(kept, part, about | {"device": device_name(device), "fps": fps})


def streamed(
    trial: Trial,
    setting: Setting,
    cameras: Cameras,  # [T]
    prefix: Tensor,  # uint8 [K, H, W, 3]
    device: torch.device,
) -> Tensor:  # uint8 [T, H, W, 3]
    """The whole drive as the model makes it."""
    pipe = loaded(trial.model, device)
    stream = pipe.stream(
        prefix=prefix,
        cameras=cameras.at(slice(len(prefix))),
        window=setting.window,
        sink=setting.sink,
        remember=REMEMBERED if setting.recall else 0,
        past_noise=setting.past_noise,
        num_inference_steps=trial.steps,
        guidance_scale=1.0,
        cuda_graphs=is_bound_by_launches(pipe.transformer),
    )
    made = [prefix]
    while stream.frames < cameras.count:
        own = slice(stream.frames, stream.frames + stream.block_frames)
        made.append(stream.drive(cameras.at(own), recall=setting.recall))
    return torch.cat(made)


def text(setting: Setting) -> dict[str, str]:
    return {name: str(value) for name, value in asdict(setting).items()}


def metadata(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as kept:
        return dict(kept.metadata() or {})


def packed(frames: Tensor) -> Tensor:  # uint8 [T, H, W, 3] -> uint8 [bytes]
    """JPEG of very good quality, one frame below the other."""
    import cv2

    column = frames.flatten(0, 1).flip(-1).numpy()
    return torch.from_numpy(cv2.imencode(".jpg", column, [cv2.IMWRITE_JPEG_QUALITY, 93])[1].flatten())


def unpacked(data: Tensor, frames: int) -> Tensor:  # uint8 [bytes] -> uint8 [T, H, W, 3]
    import cv2

    column = torch.from_numpy(cv2.imdecode(data.numpy(), cv2.IMREAD_COLOR))
    return column.flip(-1).unflatten(0, (frames, -1)).contiguous()


def score_window(trial: Trial, seed: int, setting: Setting, start: int) -> Row:
    """Both rulers on one window."""
    torch.set_num_threads(1)
    file, clips = trial.file(seed, setting), trial.clips
    with safe_open(file, "pt") as kept:
        video = unpacked(kept.get_tensor(f"window-{start}"), WINDOW_FRAMES)
    whole = trial.cameras(seed, setting.path)
    cameras, some = whole.at(slice(start, start + WINDOW_FRAMES)), slice(None, None, ANCHORED_EVERY)
    anchored = RenderAnchoredEstimator(world_of(seed, whole, CPU), cameras.at(some))(video[some])
    commanded = cameras.at(some).world_from_camera
    apart_m = (anchored.world_from_camera[:, :3, 3] - commanded[:, :3, 3]).norm(dim=-1)
    turn = relative(commanded, anchored.world_from_camera)[:, :3, :3].diagonal(dim1=1, dim2=2).sum(-1)
    turn_deg = torch.rad2deg(torch.arccos(((turn - 1) / 2).clamp(-1, 1)))
    found = ColmapEstimator()(video, clips.lens(seed))
    errors = pose_metrics(cameras.world_from_camera, found.world_from_camera, found.valid).as_dict()
    seen = anchored.valid
    return {
        "world": seed,
        "setting": setting.name,
        "start_s": start / clips.frame_rate_hz,
        "anchored_frames": len(seen),
        "anchored_found": int(seen.sum()),
        "anchored_position_m": rounded(float(apart_m[seen].mean()) if seen.any() else None),
        "anchored_rot_deg": rounded(float(turn_deg[seen].mean()) if seen.any() else None),
        "colmap_frames": WINDOW_FRAMES,
        "colmap_registered": int(found.valid.sum()),
        **{f"colmap_{name}": rounded(errors[name]) for name in ("rot_deg", "tr_percent")},
    }


def rounded(error: float | None) -> float | None:
    """None where nothing was found."""
    return None if error is None else round(error, 3)


def main() -> None:
    """Drive, score, print and write."""
    parser = argparse.ArgumentParser(description="a minute of driving")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--worlds", type=int, default=2)
    parser.add_argument("--steps", type=int, help="of denoising (as the model was trained)")
    parser.add_argument("--settings", nargs="+", default=[each.name for each in SETTINGS])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("outputs/long-drive"))
    parser.add_argument("--only", choices=("drive", "score"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/long-drive.json"))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    trial = Trial(options.model, options.work, options.seconds, options.steps)
    settings = [each for each in SETTINGS if each.name in options.settings]
    jobs = [(FIRST_TEST_SEED + world, setting) for world in range(options.worlds) for setting in settings]
    if options.only != "score":
        run_all("driving", drive, [(trial, *job) for job in jobs], options.workers)
    if options.only == "drive":
        return
    windows = [(trial, *job, start) for job in jobs for start in trial.windows]
    rows = run_all("scoring", score_window, windows, options.workers)
    drives = [summary(trial, *job) for job in jobs]
    about = {"model": weights_digest(trial.model), "commit": commit(), "torch": torch.__version__}
    report = {**about, "seconds": trial.seconds, "steps": trial.steps, "drives": drives, "windows": rows}
    replace_text(options.out, json.dumps(report, indent=1) + "\n")
    print(f"wrote {options.out}; python benchmarks/long_drive_picture.py draws it")


def summary(trial: Trial, seed: int, setting: Setting) -> Row:
    """PSNR of every second of a drive."""
    file, row = trial.file(seed, setting), Row(world=seed, setting=setting.name)
    with safe_open(file, "pt") as kept:
        names: list[str] = kept.keys()
        curves = {name: kept.get_tensor(name) for name in names if not name.startswith("window")}
    rate = round(trial.clips.frame_rate_hz)
    for name, values in curves.items():
        row[name] = [round(float(each.mean()), 2) for each in values.split(max(1, rate))]
    return row | {name: metadata(file)[name] for name in ("device", "fps")}


def run_all(title: str, job: Any, calls: Sequence[tuple[Any, ...]], workers: int) -> list[Any]:
    """The results of a job for every call, in order, by some processes."""
    progress = ProgressLine(title, len(calls), "parts")
    with pool_or_this_process(workers) as pool:
        waiting = [pool.submit(job, *call) for call in calls]
        for done, _ in enumerate(as_completed(waiting), start=1):
            progress.show(done)
    return [future.result() for future in waiting]


if __name__ == "__main__":
    main()

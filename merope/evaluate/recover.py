"""One clip: decode its video, recover the cameras of its frames, note whatever is wrong with it."""

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from merope.errors import invalid
from merope.evaluate.discover import Job, Problem
from merope.evaluate.estimators import estimator
from merope.evaluate.estimators.estimator import PoseEstimate, PoseEstimator
from merope.evaluate.estimators.precomputed import PrecomputedEstimator
from merope.evaluate.record import Record, failed_record, thumbnails
from merope.formats.trajectory import Trajectory
from merope.geometry.lens_batches import picked, resized
from merope.geometry.lenses import Lens


@dataclass(frozen=True)
class EstimatorChoice:
    """An estimator by name; `checkpoint` is the file or folder of weights of a learned one."""

    name: str
    checkpoint: Path | None = None

    def fingerprint(self) -> str:
        """Changes when the weights do; they are too large to be read for every clip."""
        if self.checkpoint is None:
            return self.name
        files = sorted(self.checkpoint.rglob("*")) if self.checkpoint.is_dir() else [self.checkpoint]
        states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return f"{self.name} {states}"


@lru_cache(maxsize=1)  # once per process: a learned estimator takes its time to load
def built(choice: EstimatorChoice) -> PoseEstimator:
    """The estimator itself; refused with what is missing if it cannot be made."""
    options: dict[str, object] = {} if choice.checkpoint is None else {"checkpoint": choice.checkpoint}
    return estimator(choice.name, **options)


def recover(job: Job, choice: EstimatorChoice) -> Record:
    """The poses of one video. Whatever is wrong with the clip is in the record; nothing is raised for it."""
    try:
        command = _command(job)
    except (OSError, ValueError) as error:
        return failed(job, "unreadable poses", str(error))
    if job.refusal is not None or job.video is None:
        return failed(job, *_refusal(job), command)
    try:
        frames, video_frames = decode(job.video, command.count)
    except (OSError, ValueError) as error:
        return failed(job, "unreadable video", str(error), command)
    try:
        estimate = _estimate(job, choice, frames, video_frames, _lens_of(command, frames))
    except ModuleNotFoundError:  # no fault of the clip: every one would fail, and a method would score 0 for it
        raise
    except Exception as error:  # of any library below: one clip must not end a run of hundreds
        record = failed(job, "estimator stopped", f"{type(error).__name__}: {error}", command)
        return replace(record, thumbnails=thumbnails(frames))
    return _record(job, command, frames, video_frames, estimate)


def stopped(job: Job, reason: str) -> Record:
    """The record of a clip whose process died. Its command is read again: every pair of its frames is a miss."""
    try:
        return failed(job, "estimator stopped", reason, _command(job))
    except (OSError, ValueError) as error:
        return failed(job, "unreadable poses", str(error))


def _command(job: Job) -> Trajectory:
    command = job.commanded.trajectory()
    if command.count < 2:
        raise invalid(f"poses in {job.commanded.poses}", "at least two", command.count, "one pose is no motion")
    return command


def _refusal(job: Job) -> tuple[str, str]:
    return ("no video", "none given") if job.refusal is None else (job.refusal.kind, job.refusal.reason)


def failed(job: Job, kind: str, reason: str, command: Trajectory | None = None) -> Record:
    problem = Problem(job.method, str(job.clip), kind, reason)
    if command is None:
        return failed_record(job.method, job.clip, problem)
    return failed_record(job.method, job.clip, problem, command.world_from_camera, command.is_metric)


def decode(video: Path, limit: int) -> tuple[Tensor, int]:  # uint8 [T ≤ limit, H, W, 3], frames in the file
    """The first frames of a video at their own size, and how many it has."""
    import av

    frames, count = [], 0
    try:
        with av.open(str(video)) as container:
            for frame in container.decode(video=0):
                if count < limit:
                    frames.append(torch.from_numpy(frame.to_ndarray(format="rgb24")))
                count += 1
    except (av.error.FFmpegError, IndexError) as error:  # IndexError: a file without a video stream
        raise ValueError(f"video {video} cannot be decoded ({error}); generate it again") from error
    if not frames:
        raise ValueError(f"video {video} has no frames; generate it again")
    if len({frame.shape for frame in frames}) > 1:
        raise ValueError(f"video {video} has frames of different sizes; generate it again")
    return torch.stack(frames), count


def _lens_of(command: Trajectory, frames: Tensor) -> Lens | None:  # uint8 [T, H, W, 3]
    """The commanded lens for the size of the video."""
    if command.lens is None:
        return None
    lens = picked(command.lens, torch.arange(len(frames))) if command.lens.batch_shape else command.lens
    return resized(lens, frames.shape[2], frames.shape[1])


def _estimate(job: Job, choice: EstimatorChoice, frames: Tensor, video_frames: int, lens: Lens | None) -> PoseEstimate:
    if job.estimate is None:
        return built(choice)(frames, lens)
    return replace(PrecomputedEstimator(job.estimate, video_frames=video_frames)(frames, lens), name="precomputed")


def _record(job: Job, command: Trajectory, frames: Tensor, video_frames: int, estimate: PoseEstimate) -> Record:
    """Frames that the video does not have are frames without a pose."""
    count, clip = command.count, str(job.clip)
    recovered = torch.eye(4, dtype=torch.float64).repeat(count, 1, 1)
    valid = torch.zeros(count, dtype=torch.bool)
    recovered[: len(frames)], valid[: len(frames)] = estimate.world_from_camera, estimate.valid
    problems = []
    if video_frames != count:
        kind = "fewer frames" if video_frames < count else "more frames"
        problems.append(Problem(job.method, clip, kind, f"the video has {video_frames} frames, the path {count} poses"))
    found = int(valid.sum())
    if found < max(len(frames), 2):
        kind = "recovery failed" if found < 2 else "partial recovery"
        reason = f"{found} of {len(frames)} frames have a pose"
        problems.append(Problem(job.method, clip, kind, f"{reason} ({estimate.note})" if estimate.note else reason))
    return Record(
        method=job.method,
        clip=job.clip,
        commanded=command.world_from_camera,
        recovered=recovered,
        valid=valid,
        is_metric=estimate.is_metric and command.is_metric,
        command_is_metric=command.is_metric,
        estimator=estimate.name,
        weights_sha256=estimate.weights_sha256,
        note=estimate.note,
        problems=tuple(problems),
        thumbnails=thumbnails(frames),
    )

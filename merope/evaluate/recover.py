"""One clip: decode its video, recover the cameras of its frames, note whatever is wrong with it."""

import math
from collections.abc import Iterable, Iterator
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
from merope.evaluate.trust import SMALL_PX, UNCHECKED, checked, is_small
from merope.formats.checks import Finding, validate
from merope.formats.trajectory import Trajectory
from merope.formats.video import RATE_TOLERANCE, rate_and_size, read_first_frames
from merope.geometry.lens_batches import has_ratio, picked, resized
from merope.geometry.lenses import Lens, Pinhole

CHECKED_BY = {"colmap": "opencv"}
"""Who checks an estimator where nothing else is said; the others are not checked."""


@dataclass(frozen=True)
class EstimatorChoice:
    """An estimator by name; `checkpoint` is the file or folder of weights of a learned one.

    check: the name of a second estimator that has to find the same path, "none", or "default" for CHECKED_BY.
    """

    name: str
    checkpoint: Path | None = None
    check: str = "default"

    @property
    def second(self) -> "EstimatorChoice | None":
        """Who checks, if anybody does."""
        name = CHECKED_BY.get(self.name, "none") if self.check == "default" else self.check
        return None if name == "none" else EstimatorChoice(name, check="none")

    def fingerprint(self) -> str:
        """Changes when the weights do; they are too large to be read for every clip."""
        second = "" if self.second is None else f" checked by {self.second.name}"
        if self.checkpoint is None:
            return self.name + second
        files = sorted(self.checkpoint.rglob("*")) if self.checkpoint.is_dir() else [self.checkpoint]
        states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return f"{self.name} {states}{second}"


@lru_cache(maxsize=2)  # once per process, with the one that checks: a learned estimator takes its time to load
def built(choice: EstimatorChoice) -> PoseEstimator:
    """The estimator itself; refused with what is missing if it cannot be made."""
    options: dict[str, object] = {} if choice.checkpoint is None else {"checkpoint": choice.checkpoint}
    return estimator(choice.name, **options)


def recover(job: Job, choice: EstimatorChoice) -> Record:
    """The poses of one video. Whatever is wrong with the clip is in the record; nothing is raised for it."""
    try:
        command = _command(job)
        findings = validate(command)
    except Exception as error:  # one damaged file must not end a run of hundreds, however a reader fails on it
        return failed(job, "unreadable poses", _in_words(error))
    wrong = [finding for finding in findings if finding.severity == "error"]
    if wrong:
        return failed(job, "wrong path", _as_reason(job, wrong))
    if job.refusal is not None or job.video is None:
        reason = ("no video", "none given") if job.refusal is None else (job.refusal.kind, job.refusal.reason)
        return failed(job, *reason, command)
    try:
        frames, video_frames = read_first_frames(job.video, command.count)
    except (OSError, ValueError, MemoryError) as error:
        return failed(job, "unreadable video", _in_words(error), command)
    try:
        estimate = _estimate(job, choice, frames, video_frames, _lens_of(command, frames, job.commanded.fov_deg))
    except ModuleNotFoundError:  # no fault of the clip: every one would fail, and a method would score 0 for it
        raise
    except Exception as error:  # of any library below
        record = failed(job, "estimator stopped", f"{type(error).__name__}: {error}", command)
        return replace(record, thumbnails=thumbnails(frames))
    record = _record(job, command, frames, video_frames, estimate)
    if not findings:
        return record
    doubt = Problem(job.method, str(job.clip), "doubtful path", _as_reason(job, findings))
    return replace(record, problems=(*record.problems, doubt))


def _as_reason(job: Job, findings: Iterable[Finding]) -> str:
    """What looks wrong with a commanded path, and what to do about it."""
    return f"{job.commanded.poses}: " + "; ".join(f"{one.message} ({one.hint})" for one in findings)


def _in_words(error: Exception) -> str:
    """Errors of ours say all there is; of others the kind says more than the text, which may be empty."""
    return str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"


def stopped(job: Job, reason: str) -> Record:
    """The record of a clip whose process died. Its command is read again: every pair of its frames is a miss."""
    try:
        return failed(job, "estimator stopped", reason, _command(job))
    except Exception as error:
        return failed(job, "unreadable poses", _in_words(error))


def _command(job: Job) -> Trajectory:
    command = job.commanded.trajectory()
    if command.count < 2:
        raise invalid(f"poses in {job.commanded.poses}", "at least two", command.count, "one pose is no motion")
    return command


def failed(job: Job, kind: str, reason: str, command: Trajectory | None = None) -> Record:
    problem = Problem(job.method, str(job.clip), kind, reason)
    if command is None:
        return failed_record(job.method, job.clip, problem)
    return failed_record(job.method, job.clip, problem, command.world_from_camera, command.is_metric)


def _lens_of(command: Trajectory, frames: Tensor, fov_deg: float | None) -> Lens | None:  # uint8 [T, H, W, 3]
    """The commanded lens for the size of the video, or a centred pinhole of a field of view."""
    height, width = frames.shape[1:3]
    if command.lens is not None:
        lens = picked(command.lens, torch.arange(len(frames))) if command.lens.batch_shape else command.lens
        return resized(lens, width, height)
    if fov_deg is None:
        return None
    focal = 0.5 * width / math.tan(math.radians(fov_deg) / 2)
    return Pinhole(focal, focal, width / 2, height / 2, width, height)


def _estimate(job: Job, choice: EstimatorChoice, frames: Tensor, video_frames: int, lens: Lens | None) -> PoseEstimate:
    if job.estimate is None:
        estimate = built(choice)(frames, lens)
    else:
        estimate = PrecomputedEstimator(job.estimate, video_frames=video_frames)(frames, lens)
        estimate = replace(estimate, name="precomputed")
    second = choice.second
    return checked(estimate, frames, None if second is None else lambda: built(second)(frames, lens))


def _record(job: Job, command: Trajectory, frames: Tensor, video_frames: int, estimate: PoseEstimate) -> Record:
    """Frames that the video does not have are frames without a pose."""
    count, clip = command.count, str(job.clip)
    recovered = torch.eye(4, dtype=torch.float64).repeat(count, 1, 1)
    valid = torch.zeros(count, dtype=torch.bool)
    recovered[: len(frames)], valid[: len(frames)] = estimate.world_from_camera, estimate.valid
    found = [*_other_rate(command, job.video), *_found(command, frames, video_frames, estimate)]
    problems = [Problem(job.method, clip, kind, reason) for kind, reason in found]
    return Record(
        method=job.method,
        clip=job.clip,
        commanded=command.world_from_camera,
        recovered=recovered,
        valid=valid,
        is_metric=estimate.is_metric and command.is_metric,
        command_is_metric=command.is_metric,
        estimator=estimate.name,
        **{name: getattr(estimate, name) for name in ("weights_sha256", "note", "inliers", "check", "doubt")},
        problems=tuple(problems),
        thumbnails=thumbnails(frames),
    )


def _other_rate(command: Trajectory, video: Path | None) -> Iterator[tuple[str, str]]:
    """Frame i is compared with pose i. Where both say their times and these differ, that is not the same moment."""
    times_s = command.timestamps_s
    if times_s is None or video is None or times_s[-1] <= times_s[0]:  # times that run backwards are named elsewhere
        return
    poses_hz = (command.count - 1) / float(times_s[-1] - times_s[0])
    frames_hz, _, _ = rate_and_size(video)
    if abs(frames_hz / poses_hz - 1.0) > RATE_TOLERANCE:
        reason = f"the video has {frames_hz:.3g} frames per second, the path {poses_hz:.3g} poses"
        yield "other frame rate", f"{reason}: frame and pose of one number are not of one moment"


def _found(
    command: Trajectory, frames: Tensor, video_frames: int, estimate: PoseEstimate
) -> Iterator[tuple[str, str]]:  # kind and reason of every problem
    if video_frames != command.count:
        kind = "fewer frames" if video_frames < command.count else "more frames"
        yield kind, f"the video has {video_frames} frames, the path {command.count} poses"
    height, width = frames.shape[1:3]
    lens = command.lens
    if lens is not None and not has_ratio(lens, width, height):
        yield "other shape", f"the video is {height}×{width}, the lens of the path is of {lens.height}×{lens.width}"
    if is_small(estimate.name, frames) and not estimate.doubt:
        yield "small frames", f"{height}×{width}: {estimate.name} is often wrong below {SMALL_PX} pixels"
    found = int(estimate.valid.sum())
    if found < max(len(frames), 2):
        kind = "recovery failed" if found < 2 else "partial recovery"
        reason = f"{found} of {len(frames)} frames have a pose"
        yield kind, f"{reason} ({estimate.note})" if estimate.note else reason
    if estimate.doubt:
        yield "not trusted", estimate.doubt
    elif estimate.check.startswith(UNCHECKED):
        yield "not checked", estimate.check

"""FID and FVD of folders of videos against reference videos, one video in memory at a time; fidelity.json.

The statistics of every folder are kept under `out`/statistics by detector, prefix and content of the videos. A run that
is interrupted goes on with the folder it was at, and the reference is passed through a detector once.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from merope.draw.progress import ProgressLine
from merope.errors import invalid
from merope.evaluate.detectors import (
    I3D_HINT,
    INCEPTION_HINT,
    PREFIX_FRAMES,
    Detector,
    FrechetResult,
    feature_statistics,
    fid,
    fvd,
)
from merope.evaluate.discover import printable, video_places
from merope.evaluate.frechet import FeatureSource, FrechetStatistics
from merope.formats.parts import Part, forget_parts, note_finished, part_folder, say_lost_parts
from merope.formats.video import read_first_frames
from merope.formats.writing import replace_tensors, replace_text

FORMAT = "merope-fidelity-1"


@dataclass(frozen=True)
class MethodFidelity:
    """Distances of one method's videos to the reference, and the videos that are in neither."""

    folder: str
    scores: Mapping[str, FrechetResult]  # "fid", "fvd"
    unreadable: Mapping[str, str]  # video by its place below the folder -> reason


@dataclass(frozen=True)
class Fidelity:
    """How close the videos of every method are to reference videos."""

    reference: str  # a folder, or a file of statistics
    reference_unreadable: Mapping[str, str]  # as of a method
    methods: Mapping[str, MethodFidelity]

    @property
    def left_out(self) -> list[str]:
        """Every video that could not be read, as a line for people."""
        sets = [("reference", self.reference_unreadable)]
        sets += [(name, method.unreadable) for name, method in self.methods.items()]
        return [f"{name}: {clip}: {reason}" for name, clips in sets for clip, reason in clips.items()]


def fidelity(
    methods: Mapping[str, Path],  # name -> folder of videos
    reference: Path,  # a folder of videos, or statistics of one detector
    detectors: Sequence[Detector],
    out: Path,
    prefix_frames: int = PREFIX_FRAMES,
    part: Part | None = None,
) -> Fidelity | None:
    """FID with a detector of frames, FVD with one of clips, for every method; writes fidelity.json to `out`.

    The first `prefix_frames` of all videos, reference included, are left out. Everything that can be wrong with the
    videos is found before a detector runs.
    part: pass only these videos through the detectors and return None; a call without a part does the rest.
    """
    _check(methods, reference, detectors, prefix_frames)
    real = _given_statistics(reference, detectors) if reference.is_file() else look_through("reference", reference)
    generated = [look_through(name, folder) for name, folder in methods.items()]
    for detector in detectors:
        _check_comparable(generated, real, detector, prefix_frames)

    if part is not None:
        sets = [*([real] if isinstance(real, VideoSet) else []), *generated]
        for videos, detector in ((one, detector) for detector in detectors for one in sets):
            _keep_features(videos, detector, prefix_frames, out, part)
        note_finished(out, part)
        return None
    say_lost_parts(out)
    scores: dict[str, dict[str, FrechetResult]] = {name: {} for name in methods}
    for detector in detectors:
        score = fid if detector.is_per_frame else fvd
        against = _statistics(real, detector, prefix_frames, out)
        for videos in generated:
            own = _statistics(videos, detector, prefix_frames, out)
            scores[videos.name][score.__name__] = score(own, against, detector)
    result = Fidelity(
        str(reference),
        real.unreadable if isinstance(real, VideoSet) else {},
        {one.name: MethodFidelity(str(one.folder), scores[one.name], one.unreadable) for one in generated},
    )
    write_fidelity(result, out / "fidelity.json")
    forget_parts(out)
    return result


def _check(methods: Mapping[str, Path], reference: Path, detectors: Sequence[Detector], prefix_frames: int) -> None:
    if not detectors:
        raise invalid("detectors", "given", "none", f"for FID {INCEPTION_HINT}; for FVD {I3D_HINT}")
    if prefix_frames < 0:
        raise invalid("prefix_frames", "0 or more", prefix_frames, "the paper's clips begin with 9 given frames")
    for name, folder in methods.items():
        if not folder.is_dir():
            raise invalid(f"videos of {name}", "a folder", f"{folder}, which is none", "check the path")
    if not reference.is_dir() and not (reference.is_file() and reference.suffix == ".npz"):
        fix = "pass real videos, or a file of an earlier run's statistics folder"
        raise invalid("reference", "a folder of videos or a file of statistics (.npz)", reference, fix)


def _given_statistics(file: Path, detectors: Sequence[Detector]) -> FrechetStatistics:
    """Statistics that were saved before; they are of one detector, and other files give other features."""
    given = FrechetStatistics.load(file)
    made_by = given.source.detector, given.source.weights_sha256, given.source.resize
    for one in detectors:
        if made_by != (one.name, one.weights_sha256, one.resize):
            fix = "pass only the detector file that made them, or the reference videos"
            raise invalid(f"reference {file}", f"statistics by {one.name} {one.weights_sha256}", made_by, fix)
    return given


@dataclass(frozen=True)
class VideoSet:
    """The videos below a folder that can be read, all of the same length, and those that cannot."""

    name: str
    folder: Path
    clips: tuple[str, ...]  # places below the folder
    frames: int  # of every clip
    sha256: str  # of their contents, in this order
    unreadable: Mapping[str, str]  # place -> reason

    def videos(self, doing: str) -> Iterator[Tensor]:  # each uint8 [T, H, W, 3]
        """One after the other, with progress."""
        for clip in _with_progress(self.clips, f"{doing}: {self.name}"):
            yield read_first_frames(self.folder / clip, self.frames)[0]


def look_through(name: str, folder: Path) -> VideoSet:
    """Decode every video once, which is quick beside a detector: what cannot be read or compared is known at once."""
    frames: dict[str, int] = {}
    unreadable: dict[str, str] = {}
    digest = hashlib.sha256()
    for clip in _with_progress(video_places(folder), f"looking through: {name}"):
        try:
            _, frames[clip] = read_first_frames(folder / clip, 1)
        except (OSError, ValueError) as error:
            unreadable[clip] = str(error)
            print(f"{name}: left out: {error}", file=sys.stderr)
            continue
        with (folder / clip).open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    if not frames:
        got = f"none of {len(unreadable)} in {folder}"
        raise invalid(f"videos of {name}", "at least one that can be read", got, "check the folder")
    first = next(iter(frames))
    for clip, count in frames.items():
        if count != frames[first]:
            fix = "cut all videos to one length: features of different lengths do not compare"
            raise invalid(f"video {folder / clip}", f"{frames[first]} frames long like {first}", count, fix)
    return VideoSet(name, folder, tuple(frames), frames[first], digest.hexdigest(), unreadable)


def _check_comparable(
    generated: Sequence[VideoSet], real: VideoSet | FrechetStatistics, detector: Detector, prefix_frames: int
) -> None:
    """Every set has frames after the prefix and at least two features; for FVD all videos have one length."""
    for one in [*generated, *([real] if isinstance(real, VideoSet) else [])]:
        video, scored_frames = f"video {one.folder / one.clips[0]}", one.frames - prefix_frames
        if scored_frames < 1:
            fix = "pass a prefix of 0 if the videos have no given frames"
            raise invalid(video, f"longer than the prefix of {prefix_frames} frames", one.frames, fix)
        if len(one.clips) * (scored_frames if detector.is_per_frame else 1) < 2:
            raise invalid(f"{one.name} in {one.folder}", "two videos or more", 1, "one of them has no covariance")
        expected = real.frames - prefix_frames if isinstance(real, VideoSet) else real.source.frames
        if not detector.is_per_frame and scored_frames != expected:
            fix = "FVD compares videos of one length: cut them, or the reference"
            raise invalid(video, f"{prefix_frames} + {expected} frames long like the reference", one.frames, fix)


def _statistics(
    videos: VideoSet | FrechetStatistics, detector: Detector, prefix_frames: int, out: Path
) -> FrechetStatistics:
    """Of an earlier run if detector file, prefix and videos are the same, else made and kept."""
    if isinstance(videos, FrechetStatistics):
        return videos
    file = _statistics_file(videos, detector, prefix_frames, out)
    if file.is_file():
        print(f"{detector.name}: {videos.name}: as in an earlier run, {file}", file=sys.stderr)
        return FrechetStatistics.load(file)
    kept = _Remembering(detector, part_folder(out) / file.stem)
    made = feature_statistics(videos.videos(detector.name), kept, prefix_frames)
    made.save(file)
    print(f"{detector.name}: {videos.name}: wrote {file}", file=sys.stderr)
    return made


def _statistics_file(videos: VideoSet, detector: Detector, prefix_frames: int, out: Path) -> Path:
    parts = [detector.name, detector.weights_sha256, detector.resize, prefix_frames, videos.sha256]
    fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return out / "statistics" / f"{detector.name}-{fingerprint[:16]}.npz"


def _keep_features(videos: VideoSet, detector: Detector, prefix_frames: int, out: Path, part: Part) -> None:
    """Leave the features of a part's videos, one file each, for the run that joins them."""
    file = _statistics_file(videos, detector, prefix_frames, out)
    if file.is_file():
        return
    folder = part_folder(out) / file.stem
    missing = [place for place in part.own(range(len(videos.clips))) if _features_of(folder, place) is None]
    progress = ProgressLine(f"{detector.name}: {videos.name}", len(missing), "videos")
    for done, place in enumerate(missing, start=1):
        frames = read_first_frames(videos.folder / videos.clips[place], videos.frames)[0]
        replace_tensors(
            _features_file(folder, place), {"features": detector(frames[prefix_frames:]).cpu().contiguous()}
        )
        progress.show(done)


class _Remembering:
    """A detector that takes the features of the videos it is given, in their order, from parts that saw them before."""

    def __init__(self, detector: Detector, folder: Path) -> None:
        self.detector, self.folder, self.place = detector, folder, -1
        self.name, self.weights_sha256 = detector.name, detector.weights_sha256
        self.resize, self.is_per_frame = detector.resize, detector.is_per_frame

    def __call__(self, frames: Tensor) -> Tensor:  # uint8 [T, H, W, 3] -> [T or 1, d]
        self.place += 1
        kept = _features_of(self.folder, self.place)
        return self.detector(frames) if kept is None else kept


def _features_file(folder: Path, place: int) -> Path:
    return folder / f"{place:08d}.safetensors"


def _features_of(folder: Path, place: int) -> Tensor | None:
    """None where no part has made them, or the file is damaged."""
    try:
        return load_file(_features_file(folder, place))["features"]
    except (OSError, KeyError, SafetensorError):
        return None


def _with_progress(clips: Sequence[str], doing: str) -> Iterator[str]:
    progress = ProgressLine(doing, len(clips), "videos")
    for done, clip in enumerate(clips, start=1):
        yield clip
        progress.show(done)


def write_fidelity(result: Fidelity, file: Path) -> None:
    """All distances with what it takes to say them again."""
    document = {"format": FORMAT} | asdict(result)
    replace_text(file, printable(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"))


def read_fidelity(file: Path) -> Fidelity:
    """What `write_fidelity` wrote."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise KeyError(document["format"])
        methods = {
            name: MethodFidelity(
                one["folder"], {score: _score(value) for score, value in one["scores"].items()}, one["unreadable"]
            )
            for name, one in document["methods"].items()
        }
        return Fidelity(document["reference"], document["reference_unreadable"], methods)
    except (OSError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        fix = "make it with merope fidelity"
        raise invalid("fidelity", "a fidelity.json", f"{file} ({error!r})", fix) from error


def _score(value: Mapping[str, Any]) -> FrechetResult:
    return FrechetResult(**{**value, "source": FeatureSource(**value["source"])})


def as_text(result: Fidelity) -> str:
    """The distances with the sizes of the sets, and every video left out, for a terminal."""
    lines = []
    for name, method in result.methods.items():
        for score, value in method.scores.items():
            sizes = f"{value.count:,} against {value.reference_count:,}"
            unit = "frames" if value.source.frames == 1 else f"videos of {value.source.frames} frames"
            lines.append(f"{name}: {score.upper()} {value.distance:.3f} ({sizes} {unit})")
    lines += [f"cannot be read, {line}" for line in result.left_out]
    return "\n".join(lines)

"""Which clips there are: commanded paths and generated videos, matched by name.

A clip is named by its place below its folder without the suffix. The manoeuvre of the paper's protocol (each base
trajectory as original, left turn and right turn) is a sub-folder (`left/scene-0001.mp4`) or the end of the name
(`scene-0001_left.mp4`); both mean the same clip, and a bare name means the original.

`merope generate` writes clip.cameras.json beside clip.mp4: the path of `clip`. Its record clip.json is none.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, TypeVar

import torch

from merope.errors import invalid
from merope.formats import FORMATS, read
from merope.formats.checks import require_increasing_times
from merope.formats.colmap import is_model
from merope.formats.files import Sample, json_lines, load_json
from merope.formats.trajectory import Trajectory
from merope.world.commanded import MANOEUVRES

Found = TypeVar("Found")

VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".gif")
POSE_SUFFIXES = (".json", ".txt", ".csv", ".npy", ".tum", ".kitti")
CAMERAS_SUFFIX = ".cameras.json"  # what `merope generate` and the demo call the path of a clip
_NAME_WITH_MANOEUVRE = re.compile(rf"(?P<base>.+)[-_. ](?P<manoeuvre>{'|'.join(MANOEUVRES)})")


@dataclass(frozen=True, order=True)
class ClipName:
    """What a clip shows: its base trajectory and the manoeuvre, "" where names tell none."""

    base: str
    manoeuvre: str = ""

    def __post_init__(self) -> None:
        if not (isinstance(self.base, str) and isinstance(self.manoeuvre, str)):
            raise invalid("name of a clip", "text", (self.base, self.manoeuvre), "repair the manifest")

    def __str__(self) -> str:
        return f"{self.manoeuvre}/{self.base}" if self.manoeuvre else self.base

    @property
    def matching(self) -> "ClipName":
        """The name by which files find each other: a bare name and `original` are one."""
        return replace(self, manoeuvre="") if self.manoeuvre == "original" else self


@dataclass(frozen=True)
class Commanded:
    """Where the commanded path of a clip is: poses start, start + stride, … of a pose file, `frames` of them or all."""

    clip: ClipName
    poses: Path
    start: int = 0
    stride: int = 1
    frames: int | None = None
    options: tuple[tuple[str, Any], ...] = ()  # of the file's format, as `formats.read` takes them
    fov_deg: float | None = None  # horizontal, of the video, where the file has no lens

    def __post_init__(self) -> None:
        for name, least in (("start", 0), ("stride", 1), ("frames", 1)):
            value = getattr(self, name)
            if not (value is None and name == "frames") and (not isinstance(value, int) or value < least):
                raise invalid(f"{name} of {self.clip}", f"an int ≥ {least}", repr(value), "repair the manifest")

    def trajectory(self) -> Trajectory:
        """The commanded path of the clip."""
        whole = read(self.poses, **dict(self.options))
        require_increasing_times(whole, self.poses)
        rows = torch.arange(whole.count)[self.start :: self.stride][: self.frames]
        if len(rows) == 0 or (self.frames is not None and len(rows) < self.frames):
            expected = f"at least {self.start + self.stride * ((self.frames or 1) - 1) + 1}"
            raise invalid(f"poses in {self.poses}", expected, whole.count, "repair the manifest")
        return whole.at(rows)


@dataclass(frozen=True)
class Problem:
    """Something that kept a clip out of numbers, wholly or partly; every one is listed in every output."""

    method: str
    clip: str
    kind: str  # a key of HOW_COUNTED
    reason: str

    def __post_init__(self) -> None:
        texts = (self.method, self.clip, self.reason)
        if self.kind not in HOW_COUNTED or not all(isinstance(text, str) for text in texts):
            raise invalid("problem", f"of a kind among {list(HOW_COUNTED)}", self.kind, "recover the clip again")


_FAILED = "failed: in no mean, and every pair of its frames is a miss in the AUC"
_NO_COMMAND = "failed: in no number, as there is no path to compare with"
HOW_COUNTED: dict[str, str] = {
    "no video": _FAILED,
    "no estimate": _FAILED,
    "unreadable video": _FAILED,
    "estimator stopped": _FAILED + "; tried again by the next run",
    "recovery failed": _FAILED,
    "ambiguous name": _FAILED,
    "unreadable poses": _NO_COMMAND,
    "wrong path": "failed: in no number, as nothing can follow such a path; mend the pose file",
    "no trajectory": "not part of the test set: in no number",
    "fewer frames": "measured where half of the frames have a pose; missing frames count as frames without one",
    "more frames": "measured; frames beyond the commanded path are ignored",
    "partial recovery": "measured on the frames that have a pose, at least half; pairs with others are AUC misses",
    "too few poses": "failed: in no mean; in the AUC, pairs with a frame without a pose are misses",
    "undefined": "measured; not in the means of what is undefined; pairs without motion are misses in the AUC",
    "reversed motion": "measured; rot°, tr% and AUC cannot see it, CamMC and TransErr do",
    "static estimate": "measured; the recovered camera never moves",
    "not trusted": "in no mean and not in the AUC; counted apart",
    "not checked": "measured; no second estimator could confirm the poses",
    "small frames": "measured where a second estimator agrees",
    "doubtful path": "measured against the path as it is in the file; look at it",
    "other frame rate": "measured, frame by frame against the poses in their order; resample the path if that is wrong",
    "other shape": "measured; the lens is stretched to the shape of the video, which is wrong for a cropped one",
}
"""How each kind of problem counts in the results, in the words of the report."""


@dataclass(frozen=True)
class Job:
    """One commanded path and the video in which one method should follow it, or why there is none."""

    method: str
    commanded: Commanded
    video: Path | None
    estimate: Path | None = None  # a file with the recovered path, where recovery was done elsewhere
    refusal: Problem | None = None

    @property
    def clip(self) -> ClipName:
        return self.commanded.clip


def printable(text: str) -> str:
    """Text as UTF-8 can hold it. Names of files may hold bytes that it cannot: each becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


def clip_name(place: PurePath | str) -> ClipName:
    """The name of a file by its place below the folder, suffix already removed."""
    *folders, stem = PurePath(printable(str(place))).parts
    named = [folder for folder in folders if folder in MANOEUVRES]
    if named:
        rest = [folder for folder in folders if folder not in MANOEUVRES]
        return ClipName("/".join([*rest, stem]), named[0])
    match = _NAME_WITH_MANOEUVRE.fullmatch(stem)
    if match is None:
        return ClipName("/".join([*folders, stem]))
    return ClipName("/".join([*folders, match["base"]]), match["manoeuvre"])


def read_commanded(source: Path, options: Mapping[str, object] | None = None) -> list[Commanded]:
    """The commanded paths of a folder of pose files, or of a JSON-lines manifest; `options` go to their reader.

    A manifest row is {"id", "poses", "start", "stride", "frames", "manoeuvre"}, poses relative to the manifest; all but
    the first two are optional and other fields are left alone. In a folder every COLMAP model is one clip.
    """
    if source.is_file():
        found = _manifest(source)
    elif source.is_dir():
        found = [Commanded(name, file) for name, file in _files(source, POSE_SUFFIXES, models=True)]
    else:
        raise invalid(
            "commanded", "a folder of pose files or a manifest", f"{source}, which does not exist", "check it"
        )
    if not found:
        fix = f"put pose files ({', '.join(POSE_SUFFIXES)}) there, named like the videos"
        raise invalid("commanded", "at least one path", f"none in {source}", fix)
    given = tuple((options or {}).items())
    return _with_originals(sorted((replace(one, options=given) for one in found), key=lambda one: one.clip))


def _manifest(file: Path) -> list[Commanded]:
    _refuse_document(file)
    rows = []
    for place, row in json_lines(file):
        if "id" not in row or not isinstance(row.get("poses"), str):
            raise invalid(place, "an object with id and poses", str(row)[:120], "repair the manifest")
        name = clip_name(str(row["id"]))
        manoeuvre = str(row.get("manoeuvre", name.manoeuvre))
        chosen = {key: row[key] for key in ("start", "stride", "frames") if key in row}
        rows.append(Commanded(ClipName(name.base, manoeuvre), file.parent / row["poses"], **chosen))
    return rows


def _refuse_document(file: Path) -> None:
    """Refuse a file that is one JSON document, as a pose file is, and not the one row of a manifest."""
    try:
        document = load_json(file)
    except ValueError:
        return  # several rows, or damaged: left to the reader of manifests
    if not isinstance(document, dict) or "id" not in document:
        expected = "a folder of pose files or a JSON-lines manifest"
        fix = "put the file into a folder, named like its video"
        raise invalid("commanded", expected, f"{file}, which is one JSON document", fix)


def _files(folder: Path, suffixes: Iterable[str], models: bool = False) -> list[tuple[ClipName, Path]]:
    """Files of these kinds anywhere below a folder; with `models` also folders that hold a COLMAP model."""
    found, inside_models = [], set()
    for path in sorted(folder.rglob("*")):
        place = path.relative_to(folder)
        if any(part.startswith(".") for part in place.parts):
            continue
        if models and path.is_dir() and is_model({child.name for child in path.iterdir()}):
            found.append((clip_name(place), path))
            inside_models.add(path)
        elif path.suffix.lower() not in suffixes or inside_models & set(path.parents):
            continue
        elif path.is_file() and not _is_record(path):
            found.append((clip_name(_without_suffix(place)), path))
    return found


def video_places(folder: Path) -> list[str]:
    """Videos anywhere below a folder, but for hidden ones, by their places in it."""
    return [file.relative_to(folder).as_posix() for _, file in _files(folder, VIDEO_SUFFIXES)]


def _is_record(path: Path) -> bool:
    """Whether a file is what `merope generate` writes about a clip whose path stands beside it."""
    if path.suffix != ".json" or not path.with_name(path.stem + CAMERAS_SUFFIX).is_file():
        return False
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return False  # left to the reader of poses, which says what is wrong
    return isinstance(content, dict) and {"settings", "versions", "wall_s"} <= content.keys()


def _without_suffix(place: PurePath) -> PurePath:
    if place.name.endswith(CAMERAS_SUFFIX) and place.name != CAMERAS_SUFFIX:
        return place.with_name(place.name.removesuffix(CAMERAS_SUFFIX))
    return place.with_suffix("")


def _with_originals(found: list[Commanded]) -> list[Commanded]:
    """Where a base has turned variants, its bare name is the original."""
    turned = {one.clip.base for one in found if one.clip.manoeuvre}
    return [
        replace(one, clip=ClipName(one.clip.base, "original"))
        if one.clip.base in turned and not one.clip.manoeuvre
        else one
        for one in found
    ]


def match(
    commanded: Sequence[Commanded],
    methods: Mapping[str, Path],  # name -> folder of videos
    estimates: Path | None = None,  # folder of recovered paths, with a sub-folder per method if there are several
) -> tuple[list[Job], list[Problem]]:
    """Every commanded path with every method's video of the same name, and the videos that nobody commanded."""
    jobs: list[Job] = []
    strays: list[Problem] = []
    wanted = _by_name((one.clip, one) for one in commanded)
    for method, folder in methods.items():
        if not folder.is_dir():
            raise invalid(f"videos of {method}", "a folder", f"{folder}, which is none", "check the path")
        videos = _by_name(_files(folder, VIDEO_SUFFIXES))
        recovered = None
        if estimates is not None:
            recovered = _by_name(_files(_own(estimates, method, len(methods)), POSE_SUFFIXES, models=True))
        for key, paths in wanted.items():
            jobs.append(_job(method, paths, videos.get(key, []), None if recovered is None else recovered.get(key, [])))
        for key in sorted(videos.keys() - wanted.keys()):
            reason = f"no commanded path for {', '.join(map(str, videos[key]))}"
            strays.append(Problem(method, str(key), "no trajectory", reason))
    return jobs, strays


def without_other_json(commanded: Iterable[Commanded], methods: Mapping[str, Path]) -> list[Commanded]:
    """The paths of a folder without its JSON files that are something else, such as results; each is named."""
    filmed = {name.matching for folder in methods.values() for name, _ in _files(folder, VIDEO_SUFFIXES)}
    kept = []
    for one in commanded:
        if one.clip.matching in filmed or not _is_other_json(one.poses):
            kept.append(one)
        else:
            print(f"{one.poses} is no pose file, and no video has its name: left alone", file=sys.stderr)
    return kept


def _is_other_json(path: Path) -> bool:
    if path.suffix.lower() != ".json":
        return False
    try:
        sample = Sample(document=json.loads(path.read_text(encoding="utf-8-sig")))
    except (OSError, ValueError, RecursionError):
        return False  # damaged: left to the reader of poses, which says what is wrong
    return not any(format.matches(sample) for format in FORMATS.values())


def _by_name(named: Iterable[tuple[ClipName, Found]]) -> dict[ClipName, list[Found]]:
    groups: dict[ClipName, list[Found]] = defaultdict(list)
    for name, item in named:
        groups[name.matching].append(item)
    return dict(groups)


def _own(estimates: Path, method: str, methods: int) -> Path:
    own = estimates / method
    if methods > 1 and not own.is_dir():
        raise invalid(
            "estimates", f"a folder with a sub-folder {method!r}", str(estimates), "one sub-folder per method"
        )
    return own if own.is_dir() else estimates


def _job(method: str, paths: list[Commanded], videos: list[Path], recovered: list[Path] | None) -> Job:
    def refused(kind: str, reason: str) -> Job:
        return Job(method, paths[0], None, refusal=Problem(method, str(paths[0].clip), kind, reason))

    for what, files in (("paths", [one.poses for one in paths]), ("videos", videos), ("estimates", recovered or [])):
        if len(files) > 1:
            return refused("ambiguous name", f"{len(files)} {what} have this name: {', '.join(map(str, files))}")
    if not videos:
        return refused("no video", f"no video of this name for {paths[0].poses}")
    if recovered == []:
        return refused("no estimate", f"no recovered path of this name for {videos[0]}")
    return Job(method, paths[0], videos[0], recovered[0] if recovered else None)

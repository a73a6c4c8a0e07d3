"""From a folder of videos without poses to a training set: pieces of one rate and size, with poses in metres.

    settings.json           what decides the content; a folder of something else is not added to
    lens.json               the lens of all videos, where it was estimated
    videos/<piece>.mp4      frames of a piece at the rate and size of training
    poses/<piece>.json      their cameras in our JSON: metres, lens, times
    pieces/<piece>.json     whether a piece was kept, its scale, or why it was left out
    train.jsonl, val.jsonl  clips, as data.kind = "videos" reads them
    curation/               manifest of their clusters

A piece is a few seconds of a video, recovered together: it has one scale. Its files are complete before its record is
written, so a run that was stopped goes on with the next piece. A video that cannot be read, or an estimator that stops,
ends no run: the record says so, and the next run tries again.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby, islice
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from merope.curation.path_tables import PathTable, curate_table
from merope.datasets.footage_pieces import FromVideos, Piece, pieces
from merope.datasets.metric_scale import height_above_road, logged_way, path_length, read_speed_log
from merope.datasets.videos import VideoSource, read_video_rows
from merope.draw.progress import show_line
from merope.errors import invalid
from merope.formats import read, validate, write
from merope.formats.trajectory import Trajectory
from merope.formats.video import rate_and_size, write_video
from merope.formats.writing import replace_text, replacing
from merope.geometry.lens_batches import has_ratio, picked, resized
from merope.geometry.lenses import Lens, Pinhole, parameters

SUFFIXES = (".mp4", ".mov", ".m4v", ".mkv", ".avi", ".webm")
CALIBRATED = 5  # pieces that an unknown lens is estimated from
LEAST_WAY_M = 1.0  # of a piece: less says nothing about scale
STILL = 1e-3  # of the distance of its points, or of 1 where there are none: a path that is shorter does not move


class Recovered(Protocol):
    """What an estimator finds in the T frames of a piece (`merope.evaluate.estimators`)."""

    @property
    def world_from_camera(self) -> Tensor: ...  # [T, 4, 4]
    @property
    def valid(self) -> Tensor: ...  # bool [T]
    @property
    def is_metric(self) -> bool: ...
    @property
    def name(self) -> str: ...  # of the estimator
    @property
    def note(self) -> str: ...  # why frames are missing
    @property
    def doubt(self) -> str: ...  # why the poses should not be believed, if so
    @property
    def lens(self) -> Lens | None: ...  # what was found where none was given
    @property
    def points(self) -> Tensor | None: ...  # [N, 3] of the scene


class Recover(Protocol):
    """Recovers the cameras of a piece."""

    def __call__(self, piece: str, frames: Tensor, lens: Lens | None, /) -> Recovered | None:
        """None: not yet, as the answer of another program is still to come."""


def training_set(
    videos: Path,
    out: Path,
    settings: FromVideos,
    recover: Recover,
    lens: Lens | None = None,  # of all videos
    about: str = "",  # how poses are recovered, in any words that tell it
    calibrate: bool = False,  # whether an unknown lens is first estimated from a few pieces, for all
) -> list[dict[str, Any]]:  # the record of every piece
    """Make the training set, or go on with it."""
    files = _files(videos, settings)
    _begin(out, {**asdict(settings), "recovered_by": about})
    if lens is None and calibrate:
        lens = _estimated_lens(files, out, settings, recover)
    records: list[dict[str, Any]] = []
    for file in files:
        records += _of_video(file, out, settings, recover, lens)
    _write_clips(out, settings, records)
    replace_text(out / "report.json", json.dumps(records, indent=1) + "\n")
    return records


def size_of_videos(videos: Path) -> tuple[int, int]:  # width, height
    """Of the first video of a folder that can be read."""
    for file in _videos(videos):
        with suppress(ValueError):
            return rate_and_size(file)[1:]
    raise invalid(str(videos), "a folder with videos", "none that can be decoded", "check the files")


def _files(videos: Path, settings: FromVideos) -> list[Path]:
    """The videos of a folder. What is missing or wrong beside them is said before hours of work."""
    files = _videos(videos)
    logs = [] if settings.speed_logs is None else [_speed_log(settings.speed_logs, file.stem) for file in files]
    if missing := [log.name for log in logs if not log.is_file()]:
        fix = "add it, or take its video out of the folder"
        raise invalid(str(settings.speed_logs), "a log for every video", f"no {missing[0]}", fix)
    for log in logs:
        read_speed_log(log)
    return files


def _videos(videos: Path) -> list[Path]:
    files = sorted(file for file in videos.iterdir() if file.suffix.lower() in SUFFIXES and file.name[0] != ".")
    stems = [file.stem for file in files]
    if not files or len(set(stems)) < len(stems):
        got = "two of one name" if files else f"none that end in {', '.join(SUFFIXES)}"
        raise invalid(str(videos), "a folder with videos of different names", got, "check the folder")
    return files


def _begin(out: Path, settings: dict[str, Any]) -> None:
    file, text = out / "settings.json", json.dumps(settings, indent=1, default=str) + "\n"
    if file.exists() and file.read_text(encoding="utf-8") != text:
        raise invalid(str(out), "a folder of the same settings", f"other ones in {file}", "name another folder")
    if out.exists() and any(out.iterdir()) and not file.exists():
        raise invalid(str(out), "a new folder, or one to go on with", "other files", "name another folder")
    replace_text(file, text)


def _estimated_lens(files: Sequence[Path], out: Path, settings: FromVideos, recover: Recover) -> Lens | None:
    """One lens for the videos of one camera: the median of what a few pieces say. A straight drive says little."""
    file = out / "lens.json"
    if file.exists():
        return read(file).lens
    each, focals, size = -(-CALIBRATED // len(files)), list[float](), (settings.width, settings.height)
    for video in files[:: -(-len(files) // CALIBRATED)]:
        for piece in islice(_pieces(video, settings, []), each):
            show_line(f"{piece.name}: looking for the lens")
            try:
                found = _recovered(recover, piece, None)
            except _NotYet:
                continue
            if found.lens is not None and int(found.valid.sum()) > 1:
                focals += (parameters(found.lens)["fx"] / found.lens.width).flatten().tolist()[:1]
                size = (piece.frames.shape[2], piece.frames.shape[1])
    if not focals:
        return None
    width, height = size
    focal = median(focals) * width
    fov_deg = [round(math.degrees(2 * math.atan(0.5 / each))) for each in (median(focals), max(focals), min(focals))]
    say = "the lens sees {}° across; {} pieces say {}° to {}°"
    show_line(say.format(fov_deg[0], len(focals), *fov_deg[1:]), keep=True)
    lens = Pinhole(focal, focal, width / 2, height / 2, width, height)
    with replacing(file) as part:
        write(Trajectory(torch.eye(4, dtype=torch.float64)[None], True, "estimated", lens=lens), part)
    return lens


def _of_video(file: Path, out: Path, settings: FromVideos, recover: Recover, lens: Lens | None) -> list[dict[str, Any]]:
    """The records of all pieces of a video. One that is done is not read again; pieces that failed are tried again."""
    whole = out / "pieces" / f"{file.stem}.done.json"
    if whole.exists():
        return json.loads(whole.read_text(encoding="utf-8"))
    records, unreadable, is_done = [], list[str](), True
    for piece in _pieces(file, settings, unreadable):
        done = out / "pieces" / f"{piece.name}.json"
        if done.exists():
            records.append(json.loads(done.read_text(encoding="utf-8")))
            continue
        show_line(f"{piece.name}: {len(piece.frames)} frames")
        try:
            record = _of_piece(piece, out, settings, recover, lens)
            replace_text(done, json.dumps(record, indent=1) + "\n")
        except _NotYet as reason:
            is_done = False
            record = {"piece": piece.name, "kept": False, "reason": str(reason)}
        records.append(record)
    records += [{"piece": file.stem, "kept": False, "reason": reason} for reason in unreadable]
    if is_done and not unreadable:
        replace_text(whole, json.dumps(records, indent=1) + "\n")
    return records


def _pieces(file: Path, settings: FromVideos, unreadable: list[str]) -> Iterator[Piece]:
    """The pieces of a video as far as it can be read; what stands in the way is added to `unreadable`."""
    try:
        yield from pieces(file, settings)
    except ValueError as error:
        unreadable.append(str(error))


def _of_piece(piece: Piece, out: Path, settings: FromVideos, recover: Recover, lens: Lens | None) -> dict[str, Any]:
    """Recover a piece and write it, if it can be believed. Whatever is wrong with it is in its record."""
    left_out: dict[str, Any] = {"piece": piece.name, "kept": False}
    if len(piece.frames) < settings.frames:
        return left_out | {"reason": f"{len(piece.frames)} frames, a clip has {settings.frames}"}
    height, width = piece.frames.shape[1:3]
    if lens is not None and not has_ratio(lens, width, height):
        got = f"frames of {width}×{height}, and the lens is of {lens.width}×{lens.height}"
        return left_out | {"reason": f"{got}: make a set of its own of videos with sides in another ratio"}
    known = None if lens is None else resized(lens, width, height)
    found = _recovered(recover, piece, known)
    run, seen = _longest_run(found.valid), known if known is not None else found.lens
    if run.stop - run.start < settings.frames:
        return left_out | {"reason": f"poses of {run.stop - run.start} frames in a row; {found.note}".rstrip("; ")}
    if found.doubt:
        return left_out | {"reason": found.doubt}
    if seen is None:
        return left_out | {"reason": f"{found.name} says no lens: pass --fov or --lens"}
    poses = found.world_from_camera[run]
    try:
        scale = _scale(piece, poses, found, run, settings)
    except _Unknown as error:
        return left_out | {"reason": str(error)}
    path = _in_metres(piece, poses, scale, seen, run, settings)
    way_m = path_length(path.world_from_camera, settings.fps)
    if way_m < LEAST_WAY_M:
        return left_out | {"reason": f"a way of {way_m:.2g} m says nothing about scale"}
    findings = validate(path)
    if any(finding.severity == "error" for finding in findings):
        return left_out | {"reason": "; ".join(finding.message for finding in findings)}
    _write_piece(piece, out, path, run, settings)
    about = {"frames": path.count, "first_frame": run.start, "scale": scale, "way_m": round(way_m, 3)}
    notes = [note for note in (found.note, *(finding.message for finding in findings)) if note]
    return {"piece": piece.name, "video": piece.video, "kept": True, **about, "by": found.name, "notes": notes}


def _recovered(recover: Recover, piece: Piece, lens: Lens | None) -> Recovered:
    try:
        found = recover(piece.name, piece.frames, lens)
    except ModuleNotFoundError:  # no fault of the piece
        raise
    except Exception as error:  # of any library below
        raise _NotYet(f"the estimator stopped: {type(error).__name__}: {error}") from error
    if found is None:
        raise _NotYet("waits for its estimate")
    return found


class _NotYet(Exception):
    """Why a piece has no estimate; the next run asks again."""


class _Unknown(Exception):
    """A scale that a piece does not tell."""


def _speed_log(folder: Path, video: str) -> Path:
    return folder / f"{video}.csv"


def _scale(piece: Piece, poses: Tensor, found: Recovered, run: slice, settings: FromVideos) -> float:
    """Metres per unit of the estimate."""
    length = path_length(poses, settings.fps)
    size = 1.0 if found.points is None else float(found.points.sub(poses[0, :3, 3]).norm(dim=-1).median())
    if length < STILL * size:
        raise _Unknown("the camera stands still")
    if settings.camera_height_m is not None:
        height = None if found.points is None else height_above_road(poses, found.points)
        if height is None:
            raise _Unknown(f"{found.name} sees no road below the camera: give the speed instead")
        return settings.camera_height_m / height
    start_s, seconds = piece.start_s + run.start / settings.fps, (len(poses) - 1) / settings.fps
    if settings.speed_m_s is not None:
        return settings.speed_m_s * seconds / length
    if settings.speed_logs is not None:
        try:
            return logged_way(_speed_log(settings.speed_logs, piece.video), start_s, start_s + seconds) / length
        except ValueError as error:  # the log does not cover this piece
            raise _Unknown(str(error)) from None
    if not found.is_metric:
        raise _Unknown(f"{found.name} knows no metres: give a speed or the height of the camera")
    return 1.0


def _in_metres(piece: Piece, poses: Tensor, scale: float, lens: Lens, run: slice, settings: FromVideos) -> Trajectory:
    poses = poses.clone()
    poses[:, :3, 3] *= scale
    own = picked(lens, torch.arange(run.start, run.stop)) if lens.batch_shape else lens
    times_s = torch.arange(len(poses), dtype=torch.float64) / settings.fps
    scaled = resized(own, settings.width, settings.height)
    return Trajectory(poses, True, "merope data from-videos", times_s, scaled, name=piece.name)


def _write_piece(piece: Piece, out: Path, path: Trajectory, run: slice, settings: FromVideos) -> None:
    images = piece.frames[run].movedim(-1, 1)
    size = (settings.height, settings.width)
    scaled = [interpolate(image[None].float(), size, mode="bilinear", antialias=True)[0] for image in images]
    frames = torch.stack([image.round().clamp(0, 255).to(torch.uint8) for image in scaled]).movedim(1, -1)
    with replacing(out / "videos" / f"{piece.name}.mp4") as part:
        write_video(frames.contiguous(), part, settings.fps)
    with replacing(out / "poses" / f"{piece.name}.json") as part:
        write(path, part)


def _longest_run(valid: Tensor) -> slice:  # bool [T]
    """The longest run of frames with a pose, the first of them where there are several."""
    runs = [list(run) for is_valid, run in groupby(range(len(valid)), valid.tolist().__getitem__) if is_valid]
    longest = max(runs, key=len, default=[])
    return slice(longest[0], longest[-1] + 1) if longest else slice(0, 0)


def _write_clips(out: Path, settings: FromVideos, records: Sequence[dict[str, Any]]) -> None:
    """Lists of clips: those of the last video are for validation where there are several. Then the clusters of all."""
    kept = [record for record in records if record["kept"]]
    rows = {record["video"]: list[dict[str, Any]]() for record in kept}
    for record in kept:
        name = record["piece"]
        files = {"video": f"videos/{name}.mp4", "poses": f"poses/{name}.json", "caption": ""}
        for start in range(0, record["frames"] - settings.frames + 1, settings.step):
            rows[record["video"]].append({"id": f"{name}-{start:04d}", **files, "start": start, "stride": 1})
    held_out = list(rows)[-1:] if len(rows) > 1 else []
    lists = {
        "train.jsonl": [row for video, own in rows.items() if video not in held_out for row in own],
        "val.jsonl": [row for video in held_out for row in rows[video]],
    }
    for name, clips in lists.items():
        replace_text(out / name, "".join(json.dumps(clip) + "\n" for clip in clips))
    if lists["train.jsonl"]:
        size = {"height": settings.height, "width": settings.width}
        source = VideoSource(read_video_rows(out / "train.jsonl"), out, settings.frames, **size)
        table = PathTable([source.name(index) for index in range(len(source))], source.trajectory)
        curate_table(table, out / "curation", clusters=min(256, len(source)))

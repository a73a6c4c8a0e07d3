"""`merope path`: make a camera path from a few numbers, or bring one into another format."""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from merope.commands.models import key_and_value, require_files, user_path

if TYPE_CHECKING:
    from torch import Tensor

    from merope.formats.trajectory import Trajectory

FORMATS_BY_SUFFIX = {".json": "merope", ".txt": "tum", ".npy": "panshot", "": "colmap"}
BIRDSEYE_PX = 480
EXAMPLES = {
    "straight": "path.json --speed 8",
    "turn": "path.json --speed 8 --yaw-rate 12",
    "shift": "path.json --offset 3.5",
    "stop": "path.json --stop 2",
    "keys": "path.json --keys w*40",
    "convert": "poses.txt path.json",
}


def add_path(parser: argparse.ArgumentParser) -> None:
    whats = parser.add_subparsers(dest="what", required=True, metavar="what")
    straight = whats.add_parser("straight", help="straight on at a constant speed")
    turn = whats.add_parser("turn", help="straight on, then a circle")
    shift = whats.add_parser("shift", help="straight on, then a change of lanes")
    stop = whats.add_parser("stop", help="brake to a stop, stand, and go on")
    keys = whats.add_parser("keys", help="as the keys of a game say it: w, a, s and d")
    parser.epilog = "e.g. merope path turn path.json --speed 8 --yaw-rate 12"
    for drive in (straight, turn, shift, stop, keys):
        _add_drive(drive)
        drive.set_defaults(run=_make)
    for drive in (straight, turn, shift, stop):
        drive.add_argument("--seconds", type=float, default=4.0, help="of the whole path (%(default)g)")
    for drive in (turn, shift, stop):
        drive.add_argument("--start", type=float, default=0.75, metavar="SECONDS", help="straight on before (0.75)")
    how_sharp = turn.add_mutually_exclusive_group(required=True)
    how_sharp.add_argument("--yaw-rate", type=float, metavar="DEGREES/S", help="positive to the right")
    how_sharp.add_argument("--radius", type=float, metavar="METRES", help="positive to the right")
    shift.add_argument("--offset", type=float, required=True, metavar="METRES", help="positive to the right")
    stop.add_argument("--stop", type=float, default=1.0, metavar="SECONDS", help="how long it stands (1)")
    stop.set_defaults(seconds=12.0)
    keys.add_argument("--keys", required=True, help='such as "w*40 a*10 w*40", one step per frame (docs/formats.md)')
    keys.add_argument("--yaw-rate", type=float, default=15.0, metavar="DEGREES/S", help="of a and d (15)")
    convert = whats.add_parser("convert", help="write a pose file in another format")
    convert.add_argument("path", type=user_path, help="pose file or folder (docs/formats.md)")
    convert.add_argument("--from", dest="source_format", metavar="FORMAT", help="where the content fits several")
    convert.add_argument(
        "--option", action="append", default=[], type=key_and_value, metavar="KEY=VALUE", help="of the format read"
    )
    convert.add_argument("--assume-metric", action="store_true", help="the path is in metres, whatever its format says")
    convert.set_defaults(run=_convert)
    for what in (straight, turn, shift, stop, keys, convert):
        what.add_argument("out", type=user_path, help=".json, .txt (tum), .npy (panshot) or a folder (colmap)")
        what.add_argument("--format", metavar="FORMAT", help="another one of docs/formats.md")
        what.add_argument("--picture", action="store_true", help="also draw it from above, as OUT.birdseye.png")
    for word, what in whats.choices.items():
        what.epilog = f"e.g. merope path {word} {EXAMPLES[word]}"


def _add_drive(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--speed", type=float, default=8.0, metavar="M/S", help="metres per second (8)")
    parser.add_argument("--fps", type=float, default=12.0, help="poses per second (12)")
    parser.add_argument("--fov", type=float, default=70.0, metavar="DEGREES", help="horizontal field of view (70)")
    parser.add_argument("--xi", type=float, default=0.0, help="of a unified (fisheye) camera (0, a pinhole)")
    parser.add_argument("--size", type=int, nargs=2, default=(288, 512), metavar=("HEIGHT", "WIDTH"), help="(288 512)")


def _drive(options: argparse.Namespace) -> "Tensor":  # [T, 4, 4]
    from merope.errors import invalid
    from merope.formats.key_strings import poses_from_keys
    from merope.geometry.drives import shifting_drive, stop_and_go_drive, straight_drive, turning_drive

    if options.what == "keys":
        return poses_from_keys(options.keys, options.fps, options.speed, options.yaw_rate)
    if options.what == "straight":
        return straight_drive(options.speed, options.seconds, options.fps)
    timing = (options.start, options.seconds, options.fps)
    if options.what == "shift":
        return shifting_drive(options.speed, options.offset, *timing)
    if options.what == "stop":
        return stop_and_go_drive(options.speed, options.stop, *timing)
    if options.radius == 0.0:
        raise invalid("radius", "positive (to the right) or negative", 0, "pass the radius of the circle in metres")
    yaw_rate_rad_s = options.speed / options.radius if options.yaw_rate is None else math.radians(options.yaw_rate)
    return turning_drive(options.speed, yaw_rate_rad_s, *timing)


def _make(options: argparse.Namespace) -> int:
    import torch

    from merope.formats.trajectory import Trajectory
    from merope.generate.camera_path import lens_of_fov

    height, width = options.size
    lens = lens_of_fov(options.fov, options.xi, width, height)
    poses = _drive(options)
    times_s = torch.arange(len(poses), dtype=torch.float64) / options.fps
    convention = "made by merope path: camera-to-world, OpenCV axes, metres"
    _write(Trajectory(poses, True, convention, times_s, lens, name=options.out.stem), options)
    return 0


def _convert(options: argparse.Namespace) -> int:
    require_files(options, "path")
    from merope import formats

    is_metric = True if options.assume_metric else None
    path = formats.read(options.path, options.source_format, is_metric=is_metric, **dict(options.option))
    for finding in formats.validate(path):  # said, not refused: a conversion may be the first step of a repair
        print(f"warning: {options.path}: {finding.message}; {finding.hint}", file=sys.stderr)
    _write(path, options)
    return 0


def _write(path: "Trajectory", options: argparse.Namespace) -> None:
    """Write the path and its picture, and print what it is."""
    from merope import formats
    from merope.draw.birdseye import birdseye_image
    from merope.errors import invalid
    from merope.formats.video import write_image

    out: Path = options.out
    if options.format is None and out.suffix not in FORMATS_BY_SUFFIX:
        raise invalid("out", "a name that ends in .json, .txt or .npy, or a folder", str(out), "or pass --format")
    format = options.format or FORMATS_BY_SUFFIX[out.suffix]
    _check_out(out, getattr(options, "path", None), options.format is None)
    picture = birdseye_image({out.stem: path.world_from_camera}, BIRDSEYE_PX, BIRDSEYE_PX) if options.picture else None
    formats.write(path, out, format)
    lost = formats.lost_in(path, format)
    times_s, is_metric = None if "times" in lost else path.timestamps_s, path.is_metric and "unit" not in lost
    print(f"wrote {out}: {_described(replace(path, timestamps_s=times_s, is_metric=is_metric))}")
    if lost:
        fix = f"say it where {out} is read, or write .json"
        print(f"warning: {format} has no place for {' and '.join(lost)}: {fix}", file=sys.stderr)
    if picture is not None:
        write_image(picture, out.with_suffix(".birdseye.png"))
        print(f"wrote {out.with_suffix('.birdseye.png')}")


def _check_out(out: Path, source: Path | None, is_by_suffix: bool) -> None:
    """Refuse to replace what is read, and to write into a folder of other things that was named by mistake."""
    from merope.errors import invalid

    if source is not None and out.resolve() == source.resolve():
        raise invalid("out", "another file than the path", str(out), "choose another name")
    if is_by_suffix and out.is_dir() and any(out.iterdir()) and not (out / "cameras.txt").exists():
        fix = "name a new folder, or a file that ends in .json, .txt or .npy"
        raise invalid("out", "a new folder, or one with a COLMAP model in text", f"{out}, which holds other files", fix)


def _described(path: "Trajectory") -> str:
    import torch

    from merope.formats.checks import BACKWARD, travel
    from merope.geometry.drives import motion

    times_s, unit = path.timestamps_s, "m" if path.is_metric else "units"
    moved = motion(path.world_from_camera, torch.arange(path.count) if times_s is None else times_s)
    if times_s is None:
        return f"{path.count} poses without times, {moved.length_m:.4g} {unit} long"
    moves = travel(path.world_from_camera)
    backwards = ", driving backwards" if moves is not None and moves.along_axis < BACKWARD else ""
    return (
        f"{path.count} poses, {float(times_s[-1] - times_s[0]):.3g} s, {moved.length_m:.4g} {unit} long, top speed "
        f"{moved.top_speed_m_s:.3g} {unit}/s, largest yaw rate {math.degrees(moved.top_turn_rad_s):.3g}°/s"
        f"{backwards}"
    )

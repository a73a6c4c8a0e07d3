"""clips.json in a model's folder: what the clips that it makes are like, and how many denoising steps it wants.

Training writes it beside the weights; the demo and the benchmark read it. So they drive any model in the same way.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from merope.errors import invalid
from merope.formats.writing import replace_text
from merope.world.clips import WorldClips

CLIPS_FILE = "clips.json"
DEFAULT_STEPS = 4
"""Denoising steps where the file names none; that many suit the pixel-space models of the world benchmark."""

NEEDED = ("frames", "height", "width", "frame_rate_hz", "prefix_frames")
RANGES = ("fov_deg", "xi")
EXAMPLE = '{"frames": 49, "height": 144, "width": 256, "frame_rate_hz": 16, "prefix_frames": 9}'
FIX = f"write it like {EXAMPLE}"


def write_clips(folder: Path, clips: WorldClips, steps: int = DEFAULT_STEPS) -> None:
    """Say in a model's folder what it was trained on, of a rig the first view, and how many denoising steps to take."""
    given = asdict(clips.first_view())
    kept = {name: given[name] for name in (*NEEDED, *RANGES)} | {"steps": steps}
    replace_text(folder / CLIPS_FILE, json.dumps(kept, indent=1) + "\n")


def read_clips(folder: Path) -> tuple[WorldClips, int]:
    """The clips of a model and its denoising steps. A folder without the file has those of the world benchmark."""
    file = folder / CLIPS_FILE
    if not file.is_file():
        return WorldClips(), DEFAULT_STEPS
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise invalid(str(file), "JSON", f"{type(error).__name__}: {error}", FIX) from None
    if not isinstance(given, dict) or not set(NEEDED) <= set(given) <= {*NEEDED, *RANGES, "steps"}:
        got = sorted(given) if isinstance(given, dict) else type(given).__name__
        expected = f"an object with {', '.join(NEEDED)}, and if need be {', '.join(RANGES)}, steps"
        raise invalid(str(file), expected, got, FIX)
    counts = {name: _count(file, name, given[name]) for name in ("frames", "height", "width", "prefix_frames")}
    ranges = {name: _range(file, name, given[name]) for name in RANGES if name in given}
    rate_hz = _number(file, "frame_rate_hz", given["frame_rate_hz"])
    if not 0.0 < rate_hz <= 1000.0:
        raise invalid(f"frame_rate_hz in {file}", "positive and at most 1000", rate_hz, FIX)
    clips = WorldClips(**counts, frame_rate_hz=rate_hz, **ranges)  # type: ignore[arg-type]
    return clips, _count(file, "steps", given.get("steps", DEFAULT_STEPS))


def _count(file: Path, name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise invalid(f"{name} in {file}", "a whole number of at least 1", repr(value), FIX)
    return value


def _number(file: Path, name: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise invalid(f"{name} in {file}", "a number", repr(value), FIX)
    return float(value)


def _range(file: Path, name: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise invalid(f"{name} in {file}", "its lowest and highest value", repr(value), "write it like [70, 70]")
    return _number(file, name, value[0]), _number(file, name, value[1])

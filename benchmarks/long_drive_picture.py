"""Draws how a drive of a minute goes, and prints it as tables, from rows of benchmarks/long_drive.py.

    python benchmarks/long_drive_picture.py [--rows ROWS.json] [--out docs/images/long-drive.png]
        [--work outputs/long-drive --frames docs/images/long-drive-frames.webp]

One line for each setting, the mean over worlds. Errors are those of frames whose pose was found, so the share of these
stands beside them. With --frames also a sheet: a row for each setting, the frame in the middle of each window.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import long_drive
import matplotlib.pyplot as plt
from safetensors import safe_open
from torch import Tensor

Row = dict[str, Any]
Points = list[tuple[float, float]]  # seconds, value

PATHS = {"road": "one way, with a turn after some 25 s", "laps": "twice around a circle of 20 m"}
ERRORS = {
    "found, %": lambda rows: 100 * total(rows, "anchored_found") / total(rows, "anchored_frames"),
    "position error, m": lambda rows: weighted(rows, "anchored_position_m", "anchored_found"),
    "rotation error, °": lambda rows: weighted(rows, "anchored_rot_deg", "anchored_found"),
    "COLMAP registers, %": lambda rows: 100 * total(rows, "colmap_registered") / total(rows, "colmap_frames"),
}

DRAWN = ("position error, m", "rotation error, °", "COLMAP registers, %")


def total(rows: Sequence[Row], name: str) -> float:
    return sum(row[name] for row in rows)


def weighted(rows: Sequence[Row], name: str, by: str) -> float:
    """The mean over frames; nan where no frame has one."""
    known = [row for row in rows if row[name] is not None]
    return sum(row[name] * row[by] for row in known) / total(known, by) if known else float("nan")


def settings_of(report: Row, path: str) -> list[str]:
    """In the order in which they were driven."""
    names = dict.fromkeys(row["setting"] for row in report["drives"])
    return [name for name in names if name.startswith(f"{path}-")]


def errors(report: Row, setting: str, of_rows: Callable[[Sequence[Row]], float]) -> Points:
    """One point for each window, at its middle."""
    rows = [row for row in report["windows"] if row["setting"] == setting]
    starts = sorted({row["start_s"] for row in rows})
    return [(start, of_rows([row for row in rows if row["start_s"] == start])) for start in starts]


def picture_errors(report: Row, setting: str, name: str) -> Points:
    """PSNR of every second, the mean over worlds; empty where a drive has none."""
    curves = [row[name] for row in report["drives"] if row["setting"] == setting and name in row]
    return [(float(second), sum(values) / len(values)) for second, values in enumerate(zip(*curves, strict=True))]


def draw(report: Row, out: Path) -> None:
    """A row of plots for each path."""
    paths = [path for path in PATHS if settings_of(report, path)]
    figure, axes = plt.subplots(len(paths), 4, figsize=(17, 3.6 * len(paths)), squeeze=False, layout="constrained")
    for path, row in zip(paths, axes, strict=True):
        for number, setting in enumerate(settings_of(report, path)):
            label, colour = setting.removeprefix(f"{path}-").replace("-", ", "), f"C{number}"
            if not label.startswith("true"):  # which is 60 dB by definition
                curve = picture_errors(report, setting, "psnr_db")
                row[0].plot(*zip(*curve, strict=True), color=colour, label=label)
            for axis, name in zip(row[1:], DRAWN, strict=True):
                points = errors(report, setting, ERRORS[name])
                axis.plot(*zip(*points, strict=True), marker="o", ms=4, color=colour, label=label)
        for axis, name in zip(row, ("PSNR to the true view, dB", *DRAWN), strict=True):
            axis.set(xlabel="seconds", ylabel=name, ylim=(0, None))
            axis.grid(alpha=0.3)
        row[0].set_title(PATHS[path])
        row[3].legend(fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def sheet(report: Row, work: Path, out: Path) -> None:
    """Frames of the first world, with the name of their setting on the left and their second above."""
    starts = sorted({row["start_s"] for row in report["windows"]})
    settings = [name for path in PATHS for name in settings_of(report, path)]
    world = report["drives"][0]["world"]
    figure, axes = plt.subplots(
        len(settings), len(starts), figsize=(2.3 * len(starts), 1.3 * len(settings)), layout="constrained"
    )
    for setting, row in zip(settings, axes, strict=True):
        frames = middle_frames(work / f"world-{world}-{setting}.safetensors")
        for axis, start, frame in zip(row, starts, frames, strict=True):
            axis.imshow(frame)
            axis.set(xticks=[], yticks=[], title=f"{start:.0f} s" if setting == settings[0] else "")
        row[0].set_ylabel(setting.replace("-", "\n"), rotation=0, ha="right", va="center", fontsize=8)
    figure.savefig(out, dpi=110)


def middle_frames(file: Path) -> list[Tensor]:  # uint8 [H, W, 3] each
    """One of each window."""
    count = long_drive.WINDOW_FRAMES
    with safe_open(file, "pt") as kept:
        names: list[str] = kept.keys()
        windows = sorted((name for name in names if name.startswith("window-")), key=lambda name: int(name[7:]))
        return [long_drive.unpacked(kept.get_tensor(name), count)[count // 2] for name in windows]


def tables(report: Row) -> str:
    """Markdown: a table for each error, with a line for each setting and a column for each window."""
    parts = []
    for title, of_rows in ERRORS.items():
        lines = []
        for path in PATHS:
            for setting in settings_of(report, path):
                points = errors(report, setting, of_rows)
                lines.append(f"| {setting} | " + " | ".join(f"{value:.3g}" for _, value in points) + " |")
        starts = [f"{start:.0f} s" for start, _ in points]
        parts.append("\n".join([f"| {title} | " + " | ".join(starts) + " |", "|---" * (len(starts) + 1) + "|", *lines]))
    for setting in settings_of(report, "laps"):
        here, true = (
            [value for _, value in picture_errors(report, setting, f"{start}psnr_to_lap_before_db")]
            for start in ("", "true_")
        )
        mean, floor = sum(here) / len(here), sum(true) / len(true)
        parts.append(f"{setting}: second lap to first lap {mean:.2f} dB; the true frames {floor:.2f} dB")
    return "\n\n".join(parts)


def main() -> None:
    """Draw and print."""
    parser = argparse.ArgumentParser(description="a minute of driving, drawn")
    parser.add_argument("--rows", type=Path, default=Path("benchmarks/results/long-drive.json"))
    parser.add_argument("--out", type=Path, default=Path("docs/images/long-drive.png"))
    parser.add_argument("--work", type=Path, default=Path("outputs/long-drive"), help="where the drives are kept")
    parser.add_argument("--frames", type=Path, help="file for a sheet of frames, such as frames.webp")
    options = parser.parse_args()
    report = json.loads(options.rows.read_text())
    draw(report, options.out)
    if options.frames is not None:
        sheet(report, options.work, options.frames)
    print(tables(report))


if __name__ == "__main__":
    main()

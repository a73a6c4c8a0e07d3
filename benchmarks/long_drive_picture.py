"""Draws how a drive of a minute goes, and prints it as tables, from rows of benchmarks/long_drive.py.

    python benchmarks/long_drive_picture.py [--rows ROWS.json] [--out docs/images/long-drive.png]

One line for each setting, the mean over worlds. Errors are those of frames whose pose was found, so the share of these
stands beside them.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Row = dict[str, Any]
Points = list[tuple[float, float]]  # seconds, value

PATHS = {"road": "one way, with a turn after some 25 s", "laps": "twice around a circle of 20 m"}
ERRORS = {
    "found, %": lambda rows: 100 * total(rows, "anchored_found") / total(rows, "anchored_frames"),
    "position error, m": lambda rows: weighted(rows, "anchored_position_m", "anchored_found"),
    "rotation error, °": lambda rows: weighted(rows, "anchored_rot_deg", "anchored_found"),
    "COLMAP registers, %": lambda rows: 100 * total(rows, "colmap_registered") / total(rows, "colmap_frames"),
}


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
    figure, axes = plt.subplots(len(paths), 3, figsize=(14, 3.8 * len(paths)), squeeze=False, layout="constrained")
    for path, row in zip(paths, axes, strict=True):
        for setting in settings_of(report, path):
            label = setting.removeprefix(f"{path}-").replace("-", ", ")
            if not label.startswith("true"):  # which is 60 dB by definition
                row[0].plot(*zip(*picture_errors(report, setting, "psnr_db"), strict=True), label=label)
            for axis, name in zip(row[1:], ("position error, m", "rotation error, °"), strict=True):
                axis.plot(*zip(*errors(report, setting, ERRORS[name]), strict=True), marker="o", label=label)
        names = ("PSNR to the true view, dB", "position error, m", "rotation error, °")
        for axis, name in zip(row, names, strict=True):
            axis.set(xlabel="seconds", ylabel=name, title=PATHS[path], ylim=(0, None))
            axis.grid(alpha=0.3)
        row[1].legend(fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


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
    options = parser.parse_args()
    report = json.loads(options.rows.read_text())
    draw(report, options.out)
    print(tables(report))


if __name__ == "__main__":
    main()

"""Draws what a camera branch costs at full size and fills the tables of docs/cost.md, from rows of benchmarks/model.py.

    python benchmarks/model_picture.py [--rows benchmarks/results/model-h200.json] [--page docs/cost.md]

Tables stand on the page between `<!-- rows NAME -->` and `<!-- end -->`; what is between is replaced.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Row = dict[str, Any]
Cell = Callable[[Row], str]

NAMES = {"no branch": "no branch", "gta": "GTA", "ucpe": "UCPE", "merope, paper's way": "MeRoPE, paper's way"}
COLOURS = {
    "no branch": "tab:gray",
    "gta": "tab:green",
    "ucpe": "tab:orange",
    "merope, paper's way": "lightsteelblue",
    "merope": "tab:blue",
}
GROUPS: dict[str, dict[str, object]] = {  # label: what its rows have; those that failed to compile have a note
    "49 × 288×512": {"what": "denoise-49", "compiled": False, "note": ""},
    "49 × 288×512\ncompiled": {"what": "denoise-49", "compiled": True},
    "121 × 704×1280": {"what": "denoise-121", "compiled": False, "note": ""},
    "121 × 704×1280\ncompiled": {"what": "denoise-121", "compiled": True},
    "train all": {"what": "train", "trained": "all"},
}
CLIPS = {"denoise-49": "49 × 288×512", "denoise-121": "121 × 704×1280"}


def chosen(rows: Sequence[Row], **wanted: object) -> list[Row]:
    """Rows with these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def name_of(row: Row) -> str:
    return NAMES.get(row["method"], str(row["method"]).replace("merope", "MeRoPE"))


def rounded(value: float, digits: int = 3) -> str:
    """So many significant digits; none is cut off before the decimal point."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:#.{digits}g}"


def number(name: str, digits: int = 3, factor: float = 1.0) -> Cell:
    """A cell with so many significant digits; empty where a row has no such number."""

    def cell(row: Row) -> str:
        value = row.get(name)
        return "" if value is None or value != value else rounded(factor * value, digits)

    return cell


def between(name: str, factor: float = 1.0) -> Cell:
    """The 10th to the 90th percentile."""
    return lambda row: f"{rounded(factor * row[f'{name}_p10_s'])} – {rounded(factor * row[f'{name}_p90_s'])}"


def table(rows: Sequence[Row], columns: dict[str, Cell]) -> str:
    """Markdown; a table without rows says that it is open."""
    if not rows:
        return "Open: not measured yet."
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in rows)])


THROUGHPUT: dict[str, Cell] = {
    "clips/s": number("clips_per_s"),
    "÷ no branch": number("throughput_to_no_branch"),
    "÷ UCPE": number("throughput_to_ucpe"),
    "peak GiB": number("peak_memory_gib"),
    "GiB ÷ UCPE": number("memory_to_ucpe"),
}


def denoising_table(rows: Sequence[Row], what: str) -> str:
    columns: dict[str, Cell] = {
        "method": name_of,
        "blocks": lambda row: ("compiled" if row["compiled"] else "eager") + ("*" if row["note"] else ""),
        "step, s": number("step_s"),
        "p10 – p90": between("step"),
        "first step, s": number("first_step_s"),
        "clip of 50 steps, s": number("clip_s"),
        **THROUGHPUT,
        "steps run": lambda row: str(row["steps_run"]),
    }
    return table(chosen(rows, what=what), columns)


def training_table(rows: Sequence[Row]) -> str:
    columns: dict[str, Cell] = {
        "trained": lambda row: "all weights" if row["trained"] == "all" else "branch",
        "method": name_of,
        "step, s": number("step_s"),
        "p10 – p90": between("step"),
        "GPU computes, s": number("kernels_s"),
        "kernels": lambda row: f"{row['kernels']:,}" if "kernels" in row else "",
        **THROUGHPUT,
        "steps run": lambda row: str(row["steps_run"]),
    }
    return table(chosen(rows, what="train"), columns)


def branch_table(rows: Sequence[Row]) -> str:
    columns: dict[str, Cell] = {
        "clip": lambda row: CLIPS[row["clip"]],
        "C": lambda row: str(row["compression"]),
        "": lambda row: str(row["direction"]),
        "method": name_of,
        "ms": number("branch_s", factor=1e3),
        "p10 – p90": between("branch", factor=1e3),
        "speed ÷ UCPE": number("throughput_to_ucpe"),
        "MiB": number("peak_memory_gib", factor=1024),
    }
    return table(chosen(rows, what="branch"), columns)


def forward_table(rows: Sequence[Row]) -> str:
    columns: dict[str, Cell] = {
        "clip": lambda row: CLIPS[row["clip"]],
        "clips at once": lambda row: str(row["samples"]),
        "timesteps": lambda row: str(row["timesteps"]),
        "ms": number("forward_s", factor=1e3),
        "p10 – p90": between("forward", factor=1e3),
        "peak GiB": number("peak_memory_gib"),
    }
    return table(chosen(rows, what="forward"), columns)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Every table of the page, by its name there."""
    return {
        **{what: denoising_table(rows, what) for what in CLIPS},
        "train": training_table(rows),
        "branch": branch_table(rows),
        "forward": forward_table(rows),
    }


def filled(page: str, by_name: dict[str, str]) -> str:
    """The page with its tables replaced; one whose name is unknown is an error."""

    def replacement(match: re.Match[str]) -> str:
        return f"<!-- rows {match[1]} -->\n\n{by_name[match[1]]}\n\n<!-- end -->"

    return re.sub(r"<!-- rows ([\w-]+) -->.*?<!-- end -->", replacement, page, flags=re.DOTALL)


def draw(rows: Sequence[Row], out: Path) -> None:
    """Throughput over that of the model without a branch, and peak memory in GiB."""
    groups = {label: found for label, wanted in GROUPS.items() if (found := chosen(rows, **wanted))}
    figure, panels = plt.subplots(2, 1, figsize=(9, 6), sharex=True, constrained_layout=True)
    for panel, (value, title) in zip(
        panels,
        (("throughput_to_no_branch", "clips/s ÷ no branch"), ("peak_memory_gib", "peak memory, GiB")),
        strict=True,
    ):
        for place, (method, colour) in enumerate(COLOURS.items()):
            bars = [
                (index, row[value])
                for index, found in enumerate(groups.values())
                for row in chosen(found, method=method)
                if value in row
            ]
            if bars:
                at, heights = zip(*((index + 0.17 * (place - 2), height) for index, height in bars), strict=True)
                panel.bar(at, heights, 0.16, color=colour, label=NAMES.get(method, "MeRoPE"))
        panel.set_ylabel(title)
        panel.grid(axis="y", lw=0.3)
    panels[0].axhline(1, color="black", lw=0.6)
    panels[0].set_ylim(bottom=0.5)
    panels[0].legend(fontsize=8, ncols=len(COLOURS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    panels[1].set_xticks(range(len(groups)), list(groups))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def main() -> None:
    """Read the rows, draw, and fill the page."""
    parser = argparse.ArgumentParser(description="draw and tabulate what a camera branch costs at full size")
    parser.add_argument("--rows", type=Path, default=Path("benchmarks/results/model-h200.json"))
    parser.add_argument("--out", type=Path, default=Path("docs/images/cost.png"))
    parser.add_argument("--page", type=Path, default=Path("docs/cost.md"))
    options = parser.parse_args()
    rows = json.loads(options.rows.read_text())["rows"]
    draw(rows, options.out)
    options.page.write_text(filled(options.page.read_text(), tables(rows)))


if __name__ == "__main__":
    main()

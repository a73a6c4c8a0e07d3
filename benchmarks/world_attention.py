"""Where trained camera branches look as the drive grows, and how strongly they move every block (paper, Figures 1, 7).

    python benchmarks/world_attention.py --results benchmarks/results/miniature [--rows ucpe merope]
    python benchmarks/world_attention.py --models NAME=FOLDER ... [--out benchmarks/results/world-attention.json]

The first draws what rows of a benchmark left in its results folder. The second measures models first
(`outputs/miniature-rows/ucpe-seed0/trained`), whose clips.json says what they are given and how long their clips are;
models that are in the file already and are not named stay in it. What is measured: `merope.bench.straight_drives`.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from merope.bench.groups import BENCHMARKS
from merope.bench.straight_drives import FARTHEST, LENGTHS_M, STEPS, WORLDS, read_straight_drives, straight_drives
from merope.demo.drive import loaded
from merope.errors import invalid
from merope.train.provenance import commit, device_name
from merope.world.clips_file import read_clips

IMAGES = Path("docs/images")
SHOWN_M = 12.0
"""The drive whose amplitudes are drawn: one as training has it."""

PANELS_IN_A_LINE = 5
BELOW: dict[str, Any] = {"loc": "outside lower center", "ncols": 8, "frameon": False, "fontsize": 9}

Drives = dict[str, Any]
Models = dict[str, list[list[Drives]]]  # by name, then by seed


def measure(name: str, folder: Path, worlds: int, steps: int, device: torch.device) -> list[Drives]:
    """A row per length of the drive."""
    about = {"commit": commit(), "device": device_name(device), "torch": torch.__version__}
    clips, _ = read_clips(folder)
    rows = [{"model": name} | drive | about for drive in straight_drives(loaded(folder, device), clips, worlds, steps)]
    for row in rows:
        share = f"{100 * row['farthest']:.1f} %"
        print(f"{name}, {row['length_m']:g} m: {share} on the {FARTHEST} farthest latent frames", flush=True)
    return rows


def measured(options: argparse.Namespace) -> Models:
    """The models that are named, and all others that are in the file."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    named = dict(model.split("=", 1) for model in options.models)
    before = json.loads(options.out.read_text()) if options.out.exists() else []
    rows = [row for row in before if row["model"] not in named]
    for name, folder in named.items():
        rows += measure(name, Path(folder), options.worlds, options.steps, device)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    print("wrote", options.out)
    return {name: [[row for row in rows if row["model"] == name]] for name in dict.fromkeys(r["model"] for r in rows)}


def of_rows(results: Path, wanted: list[str] | None) -> Models:
    """What rows left in a results folder, in the order of the tables."""
    kept = read_straight_drives(results)
    for name in wanted or ():
        if name not in kept:
            raise invalid("--rows", f"some of {', '.join(kept)}", name, "others left no straight drives")
    order = dict.fromkeys(row for groups in BENCHMARKS.values() for rows in groups.values() for row in rows)
    return {name: kept[name] for name in wanted or sorted(kept, key=[*order, *kept].index)}


def colours(models: Mapping[str, Any]) -> dict[str, Any]:
    """MeRoPE is blue in all pictures."""
    others = iter(plt.get_cmap("tab10")(1 + number % 9) for number in range(len(models)))
    return {name: "tab:blue" if name.startswith("merope") else next(others) for name in models}


def draw_attention(models: Models, out: Path) -> None:
    """Mass on every frame, a panel per length of the drive; a line per seed."""
    figure, panels = plt.subplots(1, len(LENGTHS_M), figsize=(12, 3.4), sharey=True, constrained_layout=True)
    for name, colour in colours(models).items():
        for panel, length_m in zip(panels, LENGTHS_M, strict=True):
            masses = [drive["mass"] for seed in models[name] for drive in seed if drive["length_m"] == length_m]
            for number, mass in enumerate(masses):
                percent, label = [100 * share for share in mass], name if number == 0 else None
                panel.plot(range(len(mass)), percent, marker="o", ms=3, lw=1.2, color=colour, label=label)
    for panel, length_m in zip(panels, LENGTHS_M, strict=True):
        panel.set(title=f"{length_m:g} m driven", xlabel="key frame (latent)", ylim=(0.0, None))
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(lw=0.4)
    panels[0].set_ylabel("attention of the last frame, %")
    figure.legend(*panels[0].get_legend_handles_labels(), **BELOW)
    figure.savefig(out, dpi=120)
    plt.close(figure)


def draw_amplitude(models: Models, out: Path) -> None:
    """A panel per model: bars over its blocks for one drive, mean over seeds; a dot is the longest drive."""
    columns = min(len(models), PANELS_IN_A_LINE)
    lines = -(-len(models) // columns)
    size = (1.0 + 2.4 * columns, 0.8 + 2.4 * lines)
    figure, grid = plt.subplots(lines, columns, figsize=size, sharey=True, squeeze=False, constrained_layout=True)
    for panel in grid.flat[len(models) :]:
        panel.set_visible(False)
    for panel, (name, colour) in zip(grid.flat, colours(models).items(), strict=False):
        blocks, amplitudes = mean_amplitudes(models[name], SHOWN_M)
        panel.bar(blocks, amplitudes, color=colour, alpha=0.75)
        panel.plot(*mean_amplitudes(models[name], LENGTHS_M[-1]), "o", ms=4, color="0.15")
        panel.set_title(name, fontsize=10)
        panel.set(xlabel="block", xlim=(-0.7, models[name][0][0]["layers"] - 0.3))
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.spines[["top", "right"]].set_visible(False)
    figure.supylabel("‖camera residual‖ / ‖self-attention‖", fontsize=9)
    labels = [f"bars: {SHOWN_M:g} m driven", f"dots: {LENGTHS_M[-1]:g} m"]
    figure.legend([Patch(color="0.7"), Line2D([], [], ls="", marker="o", ms=4, color="0.15")], labels, **BELOW)
    figure.savefig(out, dpi=120)
    plt.close(figure)


def mean_amplitudes(seeds: list[list[Drives]], length_m: float) -> tuple[list[int], list[float]]:
    """Blocks with a branch, and their amplitudes for a drive, mean over seeds."""
    found = [drive["amplitude_by_block"] for seed in seeds for drive in seed if drive["length_m"] == length_m]
    return [int(block) for block in found[0]], [sum(one[block] for one in found) / len(found) for block in found[0]]


def numbers(models: Models) -> str:
    """A line for every training: amplitude of its branch, and attention on the farthest frames, drive by drive."""
    lengths = " | ".join(f"{length_m:g} m" for length_m in LENGTHS_M)
    lines = [f"| training | amplitude: {lengths} | on the {FARTHEST} farthest frames, %: {lengths} |"]
    lines.append("|---" * (1 + 2 * len(LENGTHS_M)) + "|")
    for name, seeds in models.items():
        for drives in seeds:
            by_length = {drive["length_m"]: drive for drive in drives}
            amplitudes = [f"{by_length[length_m]['amplitude']:.2f}" for length_m in LENGTHS_M]
            shares = [f"{100 * by_length[length_m]['farthest']:.0f}" for length_m in LENGTHS_M]
            lines.append(f"| {' | '.join([name, *amplitudes, *shares])} |")
    return "\n".join(lines)


def main() -> None:
    """Draw rows of a results folder, or measure models and draw them."""
    parser = argparse.ArgumentParser(description="where trained camera branches look as the drive grows")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--models", nargs="+", metavar="NAME=FOLDER", help="models that are measured")
    source.add_argument("--results", type=Path, help="results folder of a benchmark, whose rows are drawn")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="of the results folder (all)")
    parser.add_argument("--worlds", type=int, default=WORLDS)
    parser.add_argument("--steps", type=int, default=STEPS, help="of denoising")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/world-attention.json"))
    parser.add_argument("--picture", type=Path, help="(docs/images/{world,miniature}-attention.png)")
    options = parser.parse_args()
    models = measured(options) if options.models else of_rows(options.results, options.rows)
    picture = options.picture or IMAGES / f"{'world' if options.models else 'miniature'}-attention.png"
    draw_attention(models, picture)
    print(numbers(models))
    drawn = [picture]
    if all("amplitude_by_block" in drive for seeds in models.values() for seed in seeds for drive in seed):
        drawn.append(picture.with_name(f"{picture.stem.removesuffix('-attention')}-amplitude.png"))
        draw_amplitude(models, drawn[-1])
    print("wrote", ", ".join(map(str, drawn)))


if __name__ == "__main__":
    main()

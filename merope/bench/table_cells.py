"""Columns of the benchmarks' tables, and how their numbers and lines are written."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from merope.evaluate.summary import Interval

COLUMNS = {
    "rot_deg": "rot °",
    "metric_tr_percent": "metric tr %",
    "cammc": "CamMC",
    "ate_m": "position m",
    "auc_10": "AUC@10",
    "psnr_db": "PSNR dB",
}
STRANGERS = {"colmap_percent": "COLMAP registers %", "colmap_rot_deg": "COLMAP rot °"}
"""Columns of rows whose frames are large enough for COLMAP, which sees the clips of some worlds."""
RETURNS = {"late_psnr_db": "late PSNR dB", "recalled_psnr_db": "recalled PSNR dB"}
"""Columns of tables with a row that is shown what an earlier drive saw: of the last third of a clip, and of what no
given frame shows but that drive did."""
EVERY_CLIP = ("auc_10", "psnr_db")
"""Metrics that every clip has, however badly it follows."""
BETTER = {"cammc": "lower"} | dict.fromkeys((*EVERY_CLIP, *RETURNS), "higher")
"""Which way is better, for the metrics that rows are compared by."""
SWEPT = ("metric_tr_percent", "cammc", "rot_deg", *EVERY_CLIP)
COMPARED = ("cammc", *EVERY_CLIP)
"""CamMC is of the clips that both rows followed well enough to be measured; in the AUC the others are misses."""


def cell(value: Interval, sign: str = "") -> str:
    """1.23 [1.02, 1.51], without the interval where there is none."""
    if math.isnan(value.mean):
        return "–"
    mean = f"{value.mean:{sign}.2f}"
    return mean if math.isnan(value.low) else f"{mean} [{value.low:{sign}.2f}, {value.high:{sign}.2f}]"


def floor_mean(floor: Mapping[str, Any], metric: str) -> str:
    """What poses are off by when nothing is generated; a dash where no true render could be measured."""
    mean = floor["values"][metric]["mean"]
    return "–" if mean is None else f"{mean:.3f}"


def bold(text: str, is_bold: bool) -> str:
    return f"**{text}**" if is_bold else text


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells, of which the first is the head."""
    head, *body = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *body])

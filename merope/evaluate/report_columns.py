"""The columns of the report's tables: names, arrows, meanings, and how numbers are written."""

import math
from dataclasses import dataclass
from html import escape
from typing import Literal

from merope.evaluate.results import EVERYTHING, TITLES, Results

Kind = Literal["lower", "higher", "number", "text"]  # lower or higher is better; number and text have no better


@dataclass(frozen=True)
class Column:
    """A metric as a column."""

    name: str  # a key of TITLES, of Results.table and, but for FIDELITY_COLUMNS, of ClipResult.value
    kind: Kind
    meaning: str
    in_short_tables: bool = False

    @property
    def label(self) -> str:
        """With the paper's arrow: ↓ lower is better, ↑ higher is better."""
        return TITLES[self.name] + {"lower": " ↓", "higher": " ↑", "number": "", "text": ""}[self.kind]


COLUMNS = (
    Column("rot_deg", "lower", "Mean angle between commanded and recovered orientation, degrees.", True),
    Column("tr_percent", "lower", "Mean distance of centres after s*, percent of the commanded chord.", True),
    Column("auc_3", "higher", "Share of frame pairs whose relative pose is right, thresholds 1° to 3°."),
    Column("auc_10", "higher", "The same for thresholds 1° to 10°."),
    Column("cammc", "lower", "Sum over frames of the error of [R | o], each path scaled to size 1.", True),
    Column("rot_err", "lower", "Sum over frames of the orientation error, radians."),
    Column("trans_err", "lower", "Sum over frames of the distance of centres, each path scaled to size 1."),
    Column("scale", "number", "Scale that fits the recovered path to the commanded one; negative: backwards."),
    Column("ate_m", "lower", "Root mean square distance of centres without scaling; metric estimators only."),
    Column("metric_tr_percent", "lower", "tr% without scaling; metric estimators only."),
)

FIDELITY_COLUMNS = (
    Column("fid", "lower", "Fréchet distance of the frames' Inception features to the reference's; falls with n."),
    Column("fvd", "lower", "Fréchet distance of the videos' I3D features to the reference's; falls with n."),
)
"""Of a method's videos together: no clip has them."""


def shown_columns(results: Results) -> list[Column]:
    """Those that any clip has a number of."""
    return [c for c in COLUMNS if any(not math.isnan(clip.value(c.name)) for clip in results.clips)]


def shown_fidelity(results: Results) -> list[Column]:
    """FID, FVD, both or none."""
    rows = results.table(EVERYTHING).values()
    return [column for column in FIDELITY_COLUMNS if any(column.name in values for values in rows)]


def number(value: float) -> str:
    """Two decimals as in the paper; down to 0.0005 two digits, and below that nothing."""
    if math.isnan(value):
        return "–"
    return f"{value:.2g}" if 0.0005 <= abs(value) < 0.1 else f"{value:.2f}"


def sort_button(label: str, kind: Kind, meaning: str, css_class: str = "") -> str:
    """A head cell that sorts its table; `kind` tells the script which end comes first."""
    names = f' class="{css_class}"' if css_class else ""
    hint = f' title="{escape(meaning)}"' if meaning else ""
    return f'<th scope="col" data-kind="{kind}"{names}><button type="button"{hint}>{escape(label)}</button></th>'

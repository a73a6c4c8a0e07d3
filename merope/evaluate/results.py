"""Numbers of an evaluation: per clip, per manoeuvre and overall, for every method; results.json and clips.csv."""

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from merope.evaluate.auc import PairErrors, pair_errors
from merope.evaluate.discover import HOW_COUNTED, ClipName, Problem, printable
from merope.evaluate.fidelity import Fidelity
from merope.evaluate.metrics import STATIC_COMMAND, TOO_FEW_FRAMES, PoseMetrics, pose_metrics
from merope.evaluate.record import Record
from merope.evaluate.summary import AUC_DEGREES, METRICS, RESAMPLES, Interval, Summary, summarise
from merope.formats.writing import replace_text
from merope.world.commanded import MANOEUVRES

FORMAT = "merope-evaluation-1"
NOT_TRUSTED = "the estimators disagree, or frames are too small for one alone; in no mean"
EVERYTHING = "all clips"
IN_COMMON = "clips that every method has"
TITLES = {
    "rot_deg": "rot°",
    "tr_percent": "tr%",
    "auc_3": "AUC@3",
    "auc_10": "AUC@10",
    "cammc": "CamMC",
    "rot_err": "RotErr",
    "trans_err": "TransErr",
    "scale": "s*",
    "ate_m": "ATE m",
    "metric_tr_percent": "metric tr%",
    "fid": "FID",
    "fvd": "FVD",
}
"""Metrics as people know them, in the order of the paper's tables."""


@dataclass(frozen=True, eq=False)
class ClipResult:
    """What was measured in one clip of one method; None where there is no commanded path to compare with."""

    record: Record
    metrics: PoseMetrics | None
    pairs: PairErrors | None
    auc_percent: dict[int, float]  # threshold in degrees -> AUC of this clip
    problems: tuple[Problem, ...]

    @property
    def method(self) -> str:
        return self.record.method

    @property
    def clip(self) -> ClipName:
        return self.record.clip

    @property
    def is_measured(self) -> bool:
        """Whether its errors are in the means: enough frames have a pose, and the poses are trusted."""
        return self.metrics is not None and TOO_FEW_FRAMES not in self.metrics.undefined and self.record.trusted

    def value(self, name: str) -> float:
        """A metric by name, NaN where it is undefined."""
        if name.startswith("auc_"):
            return self.auc_percent.get(int(name.removeprefix("auc_")), math.nan)
        value = None if self.metrics is None else getattr(self.metrics, name)
        return math.nan if value is None else float(value)


@dataclass(frozen=True)
class Counts:
    """Clips that one method should have followed."""

    commanded: int  # also those whose commanded path cannot be read
    measured: int  # in the means
    not_trusted: int  # recovered, but not to be believed: in no mean

    def __str__(self) -> str:
        doubted = f", {self.not_trusted} not trusted" if self.not_trusted else ""
        return f"{self.measured} of {self.commanded}{doubted}"


@dataclass(frozen=True, eq=False)
class Results:
    """An evaluation: settings, every clip of every method, and summaries by group of clips and method.

    Groups are EVERYTHING, the manoeuvres if there are any, and IN_COMMON if methods failed on different clips.
    """

    settings: Mapping[str, object]
    versions: Mapping[str, str]
    methods: tuple[str, ...]
    clips: tuple[ClipResult, ...]
    strays: tuple[Problem, ...]  # videos that nobody commanded
    summaries: Mapping[str, Mapping[str, Summary]]  # group -> method -> summary
    fidelity: Fidelity | None = None  # FID and FVD, of methods that have them

    @property
    def problems(self) -> list[Problem]:
        return [problem for clip in self.clips for problem in clip.problems] + list(self.strays)

    @property
    def doubted(self) -> list[str]:
        """A line for each method that has clips whose poses cannot be believed."""
        counts = {method: self.counts(EVERYTHING, method) for method in self.methods}
        lines = {method: f"{own.commanded} clips, {own.not_trusted} not trusted" for method, own in counts.items()}
        return [f"{method}: {line}" for method, line in lines.items() if counts[method].not_trusted]

    def counts(self, group: str, method: str) -> Counts:
        """How many clips of a group a method should have followed, and what became of them."""
        if group == IN_COMMON:
            common = self.summaries[group][method].clips
            return Counts(common, common, 0)
        own = [c for c in self.clips if c.method == method and group in (EVERYTHING, c.clip.manoeuvre)]
        return Counts(len(own), sum(c.is_measured for c in own), sum(not c.record.trusted for c in own))

    def table(self, group: str) -> dict[str, dict[str, Interval]]:
        """Numbers by method and name. FID and FVD are of sets of videos, not means of clips: only among all clips."""
        summaries = self.summaries[group]
        rows = {method: dict(summaries[method].values) if method in summaries else {} for method in self.methods}
        if group == EVERYTHING and self.fidelity is not None:
            for method in rows.keys() & self.fidelity.methods.keys():
                for name, score in self.fidelity.methods[method].scores.items():
                    rows[method][name] = Interval(score.distance, math.nan, math.nan, score.count)
        return rows


def measure(
    records: Sequence[Record],
    strays: Sequence[Problem],
    settings: Mapping[str, object],
    versions: Mapping[str, str],
    seed: int = 0,
    fidelity: Fidelity | None = None,
) -> Results:
    """All numbers of a run. Nothing is drawn at random but the bootstrap, by `seed`."""
    clips = tuple(_clip(record) for record in records)
    methods = tuple(dict.fromkeys(clip.method for clip in clips))
    groups = {name: _summaries(group, seed) for name, group in _groups(clips, methods).items()}
    return Results(settings, versions, methods, clips, tuple(strays), groups, fidelity)


def _clip(record: Record) -> ClipResult:
    if len(record.commanded) == 0:
        return ClipResult(record, None, None, {}, record.problems)
    metrics = pose_metrics(record.commanded, record.recovered, record.valid, record.is_metric)
    pairs = pair_errors(record.commanded, record.recovered, record.valid)
    auc = {tau: 100.0 * pairs.hits(tau) / (tau * len(pairs.joint_deg)) for tau in AUC_DEGREES}
    return ClipResult(record, metrics, pairs, auc, (*record.problems, *_found(record, metrics)))


def _found(record: Record, metrics: PoseMetrics) -> Iterable[Problem]:
    """Problems that only the numbers show."""
    if metrics.valid_frames < 2:
        return
    for reason in metrics.undefined:
        kind = "too few poses" if reason == TOO_FEW_FRAMES else "undefined"
        names = ", ".join(TITLES[name] for name in METRICS if _is_nan(getattr(metrics, name)))
        yield Problem(record.method, str(record.clip), kind, f"{reason}: no {names}")
    if metrics.static_estimate and STATIC_COMMAND not in metrics.undefined:
        yield Problem(record.method, str(record.clip), "static estimate", "the recovered camera never moves")
    elif metrics.reversed_motion:
        reason = f"the recovered path fits only with a negative scale, s* = {metrics.scale:.3g}"
        yield Problem(record.method, str(record.clip), "reversed motion", reason)


def _is_nan(value: float | None) -> bool:
    return value is not None and math.isnan(value)


def _groups(clips: Sequence[ClipResult], methods: Sequence[str]) -> dict[str, list[ClipResult]]:
    groups = {EVERYTHING: list(clips)}
    named = {clip.clip.manoeuvre for clip in clips} - {""}
    for manoeuvre in sorted(named, key=lambda name: ((*MANOEUVRES, name).index(name), name)):
        groups[manoeuvre] = [clip for clip in clips if clip.clip.manoeuvre == manoeuvre]
    measured = [{clip.clip for clip in clips if clip.method == method and clip.is_measured} for method in methods]
    common = set.intersection(*measured) if measured else set()
    if common and any(own != common for own in measured):
        groups[IN_COMMON] = [clip for clip in clips if clip.clip in common]
    return groups


def _summaries(clips: Sequence[ClipResult], seed: int) -> dict[str, Summary]:
    rows = {}
    for method in dict.fromkeys(clip.method for clip in clips):
        own = [clip for clip in clips if clip.method == method and clip.record.trusted]
        metrics = [clip.metrics for clip in own if clip.metrics is not None]
        pairs = [clip.pairs for clip in own if clip.pairs is not None]
        if metrics:
            rows[method] = summarise(metrics, pairs, seed)
    return rows


def write_results(results: Results, out: Path) -> None:
    """results.json with everything, and clips.csv with a row per clip and method."""
    text = json.dumps(as_json(results), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    replace_text(out / "results.json", printable(text))
    replace_text(out / "clips.csv", printable(as_csv(results)))


def as_json(results: Results) -> dict[str, object]:
    """Plain values; what is undefined is null."""
    return {
        "format": FORMAT,
        "settings": dict(results.settings),
        "versions": dict(results.versions),
        "bootstrap": {"resamples": RESAMPLES, "confidence": 0.95},
        "summaries": {
            group: {method: _finite(asdict(summary)) for method, summary in rows.items()}
            for group, rows in results.summaries.items()
        },
        "counts": {method: asdict(results.counts(EVERYTHING, method)) for method in results.methods},
        "fidelity": None if results.fidelity is None else asdict(results.fidelity),
        "clips": [_clip_document(clip) for clip in results.clips],
        "problems": [asdict(one) | {"counts": HOW_COUNTED[one.kind]} for one in results.problems],
    }


def _clip_document(clip: ClipResult) -> dict[str, object]:
    return {
        "method": clip.method,
        "clip": str(clip.clip),
        "manoeuvre": clip.clip.manoeuvre,
        "estimator": clip.record.estimator,
        "weights_sha256": clip.record.weights_sha256,
        "note": clip.record.note,
        "trusted": clip.is_measured,
        "doubt": clip.record.doubt,
        "check": clip.record.check,
        "inliers": clip.record.inliers,
        "metrics": None if clip.metrics is None else _finite(clip.metrics.as_dict()),
        "auc_percent": {str(tau): value for tau, value in clip.auc_percent.items()},
        "problems": [problem.kind for problem in clip.problems],
    }


def _finite(value: object) -> object:
    """NaN and infinity as null, at any depth: JSON has neither."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_csv(results: Results) -> str:
    """One row per clip and method; empty where a number is undefined."""
    auc_names = [f"auc_{tau}" for tau in AUC_DEGREES]
    names = [*METRICS, *auc_names, "chord_m"]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    said = ["problems", "reasons", "trusted", "doubt"]
    table.writerow(["method", "clip", "manoeuvre", "frames", "valid_frames", *names, *said])
    for clip in results.clips:
        frames = ["", ""] if clip.metrics is None else [clip.metrics.frames, clip.metrics.valid_frames]
        values = ["" if math.isnan(clip.value(name)) else repr(clip.value(name)) for name in names]
        kinds = "; ".join(problem.kind for problem in clip.problems)
        reasons = "; ".join(problem.reason for problem in clip.problems)
        about = [_cell(part) for part in (clip.method, str(clip.clip), clip.clip.manoeuvre)]
        trust = ["yes" if clip.is_measured else "no", _cell(clip.record.doubt)]
        table.writerow([*about, *frames, *values, kinds, _cell(reasons), *trust])
    for stray in results.strays:
        about, nothing = [_cell(stray.method), _cell(stray.clip)], [""] * (3 + len(names))
        table.writerow([*about, *nothing, stray.kind, _cell(stray.reason), "", ""])
    return text.getvalue()


def _cell(text: str) -> str:
    """Text that a spreadsheet does not take for a formula: it would run one that hides in the name of a file."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def as_text(results: Results) -> str:
    """The summary and every problem, for a terminal."""
    lines = [line for group in results.summaries for line in _table_lines(results, group)]
    lines += [f"{line}: {NOT_TRUSTED}" for line in results.doubted]
    if results.fidelity is not None:
        lines += [f"not in FID and FVD, {line}" for line in results.fidelity.left_out]
    if results.problems:
        lines.append(f"problems ({len(results.problems)}):")
    for one in results.problems:
        lines.append(f"  {one.method}: {one.clip}: {one.kind}: {one.reason} [{HOW_COUNTED[one.kind]}]")
    return printable("\n".join(lines))


def _table_lines(results: Results, group: str) -> list[str]:
    arrows = {"rot_deg": "↓", "tr_percent": "↓", "auc_3": "↑", "auc_10": "↑", "cammc": "↓", "fid": "↓", "fvd": "↓"}
    table = results.table(group)
    present = {name for values in table.values() for name in values}
    columns = [name for name in arrows if name in present or name not in ("fid", "fvd")]
    heads = " ".join(f"{f'{TITLES[name]} {arrows[name]}':>8}" for name in columns)
    width = max(len(method) for method in results.methods)
    lines = [f"{group}:", f"  {'':<{width}}{heads}   measured"]
    for method in results.methods:
        values = [table[method][name].mean if name in table[method] else math.nan for name in columns]
        cells = " ".join(f"{'–':>8}" if math.isnan(value) else f"{value:8.3f}" for value in values)
        lines.append(f"  {method:<{width}}{cells}   {results.counts(group, method)}")
    return lines

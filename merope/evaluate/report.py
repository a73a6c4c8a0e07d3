"""report.html: one self-contained page of an evaluation, in the layout of the paper's tables and figures.

The page needs no network. What belongs to a clip (paths from above, frames) waits as text until the clip is opened, so
a page of a thousand videos opens at once. Videos are links to files beside the page; without them the frames remain.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from merope.evaluate.discover import HOW_COUNTED, printable
from merope.evaluate.report_clips import clips_section
from merope.evaluate.report_columns import (
    COLUMNS,
    FIDELITY_COLUMNS,
    Column,
    number,
    shown_columns,
    shown_fidelity,
    sort_button,
)
from merope.evaluate.report_plot import spread_plot
from merope.evaluate.results import EVERYTHING, IN_COMMON, NOT_TRUSTED, Results
from merope.evaluate.summary import RESAMPLES, Interval
from merope.formats.writing import replace_text


def write_report(results: Results, file: Path) -> None:
    """Write the page, whole or not at all."""
    replace_text(file, printable(report_html(results, file.parent)))


def report_html(results: Results, folder: Path | None = None) -> str:
    """The page as text. It shows the videos if it knows the folder that it will lie in."""
    page = files("merope.evaluate") / "page"
    style, script = (page / name for name in ("report.css", "report.js"))
    sections = (
        _header(results),
        _summary(results),
        spread_plot(results),
        _manoeuvres(results),
        clips_section(results, folder),
        _problems(results),
        _about(results),
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<title>Camera control report</title>\n'
        f'<link rel="icon" href="data:,">\n<style>\n{style.read_text(encoding="utf-8")}</style>\n</head>\n<body>\n'
        f"<main>\n{''.join(sections)}</main>\n<script>\n{script.read_text(encoding='utf-8')}</script>\n</body>\n</html>\n"
    )


def _header(results: Results) -> str:
    clips = len({clip.clip for clip in results.clips})
    measured = sum(clip.is_measured for clip in results.clips)
    doubted = sum(not clip.record.trusted for clip in results.clips)
    estimators = sorted({clip.record.estimator for clip in results.clips} - {""})
    facts = [
        (str(clips), "clip" if clips == 1 else "clips"),
        (str(len(results.methods)), "method" if len(results.methods) == 1 else "methods"),
        (f"{measured} of {len(results.clips)}", "videos measured"),
        *([(str(doubted), "not trusted")] if doubted else []),
        (str(len(results.problems)), "problem" if len(results.problems) == 1 else "problems"),
    ]
    chips = "".join(f"<li><strong>{value}</strong> {label}</li>" for value, label in facts)
    return (
        "<header>\n<h1>Camera control report</h1>\n"
        '<p class="lead">Commanded camera paths against the paths recovered from the videos. Poses: '
        f"{escape(', '.join(estimators) or 'none recovered')}.</p>\n"
        f'<ul class="facts">{chips}</ul>\n'
        '<nav aria-label="Sections"><a href="#summary">Summary</a> <a href="#clips">Clips</a> '
        '<a href="#problems">Problems</a> <a href="#about">About the numbers</a></nav>\n</header>\n'
    )


def _summary(results: Results) -> str:
    tables = _table(results, EVERYTHING, [*shown_columns(results), *shown_fidelity(results)]) + _left_out(results)
    if IN_COMMON in results.summaries:
        tables += (
            "<h3>On the clips that every method has</h3>\n"
            "<p>Methods failed on different clips; here all means are over the same ones.</p>\n"
            + _table(results, IN_COMMON, shown_columns(results))
        )
    ranks = " <b>Best</b> and <u>second</u> of each column are marked." if len(results.methods) > 1 else ""
    return (
        '<section id="summary" aria-labelledby="summary-title">\n<h2 id="summary-title">Summary</h2>\n'
        "<p>Mean over clips with its 95 % bootstrap interval; AUC pools the frame pairs of all clips."
        f"{ranks} Click a column to sort.</p>\n{_doubts(results)}{tables}</section>\n"
    )


def _doubts(results: Results) -> str:
    lines = "".join(f"<li>{escape(line)}</li>" for line in results.doubted)
    return f'<p class="problem">{escape(NOT_TRUSTED.capitalize())}:</p>\n<ul>{lines}</ul>\n' if lines else ""


def _left_out(results: Results) -> str:
    """Videos that no FID and FVD has seen."""
    lines = [] if results.fidelity is None else results.fidelity.left_out
    if not lines:
        return ""
    return f"<p>Not in FID and FVD:</p>\n<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>\n"


def _manoeuvres(results: Results) -> str:
    groups = [group for group in results.summaries if group not in (EVERYTHING, IN_COMMON)]
    if not groups:
        return ""
    columns = [column for column in COLUMNS if column.in_short_tables]
    tables = "".join(
        f'<div class="card"><h3>{escape(group)}</h3>\n{_table(results, group, columns)}</div>\n' for group in groups
    )
    return (
        '<section id="manoeuvres" aria-labelledby="manoeuvres-title">\n<h2 id="manoeuvres-title">By manoeuvre</h2>\n'
        f'<div class="cards">{tables}</div></section>\n'
    )


def _table(results: Results, group: str, columns: Sequence[Column]) -> str:
    """Methods ordered by CamMC from highest to lowest, as in the paper."""
    rows = results.table(group)
    ranks = {column.name: _ranks(rows, column) for column in columns}
    order = sorted(rows, key=lambda method: (-_mean(rows[method], "cammc"), method))
    heads = "".join(sort_button(column.label, column.kind, column.meaning) for column in columns)
    bodies = "".join(_row(results, group, method, columns, ranks) for method in order)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="Table of {escape(group)}">'
        f'<table class="sortable"><thead><tr>{sort_button("Method", "text", "")}'
        f"{sort_button('Measured', 'higher', 'Videos with recovered poses, of all commanded')}{heads}</tr></thead>"
        f"{bodies}</table></div>\n"
    )


def _row(
    results: Results,
    group: str,
    method: str,
    columns: Sequence[Column],
    ranks: Mapping[str, Mapping[str, str]],  # column -> method -> tag
) -> str:
    values, own = results.table(group)[method], results.counts(group, method)
    cells = "".join(_cell(values.get(column.name), column, ranks[column.name].get(method, "")) for column in columns)
    doubted = f"<small>{own.not_trusted} not trusted</small>" if own.not_trusted else ""
    share = own.measured / max(own.commanded, 1)
    counts = f'<td data-v="{share}">{own.measured}<small>of {own.commanded}</small>{doubted}</td>'
    return f'<tbody><tr><th scope="row">{escape(method)}</th>{counts}{cells}</tr></tbody>'


def _cell(interval: Interval | None, column: Column, tag: str) -> str:
    if interval is None or math.isnan(interval.mean):
        return '<td data-v="">–</td>'
    opened, closed = (f"<{tag}>", f"</{tag}>") if tag else ("", "")
    hint = spread = ""
    if column in FIDELITY_COLUMNS:  # comparable at equal n only
        spread = f"<small>n = {interval.count:,}</small>"
    elif not math.isnan(interval.low):
        bounds = f"{number(interval.low)} – {number(interval.high)}"
        hint, spread = f' title="95 %: {bounds}"', f"<small>{bounds}</small>"
    return f'<td data-v="{interval.mean!r}"{hint}>{opened}{number(interval.mean)}{closed}{spread}</td>'


def _ranks(rows: Mapping[str, Mapping[str, Interval]], column: Column) -> dict[str, str]:
    """Best in bold, second underlined, where there is something to compare; equal as printed is equal in rank."""
    means = {method: _mean(values, column.name) for method, values in rows.items()}
    known = {method: mean for method, mean in means.items() if math.isfinite(mean)}
    if column.kind == "number" or len(known) < 2:
        return {}
    printed = sorted({float(number(mean)) for mean in known.values()}, reverse=column.kind == "higher")
    tags = dict(zip(printed, ("b", "u"), strict=False))
    return {method: tags[float(number(mean))] for method, mean in known.items() if float(number(mean)) in tags}


def _mean(values: Mapping[str, Interval], name: str) -> float:
    interval = values.get(name)
    return math.inf if interval is None or math.isnan(interval.mean) else interval.mean


def _problems(results: Results) -> str:
    title = '<section id="problems" aria-labelledby="problems-title">\n<h2 id="problems-title">Problems</h2>\n'
    if not results.problems:
        return f"{title}<p>None: every commanded clip was measured in full.</p></section>\n"
    rows = "".join(
        f'<tbody><tr><th scope="row">{escape(one.clip)}</th><td class="text">{escape(one.method)}</td>'
        f'<td class="text"><span class="kind">{escape(one.kind)}</span></td><td class="text">{escape(one.reason)}</td>'
        f'<td class="text">{escape(HOW_COUNTED[one.kind])}</td></tr></tbody>'
        for one in results.problems
    )
    heads = "".join(sort_button(name, "text", "") for name in ("Clip", "Method", "Problem", "Reason", "How it counts"))
    return (
        f"{title}<p>Everything that kept a clip out of a number, wholly or partly.</p>\n"
        '<div class="scroll tall" role="region" tabindex="0" aria-label="Table of problems">'
        f'<table class="sortable words"><thead><tr>{heads}</tr></thead>{rows}</table></div></section>\n'
    )


def _about(results: Results) -> str:
    settings = (*results.settings.items(), *results.versions.items())
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(_plain(value))}</dd>" for name, value in settings)
    columns = (*COLUMNS, *shown_fidelity(results))
    meanings = "".join(f"<dt>{escape(column.label)}</dt><dd>{escape(column.meaning)}</dd>" for column in columns)
    return (
        '<section id="about" aria-labelledby="about-title">\n<h2 id="about-title">About the numbers</h2>\n'
        f"<details><summary>What the columns mean</summary><dl>{meanings}</dl>"
        f"<p>Intervals are percentiles of {RESAMPLES:,} resamplings of the clips. They say how much a mean would vary "
        "with other clips of the same kind, and nothing about the error of the estimator.</p></details>\n"
        f"<details><summary>Settings and versions</summary><dl>{facts}</dl></details></section>\n"
    )


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    return "–" if value is None else str(value)

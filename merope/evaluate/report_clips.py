"""The report's table of clips: one row per clip, worst first, that opens to paths and frames of every method."""

import math
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

import torch
from torch import Tensor

from merope.draw.birdseye import birdseye_svg
from merope.evaluate.discover import ClipName
from merope.evaluate.metrics import relative_to_first
from merope.evaluate.record import Thumbnail
from merope.evaluate.report_columns import Column, number, shown_columns, sort_button
from merope.evaluate.results import TITLES, ClipResult, Results
from merope.geometry.poses import rigid

BIRDSEYE_PX = 240
PLAYABLE_SUFFIXES = (".mp4", ".m4v", ".mov", ".webm")  # by browsers
PRIMARY = "cammc"  # the paper's primary metric orders the clips


def clips_section(results: Results, folder: Path | None = None) -> str:
    """Controls, the table, and the details of every clip as text that becomes a part of the page when it is opened."""
    columns = shown_columns(results)
    clips: dict[ClipName, dict[str, ClipResult]] = {}
    for clip in results.clips:
        clips.setdefault(clip.clip, {})[clip.method] = clip
    order = sorted(clips, key=lambda name: (-badness(clips[name]), name))
    bodies = "".join(
        _clip(index, name, clips[name], results.methods, columns, folder) for index, name in enumerate(order)
    )
    several = len(results.methods) > 1
    manoeuvres = list(dict.fromkeys(name.manoeuvre for name in sorted(clips, key=str) if name.manoeuvre))
    return (
        '<section id="clips" aria-labelledby="clips-title">\n<h2 id="clips-title">Clips, worst first</h2>\n'
        f"{_controls(manoeuvres, columns if several else [])}"
        '<div class="scroll tall" role="region" tabindex="0" aria-label="Table of clips">'
        f'<table class="sortable clips" data-metric="{PRIMARY if several else ""}">{_head(results.methods, columns)}'
        f"{bodies}</table></div></section>\n"
    )


def badness(methods: Mapping[str, ClipResult]) -> float:
    """The worst CamMC of a clip; whatever was not measured, or is not trusted, is worse than any number."""
    values = [clip.value(PRIMARY) if clip.record.trusted else math.nan for clip in methods.values()]
    return max(math.inf if math.isnan(value) else value for value in values)


def _controls(manoeuvres: Sequence[str], columns: Sequence[Column]) -> str:
    options = "".join(f'<option value="{escape(name)}">{escape(name)}</option>' for name in manoeuvres)
    metrics = "".join(
        f'<option value="{column.name}"{" selected" if column.name == PRIMARY else ""}>{escape(column.label)}</option>'
        for column in columns
    )
    by_manoeuvre = f'<label>Manoeuvre <select id="manoeuvre"><option value="">all</option>{options}</select></label>'
    by_metric = f'<label>Metric <select id="metric">{metrics}</select></label>'
    return (
        '<form class="controls" role="search" aria-label="Choose clips">'
        '<label>Name <input id="name" type="search" autocomplete="off" placeholder="part of a name"></label>'
        f"{by_manoeuvre if manoeuvres else ''}{by_metric if columns else ''}"
        '<label class="check"><input id="only-problems" type="checkbox"> with problems only</label>'
        '<output id="shown" aria-live="polite"></output></form>\n'
    )


def _head(methods: Sequence[str], columns: Sequence[Column]) -> str:
    """One method: a column per metric. Several: a column per method, of the metric that is chosen."""
    if len(methods) == 1:
        heads = "".join(sort_button(column.label, column.kind, column.meaning) for column in columns)
    else:
        heads = "".join(
            sort_button(method, column.kind, f"{column.label} of {method}", f"m m-{column.name}")
            for method in methods
            for column in columns
        )
    return f"<thead><tr>{sort_button('Clip', 'text', '')}{sort_button('Manoeuvre', 'text', '')}{heads}</tr></thead>"


def _clip(
    index: int,
    name: ClipName,
    own: Mapping[str, ClipResult],
    methods: Sequence[str],
    columns: Sequence[Column],
    folder: Path | None,
) -> str:
    cells = "".join(
        _cell(own[method].value(column.name) if method in own else math.nan, column, len(methods) > 1)
        for method in methods
        for column in columns
    )
    problems = [problem for clip in own.values() for problem in clip.problems]
    kinds = ", ".join(dict.fromkeys(problem.kind for problem in problems))
    mark = f' <span class="kind">{escape(kinds)}</span>' if problems else ""
    details = "".join(_method(own[method], folder) for method in methods if method in own)
    button = f'<button type="button" class="open" aria-expanded="false">{escape(name.base)}</button>'
    return (
        f'<tbody class="clip" id="clip-{index}" data-name="{escape(str(name))}" '
        f'data-manoeuvre="{escape(name.manoeuvre)}" data-problems="{len(problems)}">'
        f'<tr><th scope="row">{button}{mark}</th><td class="text">{escape(name.manoeuvre) or "–"}</td>{cells}</tr>'
        f'<script type="text/plain">{details}</script></tbody>\n'
    )


def _cell(value: float, column: Column, several: bool) -> str:
    names = f' class="m m-{column.name}"' if several else ""
    return f'<td{names} data-v="{"" if math.isnan(value) else repr(value)}">{number(value)}</td>'


def _method(clip: ClipResult, folder: Path | None) -> str:
    """A row of the paper's comparison figures: paths from above, then the video and frames of it."""
    values = "".join(
        f"<div><dt>{TITLES[name]}</dt><dd>{number(clip.value(name))}</dd></div>"
        for name in ("rot_deg", "tr_percent", "auc_10", "cammc", "scale")
    )
    seen = "" if clip.metrics is None else f"{clip.metrics.valid_frames} of {clip.metrics.frames}"
    problems = "".join(
        f'<p class="problem"><span class="kind">{escape(one.kind)}</span> {escape(one.reason)}</p>'
        for one in clip.problems
    )
    of_what = escape(f"of {clip.clip}, {clip.method}")
    frames = "".join(
        f'<figure><img src="{_source(picture)}" width="{picture.width}" '
        f'height="{picture.height}" decoding="async" alt="Frame {picture.frame} {of_what}">'
        f"<figcaption>t = {picture.frame}</figcaption></figure>"
        for picture in clip.record.thumbnails
    )
    return (
        f'<article><h4>{escape(clip.method)}</h4><dl class="values">{values}'
        f"<div><dt>frames with a pose</dt><dd>{seen or '–'}</dd></div>{_check(clip)}</dl>{problems}"
        f'<div class="strip">{_birdseye(clip)}{_video(clip, folder)}<div class="frames">{frames}</div></div></article>'
    )


def _check(clip: ClipResult) -> str:
    check = escape(clip.record.check)
    return f"<div><dt>second estimator</dt><dd>{check}</dd></div>" if check else ""


def _source(picture: Thumbnail) -> str:
    return f"data:image/jpeg;base64,{escape(picture.jpeg_base64)}"


def _video(clip: ClipResult, folder: Path | None) -> str:
    """The video by its place as seen from the page, if browsers play it."""
    video, pictures = clip.record.video, clip.record.thumbnails
    if folder is None or video is None or not pictures or video.suffix.lower() not in PLAYABLE_SUFFIXES:
        return ""
    place, of_what = quote(os.fsencode(os.path.relpath(video, folder))), escape(f"Video of {clip.clip}, {clip.method}")
    return (
        f'<figure class="film"><video controls muted loop preload="metadata" src="{place}" '
        f'poster="{_source(pictures[0])}" aria-label="{of_what}"></video><figcaption>video</figcaption></figure>'
    )


def _birdseye(clip: ClipResult) -> str:
    record, metrics = clip.record, clip.metrics
    if metrics is None:
        return ""
    unit = "m" if record.command_is_metric else "units"
    paths = {"commanded": record.commanded}
    if metrics.gauge_frame is not None:
        size = 1.0 if record.is_metric else abs(metrics.scale)  # backwards stays backwards in the picture
        label = "recovered, metric" if record.is_metric else f"recovered × {number(size)}"
        if math.isfinite(size) and metrics.valid_frames >= 2:
            paths[label] = laid_over(record.commanded, record.recovered[record.valid], metrics.gauge_frame, size)
    return birdseye_svg(paths, BIRDSEYE_PX, unit)


def laid_over(
    commanded: Tensor,  # [T, 4, 4] world_from_camera
    recovered: Tensor,  # [n, 4, 4] of the valid frames, in a world of the estimator's own
    gauge_frame: int,
    scale: float,
) -> Tensor:  # [n, 4, 4] in the commanded world
    """The recovered path with its first frame put on the command's, as the metrics compare them."""
    local = relative_to_first(recovered)
    scaled = rigid(local[:, :3, :3], scale * local[:, :3, 3])
    return torch.matmul(commanded[gauge_frame], scaled)

"""The report's plot: CamMC of every clip, a line of dots per method, with mean and interval."""

import math
from html import escape

from merope.evaluate.results import EVERYTHING, ClipResult, Results

METRIC = "cammc"
WIDTH_PX, ROW_PX, RIGHT_PX, AXIS_PX = 1000, 46, 24, 34
LETTER_PX, LONGEST_NAME = 7.2, 26
JITTER_PX = 12


def spread_plot(results: Results) -> str:
    """Dots lead to their clips; the numbers are in the tables, so readers that cannot see it miss nothing."""
    values = [clip.value(METRIC) for clip in results.clips]
    known = [value for value in values if value > 0]  # NaN compares false
    if len(known) < 2:
        return ""
    low, high = math.log10(min(known)) - 0.04, math.log10(max(known)) + 0.04
    height = ROW_PX * len(results.methods) + AXIS_PX
    left_px = LETTER_PX * min(max(len(method) for method in results.methods), LONGEST_NAME) + 28

    def x(value: float) -> float:
        share = (math.log10(max(value, min(known))) - low) / (high - low)
        return left_px + share * (WIDTH_PX - left_px - RIGHT_PX)

    parts = [_tick(x(tick), tick, height) for tick in _ticks(min(known), max(known))]
    for row, method in enumerate(results.methods):
        y = ROW_PX * (row + 0.5)
        own = [clip for clip in results.clips if clip.method == method and not math.isnan(clip.value(METRIC))]
        parts += [_dot(clip, index, x(clip.value(METRIC)), y) for index, clip in enumerate(own)]
        summary = results.summaries[EVERYTHING].get(method)
        interval = summary.values.get(METRIC) if summary else None
        if interval is not None and not math.isnan(interval.low):
            parts.append(f'<path class="interval" d="M{x(interval.low):.1f} {y}H{x(interval.high):.1f}"/>')
        if interval is not None and not math.isnan(interval.mean):
            parts.append(f'<path class="mean" d="M{x(interval.mean):.1f} {y - 14}v28"/>')
        name = escape(method if len(method) <= LONGEST_NAME else f"{method[: LONGEST_NAME - 1]}…")
        parts.append(f'<text x="{left_px - 14:.1f}" y="{y}" dy=".35em" text-anchor="end">{name}</text>')
    return (
        '<section id="spread" aria-labelledby="spread-title">\n<h2 id="spread-title">CamMC of every clip</h2>\n'
        "<p>A dot is a clip, a ring one that is not trusted; the bar is the mean with its interval. Logarithmic axis, "
        "lower is better. Click a dot to see its clip.</p>\n"
        '<div class="scroll" role="region" tabindex="0" aria-label="Plot of CamMC">'
        f'<svg class="spread" viewBox="0 0 {WIDTH_PX} {height}" width="{WIDTH_PX}" height="{height}" role="img" '
        f'aria-label="CamMC of every clip by method">{"".join(parts)}</svg></div></section>\n'
    )


def _dot(clip: ClipResult, index: int, x: float, y: float) -> str:
    """Spread sideways by the golden ratio, which never lines up."""
    shift = ((index * 0.6180339887) % 1.0 - 0.5) * 2.0 * JITTER_PX
    name, doubted = escape(str(clip.clip)), "" if clip.record.trusted else ' class="doubted"'
    return (
        f'<circle{doubted} data-clip="{name}" cx="{x:.1f}" cy="{y + shift:.1f}" r="4">'
        f"<title>{name}: {clip.value(METRIC):.3g}</title></circle>"
    )


def _tick(x: float, value: float, height: int) -> str:
    bottom = height - AXIS_PX
    line = f'<path class="grid" d="M{x:.1f} 0V{bottom}"/>'
    return f'{line}<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{value:g}</text>'


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from low to high, as coarse as two of them allow; the ends themselves where two do not fit."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1.0, 2.0, 5.0), range(1, 10)):
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        within = [tick for tick in ticks if low <= tick <= high]
        if len(within) >= 2:
            return within
    return sorted({float(f"{end:.3g}") for end in (low, high)})

"""What the paper's Section 3.1 claims, measured: growth with the baseline, and where attention goes because of it.

No trained weights: queries, keys and values are random features of many heads, so that what changes along an axis is
the encoding's doing alone.
"""

import json
import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from merope.attention.length_clamp import with_clamped_lengths
from merope.attention.plan import AttentionPlan
from merope.encodings import encoding
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Pinhole

METHODS = {"gta": "GTA", "ucpe_clamped": "UCPE, clamped", "merope": "MeRoPE", "merope_phases": "MeRoPE, phases"}
BASELINES_M = (0.1, 1.0, 10.0, 100.0, 1e3, 1e4)
MASS_BASELINES_M = (1.0, 10.0, 50.0, 200.0)
LENS = Pinhole(406.0, 406.0, 256.0, 144.0, 512, 288)  # a 64° driving camera
HEADS = 512


@dataclass(frozen=True)
class Growth:
    """One row of the first table: two cameras, `baseline_m` apart along the optical axis."""

    method: str
    baseline_m: float
    logit: float  # root mean square of q·U·k / √d
    largest_logit: float  # in units of its bound for orthogonal U, ‖q‖‖k‖/√d
    value_norm: float  # root mean square of ‖U v‖ / ‖v‖


def straight_path(count: int, length_m: float) -> Cameras:
    """Cameras driving straight ahead, evenly spaced over `length_m`."""
    poses = torch.eye(4, dtype=torch.float64).repeat(count, 1, 1)
    poses[:, 2, 3] = torch.linspace(0, length_m, count, dtype=torch.float64)
    return Cameras(poses, LENS)


def measure_growth(method: str, baseline_m: float) -> Growth:
    """Logits and values of the last of two cameras, which looks back at the first (paper, Eq. 3 and 4)."""
    plan = encoding(method).plan(straight_path(2, baseline_m), grid=(1, 1))
    u = plan.operator(1, 0)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(3, HEADS, plan.head_dim, dtype=torch.float64, generator=generator)
    query, key, value = features[:, :, None].expand(-1, -1, 2, -1).unbind()
    q, k, v = _as_attended(query, key, value, plan)
    logits = torch.einsum("hi,ij,hj->h", q[:, 1], u, k[:, 0]) / math.sqrt(plan.head_dim)
    lengths = features.norm(dim=-1)
    bound = lengths[0] * lengths[1] / math.sqrt(plan.head_dim)
    norms = (v[:, 0] @ u.mT).norm(dim=-1) / lengths[2]
    return Growth(
        method=method,
        baseline_m=baseline_m,
        logit=float(logits.square().mean().sqrt()),
        largest_logit=float((logits.abs() / bound).max()),
        value_norm=float(norms.square().mean().sqrt()),
    )


def _as_attended(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> tuple[Tensor, ...]:  # [HEADS, N, d] each
    """Queries, keys and values of every token as `attend` lets the operators have them."""
    if not plan.clamps_lengths:
        return q, k, v
    return tuple(x[0] for x in with_clamped_lengths(q[None], k[None], v[None], plan))


def attention_mass(
    method: str, length_m: float, frames: int = 13, grid: tuple[int, int] = (3, 5)
) -> Tensor:  # [frames]
    """Share of attention that the last frame's centre token gives to every frame, averaged over random heads.

    Queries and keys of a head share half of their variance: every frame shows the same static scene.
    """
    plan = encoding(method).plan(straight_path(frames, length_m), grid)
    patches = grid[0] * grid[1]
    token = (frames - 1) * patches + patches // 2
    q, k = _features_of_a_scene(plan.key_tokens, plan.head_dim)
    queries, k, _ = _as_attended(q[:, None].expand_as(k), k, k, plan)
    turned = torch.einsum("hi,bij->hbj", queries[:, token], plan.operators(token))
    weights = torch.softmax((turned * k).sum(-1) / math.sqrt(plan.head_dim), dim=-1)  # [HEADS, key tokens]
    return weights.unflatten(-1, (frames, patches)).sum(-1).mean(0)


@lru_cache(maxsize=1)
def _features_of_a_scene(tokens: int, dim: int) -> tuple[Tensor, Tensor]:  # [HEADS, dim], [HEADS, tokens, dim]
    """A query and keys, the same for every method and drive. To draw them takes longer than to attend to them."""
    generator = torch.Generator().manual_seed(0)
    scene, q = torch.randn(2, HEADS, dim, dtype=torch.float64, generator=generator)
    k = torch.randn(HEADS, tokens, dim, dtype=torch.float64, generator=generator)
    return (scene + q) / math.sqrt(2), (scene[:, None] + k) / math.sqrt(2)


def run(folder: Path) -> None:
    """Measure, print the tables, and write growth.json, growth.png and attention-mass.png to `folder`."""
    growth = [measure_growth(method, baseline_m) for baseline_m in BASELINES_M for method in METHODS]
    mass = {m: {length: attention_mass(m, length).tolist() for length in MASS_BASELINES_M} for m in METHODS}
    print(growth_table(growth))
    print(mass_table(mass))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "growth.json").write_text(
        json.dumps({"growth": [asdict(g) for g in growth], "attention_mass": mass}, indent=1)
    )
    for name in (draw_growth(growth, folder), draw_mass(mass, folder)):
        print(f"wrote {name}")
    print(f"wrote {folder / 'growth.json'}")


def growth_table(growth: list[Growth]) -> str:
    """Logits and values by baseline, one column a method."""
    rows = {(g.method, g.baseline_m): g for g in growth}
    lines = [
        "Two cameras on a straight road, random features. A norm-preserving encoding keeps both columns at 1.",
        "",
        f"{'baseline':>10}{'logit, rms':^64}{'‖U v‖ / ‖v‖, rms':^64}",
        f"{'':>10}" + 2 * "".join(f"{label:>16}" for label in METHODS.values()),
    ]
    for baseline_m in BASELINES_M:
        measured = [rows[method, baseline_m] for method in METHODS]
        cells = [*(g.logit for g in measured), *(g.value_norm for g in measured)]
        lines.append(f"{baseline_m:>8g} m" + "".join(f"{value:16.4g}" for value in cells))
    return "\n".join([*lines, ""])


def mass_table(mass: dict[str, dict[float, list[float]]]) -> str:
    """Attention of the last frame on the first and on the last three frames."""
    lines = [
        "Where the last of 13 frames looks: attention of its centre token on the 3 farthest and the 3 nearest frames",
        "(evenly spread it would be 23 % each). Random features that share half of their variance.",
        "",
        f"{'drive':>10}" + "".join(f"{label + ' far':>21}{'near':>8}" for label in METHODS.values()),
    ]
    for length in MASS_BASELINES_M:
        cells = [f"{sum(mass[m][length][:3]):21.1%}{sum(mass[m][length][-3:]):8.1%}" for m in METHODS]
        lines.append(f"{length:>8g} m" + "".join(cells))
    return "\n".join([*lines, ""])


STYLE = {
    "gta": ("o-", "#c44e52", "Reds"),
    "ucpe_clamped": ("s:", "#dd8452", "Oranges"),
    "merope": ("o-", "#4c72b0", "Blues"),
    "merope_phases": ("x--", "#55a868", "Greens"),
}
"""Marks, colour and shades of a method."""


def draw_growth(growth: list[Growth], folder: Path) -> Path:
    """Both columns of the first table against the baseline, log-log."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axis, field, title in zip(
        axes, ("logit", "value_norm"), ("attention logit (rms)", "‖U v‖ / ‖v‖ (rms)"), strict=True
    ):
        for method, (marks, colour, _) in STYLE.items():
            rows = [g for g in growth if g.method == method]
            baselines_m, values = [g.baseline_m for g in rows], [getattr(g, field) for g in rows]
            axis.loglog(baselines_m, values, marks, color=colour, label=METHODS[method])
        axis.set(xlabel="metres between the two cameras", title=title)
        axis.grid(alpha=0.3)
    axes[0].legend()
    return _save(figure, folder / "growth.png")


def draw_mass(mass: dict[str, dict[float, list[float]]], folder: Path) -> Path:
    """Attention mass by frame, one curve a drive length, one panel a method."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(STYLE), figsize=(4.3 * len(STYLE), 3.4), sharey=True, layout="constrained")
    for axis, (method, (_, _, shades)) in zip(axes, STYLE.items(), strict=True):
        for shade, (length, shares) in zip(
            torch.linspace(0.3, 0.95, len(mass[method])), mass[method].items(), strict=True
        ):
            colour = plt.get_cmap(shades)(float(shade))
            axis.plot(range(len(shares)), shares, "o-", color=colour, label=f"{length:g} m", markersize=4)
        axis.set(xlabel="frame (the query is in the last one)", title=f"{METHODS[method]}: attention of the last frame")
        axis.grid(alpha=0.3)
        axis.legend(title="drive", loc="upper center")
    axes[0].set_ylabel("share of attention")
    return _save(figure, folder / "attention-mass.png")


def _save(figure: object, path: Path) -> Path:
    figure.savefig(path, dpi=130)  # type: ignore[attr-defined]
    return path

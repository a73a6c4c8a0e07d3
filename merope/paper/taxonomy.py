"""The paper's taxonomy (Table 1), measured: what each camera encoding does, as numbers behind every Yes and No.

(A) depth-independent full metric relative pose: U does not change when the world frame does, does change with every one
    of the six degrees of freedom of the relative pose, and does not change with a depth that the method assumes.
(B) per-token factorisation: U_ab = O_a K_b. Then U_ab U_cb⁻¹ = O_a O_c⁻¹ is the same for every key b.
(C) norm preservation: U is orthogonal at every baseline.
"""

import json
import math
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from merope.attention.length_clamp import with_clamped_lengths
from merope.attention.plan import AttentionPlan
from merope.encodings import encoding
from merope.encodings.protocol import Encoding
from merope.encodings.urope import URoPE
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Pinhole
from merope.geometry.poses import rigid
from merope.geometry.quaternions import matrix_from_quaternion, quaternion_from_axis_angle

PAPER = {  # name: (A), (B), (C) as printed in the paper's Table 1
    "cape": (True, True, False),
    "gta": (True, True, False),
    "prope": (True, True, False),
    "ucpe": (True, True, False),
    "raynova": (False, True, True),
    "viewrope": (False, True, True),
    "urope": (False, False, True),
    "rayrope": (False, False, False),
    "crepe": (False, False, False),
    "merope": (True, False, True),
}
MEASURED = (*PAPER, "merope_phases", "ucpe_clamped")
"""The methods of the paper, then ours, then SANA-WM's UCPE."""
GRID = (1, 2)
LENS = Pinhole(300.0, 300.0, 250.0, 150.0, 512, 288)
INVARIANT = 1e-9  # a change of U below this is rounding
BASELINES_M = (0.1, 1.0, 10.0, 1e2, 1e3, 1e4)


@dataclass(frozen=True)
class Properties:
    """Measurements of one encoding. Changes of U are largest entries over all pairs of tokens."""

    name: str
    world_change: float  # of U, and of clamped features, under random rigid changes of the world
    blind_directions: int  # of the 6 degrees of freedom of the relative pose
    scale_change: float  # of U when all translations grow by 1 %
    depth_change: float  # of U when every depth that the method assumes or predicts is doubled
    groups: int  # different key operators that a clip of 3 cameras needs
    factorisation_defect: float  # of U_ab U_cb⁻¹ over keys b
    norm_defect: float  # largest |‖U x‖ / ‖x‖ − 1| over baselines
    logit_exponent: float  # logits ∝ baseline^exponent between 1 and 10 km
    value_exponent: float

    @property
    def metric_relative_pose(self) -> bool:
        """(A)"""
        invariant, full = self.world_change < INVARIANT, self.blind_directions == 0
        return invariant and full and self.depth_change < INVARIANT

    @property
    def per_token(self) -> bool:
        """(B)"""
        return self.factorisation_defect < INVARIANT

    @property
    def norm_preserving(self) -> bool:
        """(C)"""
        return self.norm_defect < INVARIANT

    @property
    def measured(self) -> tuple[bool, bool, bool]:
        """(A), (B), (C)"""
        return self.metric_relative_pose, self.per_token, self.norm_preserving

    @property
    def agrees_with_paper(self) -> bool:
        """True of a method that is not in the paper."""
        return self.measured == PAPER.get(self.name, self.measured)


def measure(name: str) -> Properties:
    """All properties of the encoding of that name, with its defaults."""
    method, poses = encoding(name), _clip()
    u = _operators(method, poses)
    scaled = rigid(poses[:, :3, :3], 1.01 * poses[:, :3, 3])
    logit_exponent, value_exponent = _growth_exponents(method)
    return Properties(
        name=name,
        world_change=max(_clamp_change(method), *(_largest(moved - u) for moved in _in_other_worlds(method, poses))),
        blind_directions=sum(_largest(_operators(method, moved) - u) < INVARIANT for moved in _nudged(poses)),
        scale_change=_largest(_operators(method, scaled) - u),
        depth_change=_depth_change(method, poses, u),
        groups=_plan(method, poses).groups,
        factorisation_defect=_factorisation_defect(u),
        norm_defect=max(_norm_defect(_operators(method, _apart(baseline_m))[::5]) for baseline_m in BASELINES_M),
        logit_exponent=logit_exponent,
        value_exponent=value_exponent,
    )


def _operators(method: Encoding, poses: Tensor, depth_factor: float = 1.0) -> Tensor:  # [Nq, Nk, d, d]
    """U of all pairs of tokens; predicted depths are random but fixed, and can be scaled."""
    plan = _plan(method, poses, depth_factor)
    return torch.stack([plan.operators(token) for token in range(plan.query_tokens)])


def _in_other_worlds(method: Encoding, poses: Tensor) -> list[Tensor]:
    return [_operators(method, world @ poses) for world in _worlds()]


def _plan(method: Encoding, poses: Tensor, depth_factor: float = 1.0) -> AttentionPlan:
    return method.plan(Cameras(poses, LENS), GRID, content=_content(method, len(poses), depth_factor))


def _content(method: Encoding, cameras: int, depth_factor: float) -> Tensor | None:  # [1, N, 2]
    """Log depths around e metres and half-widths, for encodings that predict a depth."""
    if method.content_channels == 0:
        return None
    tokens = cameras * GRID[0] * GRID[1]
    noise = torch.rand(1, tokens, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    log_depth, half_width = 0.5 + noise[..., 0] + math.log(depth_factor), 0.1 + 0.2 * noise[..., 1]
    return torch.stack((log_depth, half_width), dim=-1)


def _depth_change(method: Encoding, poses: Tensor, u: Tensor) -> float:
    """Change of U when every assumed depth (URoPE's anchors) and every predicted depth is doubled."""
    doubled = method
    if isinstance(method, URoPE):
        doubled = replace(method, anchors_m=tuple(2 * depth_m for depth_m in method.anchors_m))
    return _largest(_operators(doubled, poses, depth_factor=2.0) - u)


def _clamp_change(method: Encoding) -> float:
    """Change of features by the world frame where `attend` clamps them; 0 for all methods that do not."""
    if not method.clamps_lengths:
        return 0.0
    plans = [_plan(method, world @ _clip()) for world in (torch.eye(4, dtype=torch.float64), *_worlds())]
    shape = (3, 1, 1, plans[0].query_tokens, method.head_dim)
    features = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    q, k, v = features.unbind()
    first, *others = (torch.stack(with_clamped_lengths(q, k, v, plan)) for plan in plans)
    return max(_largest(other - first) for other in others)


def _factorisation_defect(u: Tensor) -> float:
    """Spread over keys b of U_ab U_cb⁻¹, for queries a and c in different cameras."""
    a, c = 0, GRID[0] * GRID[1] + 1
    quotient = u[a] @ torch.linalg.pinv(u[c])
    return _largest(quotient - quotient[:1])


def _norm_defect(u: Tensor) -> float:
    """Largest deviation of a singular value of any U from 1."""
    return _largest(torch.linalg.svdvals(u) - 1)


def _growth_exponents(method: Encoding) -> tuple[float, float]:
    """Slopes of log rms logit and log rms ‖U v‖ against log baseline, from 1 to 10 km.

    The query is in the far camera, the key in the near one: a clamp of keys and values has nothing to do there.
    """
    features = torch.randn(3, 256, method.head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sizes = []
    for baseline_m in (1e3, 1e4):
        plan = _plan(method, _apart(baseline_m))
        q, k, v = features[:, None, :, None].expand(-1, 1, -1, plan.query_tokens, -1).unbind()
        if plan.clamps_lengths:
            q, k, v = with_clamped_lengths(q, k, v, plan)
        query, key, value = q[0, :, -1], k[0, :, 0], v[0, :, 0]
        u = plan.operator(plan.query_tokens - 1, 0)
        logits = torch.einsum("hi,ij,hj->h", query, u, key)
        values = value @ u.mT if method.transform_values else value
        sizes.append((logits.square().mean().sqrt(), values.square().mean().sqrt()))
    logit_slope, value_slope = (float(torch.log10(far / near)) for near, far in zip(*sizes, strict=True))
    return logit_slope, value_slope


def _largest(change: Tensor) -> float:
    return float(change.abs().max())


def _clip() -> Tensor:  # [3, 4, 4]
    """Three cameras a few metres apart that look roughly the same way."""
    axes = torch.nn.functional.normalize(torch.tensor([[1.0, 2, 0.5], [0.2, -1, 0.3], [-1, 0.4, 0.8]]).double(), dim=-1)
    turns = quaternion_from_axis_angle(axes, torch.tensor([0.1, 0.3, -0.2], dtype=torch.float64))
    centres = torch.tensor([[0.0, 0, 0], [0.7, -0.2, 1.1], [-0.4, 0.3, 2.3]], dtype=torch.float64)
    return rigid(matrix_from_quaternion(turns), centres)


def _apart(baseline_m: float) -> Tensor:  # [2, 4, 4]
    """Two of these cameras at a distance, in no special direction."""
    poses = _clip()[:2].clone()
    direction = torch.nn.functional.normalize(torch.tensor([0.5, -0.3, 0.8], dtype=torch.float64), dim=0)
    poses[1, :3, 3] = poses[0, :3, 3] + baseline_m * direction
    return poses


def _worlds() -> Tensor:  # [4, 4, 4]
    quaternions = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    centres = 20 * torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return rigid(matrix_from_quaternion(torch.nn.functional.normalize(quaternions, dim=-1)), centres)


def _nudged(poses: Tensor) -> list[Tensor]:
    """The clip with its second camera moved along, then turned about, each of its own axes."""
    unit = torch.eye(3, dtype=torch.float64)
    steps = [rigid(unit, 0.05 * axis) for axis in unit]
    turns = quaternion_from_axis_angle(unit, torch.full((3,), 0.05, dtype=torch.float64))
    steps += [rigid(matrix_from_quaternion(turn), torch.zeros(3, dtype=torch.float64)) for turn in turns]
    return [torch.stack((poses[0], poses[1] @ step, poses[2])) for step in steps]


def as_json(rows: list[Properties]) -> str:
    """The measurements and what they say, one object a method."""
    names = ("A", "B", "C")
    objects = [
        {
            **asdict(row),
            **dict(zip(names, row.measured, strict=True)),
            "paper": dict(zip(names, PAPER[row.name], strict=True)) if row.name in PAPER else None,
        }
        for row in rows
    ]
    return json.dumps(objects, indent=1)


def table(rows: list[Properties]) -> str:
    """The paper's Table 1 with the numbers behind it."""
    columns = "world frame   blind   1 % scale   2 × depth   groups   factor   norm   logits   values"
    lines = [f"{'':<13} (A)  (B)  (C)    {columns}"]
    for row in rows:
        answers = "  ".join("Yes" if answer else "No " for answer in row.measured)
        numbers = (
            f"{row.world_change:11.1e}  {row.blind_directions:4d}/6  {row.scale_change:10.1e}  {row.depth_change:10.1e}"
            f"  {row.groups:7d}  {row.factorisation_defect:7.0e}  {row.norm_defect:5.0e}"
            f"  b^{row.logit_exponent:5.2f}  b^{row.value_exponent:5.2f}"
        )
        verdict = "" if row.agrees_with_paper else "   ← the paper says otherwise"
        verdict += "" if row.name in PAPER else "   not in the paper"
        lines.append(f"{row.name:<13} {answers}   {numbers}{verdict}")
    lines += [
        "",
        "(A) full metric relative pose, no assumed depth: U keeps still when the world moves, sees all 6 degrees of",
        "    freedom, and does not change when assumed or predicted depths double.",
        "(B) per-token factorisation: U_ab U_cb⁻¹ does not depend on the key b.   (C) orthogonal from 0.1 m to 10 km.",
        "logits, values: growth with the baseline b from 1 to 10 km.",
    ]
    return "\n".join(lines)

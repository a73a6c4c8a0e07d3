"""Errors of attention under a plan against float64, beside those of plain PyTorch in the same dtype."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import merope
from merope.attention.plan import AttentionPlan
from merope.attention.visible_cameras import Visibility
from merope.encodings import ENCODINGS
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Pinhole

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
"""What models run in. Triton's interpreter cuts bits off where it should round to bfloat16, so on the CPU float16."""
LENS = Pinhole(406.0, 406.0, 256.0, 144.0, 512, 288)
PARTS = ("out", "dq", "dk", "dv")
GEOMETRIC = [name for name, kind in ENCODINGS.items() if kind.content_channels == 0]
"""Encodings that read no token content."""
PEAKED = 30.0
"""Factor on queries: logits of that standard deviation."""


@dataclass(frozen=True)
class Errors:
    """Relative errors of output and gradients, in the order of PARTS."""

    ours: list[float]
    plain: list[float]  # of attention without any encoding, over the same keys
    sdpa: list[float]  # of the sdpa backend, PyTorch's own operations, under the same plan

    @property
    def over_plain(self) -> list[float]:
        return [a / b for a, b in zip(self.ours, self.plain, strict=True)]

    @property
    def over_sdpa(self) -> list[float]:
        return [a / b for a, b in zip(self.ours, self.sdpa, strict=True)]


def driving_cameras(clips: int, count: int) -> Cameras:
    """Clips that drive ahead and turn, a different turn in every one."""
    yaw = 0.03 * torch.arange(count, dtype=torch.float64) * torch.linspace(-1, 1, clips, dtype=torch.float64)[:, None]
    poses = torch.eye(4, dtype=torch.float64).repeat(clips, count, 1, 1)
    poses[..., 0, 0], poses[..., 2, 2] = yaw.cos(), yaw.cos()
    poses[..., 0, 2], poses[..., 2, 0] = yaw.sin(), -yaw.sin()
    poses[..., 0, 3], poses[..., 2, 3] = yaw.sin().cumsum(-1), yaw.cos().cumsum(-1)
    return Cameras(poses, LENS).to(DEVICE)


def straight_cameras(coincident: int = 0) -> Cameras:
    """Five cameras along the optical axis, of which so many stand in one place."""
    poses = torch.eye(4, dtype=torch.float64).repeat(5, 1, 1)
    poses[:, 2, 3] = 1.7 * torch.arange(5)
    poses[:coincident] = poses[1].clone()
    return Cameras(poses, LENS).to(DEVICE)


def cases(name: str) -> dict[str, tuple[AttentionPlan, float]]:
    """Plans of an encoding, and the factor on the queries: ordinary and degenerate geometry, shapes, peaked logits."""
    encoding = merope.encoding(name)
    curved, clips = driving_cameras(1, 5), driving_cameras(3, 5)
    other = Cameras(curved.world_from_camera[:, :3].flip(1), curved.lens)
    plans = {
        "curved": encoding.plan(curved, (5, 7)),
        "straight": encoding.plan(straight_cameras(), (5, 7)),
        "coincident": encoding.plan(straight_cameras(coincident=3), (5, 7)),
        "cross": encoding.plan(curved, (5, 7), key=other, key_grid=(4, 9)),
        "batch": encoding.plan(clips, (5, 7)),
        "batch, cross": encoding.plan(clips, (5, 7), key=driving_cameras(3, 4), key_grid=(4, 9)),
        "many cameras": encoding.plan(driving_cameras(1, 48), (2, 3)),
        "few keys": encoding.plan(driving_cameras(1, 2), (1, 3)),
    }
    return {case: (plan, 1.0) for case, plan in plans.items()} | {"peaked": (plans["curved"], PEAKED)}


def visible_cases(name: str) -> dict[str, tuple[AttentionPlan, float]]:
    """As `cases`, of plans in which a query camera sees a part of the keys."""
    encoding, cameras = merope.encoding(name), driving_cameras(2, 12)
    block = {"key": cameras, "times": [9.0, 10.0, 11.0]}
    past = Visibility.block_causal(3, 3, last=6, sink=2, cached=9)
    plans = {
        "causal": encoding.plan(cameras, (5, 7), sees=Visibility.block_causal(12, 3)),
        "window": encoding.plan(cameras, (4, 9), sees=Visibility.block_causal(12, 2, last=4, sink=1)),
        "two copies": encoding.plan(cameras, (5, 7), sees=Visibility.teacher_forcing(6, 3)),
        "block": encoding.plan(cameras.at(slice(9, 12)), (9, 15), **block, sees=past),  # type: ignore[arg-type]
    }
    return {case: (plan, 1.0) for case, plan in plans.items()} | {"peaked": (plans["causal"], PEAKED)}


def random_inputs(plan: AttentionPlan, dtype: torch.dtype, heads: int = 2, factor: float = 1.0) -> list[Tensor]:
    """q, k, v and a gradient of the output, on the plan's device."""
    generator = torch.Generator().manual_seed(0)
    sizes = (plan.query_tokens, plan.key_tokens, plan.key_tokens, plan.query_tokens)
    drawn = [torch.randn(plan.batch, heads, count, plan.head_dim, generator=generator) for count in sizes]
    return [x.to(plan.device, dtype) for x in (factor * drawn[0], *drawn[1:])]


def results(attention: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    """Output and gradients of one call, after memory was filled with NaN."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    torch.full((2**24 if gradient.is_cuda else 1,), torch.nan, device=gradient.device)  # freed at once, and taken again
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient.to(out.dtype))]


def under(plan: AttentionPlan, backend: str, memory_budget: int = 2**30) -> Callable[..., Tensor]:
    return lambda q, k, v: merope.attend(q, k, v, plan, backend, memory_budget)  # type: ignore[arg-type]


def plain_attention(plan: AttentionPlan) -> Callable[..., Tensor]:
    """PyTorch's own, without any encoding, over the keys that the plan's queries see."""
    if plan.visible_keys is None:
        return scaled_dot_product_attention
    seen = [plan.seen_by(camera * plan.tokens_per_camera) for camera in range(plan.query_cameras)]
    rest = [plan.seen_by(plan.query_tokens - 1)] * (plan.query_tokens - plan.query_cameras * plan.tokens_per_camera)
    mask = torch.stack([row for row in seen for _ in range(plan.tokens_per_camera)] + rest)

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return masked


def relative_errors(got: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """All finite: `max` passes over NaN, and nothing is larger than a baseline that is NaN."""
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, exact, strict=True)]
    assert all(math.isfinite(error) for error in errors), f"numbers that are not finite: errors are {errors}"
    return errors


def errors_of(
    plan: AttentionPlan, dtype: torch.dtype, factor: float = 1.0, heads: int = 2, memory_budget: int = 2**30
) -> Errors:
    """Of the fused backend, for random inputs that the dtype holds exactly."""
    *rounded, gradient = random_inputs(plan, dtype, heads, factor)
    exact = [x.double() for x in rounded]
    right = results(under(plan, "sdpa"), exact, gradient)
    plain_right = results(plain_attention(plan), exact, gradient)
    return Errors(
        ours=relative_errors(results(under(plan, "fused", memory_budget), rounded, gradient), right),
        plain=relative_errors(results(plain_attention(plan), rounded, gradient), plain_right),
        sdpa=relative_errors(results(under(plan, "sdpa"), rounded, gradient), right),
    )


def assert_accurate(errors: Errors, against_plain: bool = False) -> None:
    """At most twice the error of plain PyTorch in the same dtype.

    That is attention without any encoding; or PyTorch's operations under the same plan, where an encoding rounds more
    numbers than plain attention has (float16, peaked logits, translations inside of matrices). A CPU's plain attention
    rounds less than a GPU's, so there it is the smaller of the two ratios.
    """
    for part, plain, sdpa in zip(PARTS, errors.over_plain, errors.over_sdpa, strict=True):
        ratio = plain if against_plain and DEVICE.type == "cuda" else min(plain, sdpa)
        assert ratio <= 2, f"{part}: {plain:.2f} × plain attention's error, {sdpa:.2f} × the sdpa backend's"

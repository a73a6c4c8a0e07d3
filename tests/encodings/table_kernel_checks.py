"""Run by test_interpreted_kernels.py: tables of mean phasors and their gradients by kernels.

The PyTorch expressions, which define them, are checked in test_rayrope.py and test_crepe.py.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from scenes import PINHOLE, ZOOM, mixed_cameras, random_content, random_poses, straight_drive

from merope import AttentionPlan, Cameras, Pinhole
from merope.encodings import expected_phasors, rayrope
from merope.encodings.crepe import CRePE
from merope.encodings.expected_phasors import Ladder
from merope.encodings.kernels import mean_phasors, ray_coordinates
from merope.encodings.kernels.mean_phasors import mean_phasor_table
from merope.encodings.protocol import Encoding
from merope.encodings.rayrope import RayRoPE

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_interpreted_kernels.py"

ERROR = {torch.float32: 1e-6, torch.float64: 1e-12}
LENGTHS_RAD = (0.0, 1e-300, 1e-40, 1e-9, 1e-3, 0.09, 0.11, 0.9, 1.1, 3.0, 6.3, 50.0, 1e4)
"""Of segments, twice the half-lengths at which the series give way to quotients among them."""


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is NaN: what a kernel leaves unwritten shows."""
    new_empty, empty_like = Tensor.new_empty, torch.empty_like

    def poison(x: Tensor) -> Tensor:
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))


def assert_close(got: Tensor, right: Tensor, error: float) -> None:
    """Each number to `error` of the largest, or of 1 where all are smaller."""
    assert got.shape == right.shape
    assert (got - right).detach().abs().max() <= error * right.detach().abs().max().clamp_min(1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mean_phasor_of_short_and_long_segments(dtype: torch.dtype) -> None:
    lengths = torch.tensor(LENGTHS_RAD, dtype=torch.float64)
    starts = torch.tensor([0.7, -2e4], dtype=torch.float64)[:, None].expand(2, len(lengths))
    path = torch.stack((starts, starts + lengths), dim=-1).flatten(0, 1)[None, None, :, :, None]  # [1, 1, n, 2, 1]
    ladder = Ladder(torch.ones(1, 1, dtype=torch.float64), coordinate_major=True)
    flags = torch.ones(1, path.shape[2], dtype=torch.bool)
    path.requires_grad_()
    exact = ladder.mean_phasors(path)
    ours = mean_phasor_table(path, ladder.rad_per_unit, True, flags, False, dtype)
    assert_close(ours, exact, ERROR[dtype])
    for part in (0, 1):
        (right,) = torch.autograd.grad(exact[..., part].sum(), path, retain_graph=True)
        (got,) = torch.autograd.grad(ours[..., part].sum(), path, retain_graph=True)
        well = (lengths == 0) | (lengths >= 1e-3)  # between, PyTorch's own derivative of sinc cancels
        assert_close(got[:, :, well.repeat(2)], right[:, :, well.repeat(2)], ERROR[dtype])
        assert_close(got, right, max(ERROR[dtype], 1e-9))


@pytest.mark.parametrize("coordinate_major", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_table_of_tokens_with_and_without_cameras(coordinate_major: bool, transposed: bool) -> None:
    path = torch.randn(2, 3, 5, 4, 3, dtype=torch.float64).requires_grad_()  # five tokens of cameras, four knots
    ladder = Ladder(torch.rand(3, 5, dtype=torch.float64) * 9, coordinate_major)
    flags = torch.tensor([[True, True, False, True, True, False], [False, True, True, True, True, True]])
    ours = mean_phasor_table(path, ladder.rad_per_unit, coordinate_major, flags, transposed, torch.float64)
    values = ladder.mean_phasors(path) * torch.tensor([1.0, -1.0 if transposed else 1.0])
    identity = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(15, 2)
    padded = torch.cat((values, identity.expand(2, 3, 1, 15, 2)), dim=2)
    exact = torch.where((flags & torch.tensor([True] * 5 + [False]))[:, None, :, None, None], padded, identity)
    weight = torch.randn_like(exact)
    assert_close(ours, exact, 1e-12)
    (got,), (right,) = (torch.autograd.grad((x * weight).sum(), path) for x in (ours, exact))
    assert_close(got, right, 1e-12)
    assert (got[0, :, 2] == 0).all()


def tables_and_gradient(make: Callable[[Tensor], AttentionPlan], content: Tensor) -> list[Tensor]:
    content = content.detach().requires_grad_()
    tables = [operator.table for operator in make(content).blocks[0].operators]
    generator = torch.Generator().manual_seed(0)
    loss = sum((t * torch.randn(t.shape, dtype=torch.float64, generator=generator)).sum() for t in tables)
    return [*(t.detach() for t in tables), *torch.autograd.grad(loss, content)]  # type: ignore[arg-type]


def assert_kernels_make(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Tensor], AttentionPlan], content: Tensor, error: float = 1e-10
) -> None:
    """The tables of a plan and the gradient of its content by kernels, against PyTorch's."""
    ours = tables_and_gradient(make, content)
    for module in (expected_phasors, rayrope):
        monkeypatch.setattr(module, "kernels_run_on", lambda _: False, raising=False)
    for got, right in zip(ours, tables_and_gradient(make, content), strict=True):
        assert got.dtype == right.dtype
        assert_close(got, right, error)


SCENES: dict[str, tuple[Callable[[], Cameras], int]] = {  # and samples of the content
    "one clip": (lambda: Cameras(random_poses(3), PINHOLE), 1),
    "one clip for two samples": (lambda: Cameras(random_poses(3), PINHOLE), 2),
    "two clips": (lambda: Cameras(random_poses(2, 3), PINHOLE), 2),
    "two clips of one content": (lambda: Cameras(random_poses(2, 3), PINHOLE), 1),
    "a lens for each camera": (lambda: Cameras(random_poses(2, 3), ZOOM), 2),
    "some without a pose": (lambda: mixed_cameras(batch=True, lens=PINHOLE), 2),
    "straight ahead": (lambda: Cameras(straight_drive(3), Pinhole(120.0, 120.0, 75.0, 45.0, 150, 90)), 1),
}


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("encoding", [RayRoPE(head_dim=52), CRePE(head_dim=14, knots=3)], ids=["rayrope", "crepe"])
def test_plans(monkeypatch: pytest.MonkeyPatch, encoding: Encoding, scene: str) -> None:
    make_cameras, samples = SCENES[scene]
    cameras = make_cameras()
    content = random_content(samples, 7)
    assert_kernels_make(monkeypatch, lambda c: encoding.plan(cameras, (1, 2), content=c, extra_tokens=1), content)


@pytest.mark.parametrize(
    "options", [{"depth_coding": "d"}, {"depth_coding": "asinh_d"}, {"scene_scale": 0.1}, {"point_depth": True}]
)
def test_options_of_rayrope(monkeypatch: pytest.MonkeyPatch, options: dict[str, object]) -> None:
    encoding, cameras = RayRoPE(28, **options), Cameras(random_poses(3), PINHOLE)  # type: ignore[arg-type]
    assert_kernels_make(monkeypatch, lambda c: encoding.plan(cameras, (1, 2), content=c), random_content(1, 6))


def test_points_beside_the_viewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens 1 m ahead of a camera 1 m behind: the depth that the viewer sees is clamped, and gives no gradient."""
    encoding, cameras = RayRoPE(28, depth_coding="d"), Cameras(straight_drive(3, step_m=1.0), PINHOLE)
    content = torch.tensor([5e-5, 1e-5], dtype=torch.float64).expand(1, 3, 2)
    assert_kernels_make(monkeypatch, lambda c: encoding.plan(cameras, (1, 1), content=c), content)


def test_keys_of_other_cameras(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = Cameras(random_poses(2), PINHOLE), Cameras(random_poses(2, 3, seed=4), ZOOM)

    def make(content: Tensor) -> AttentionPlan:
        own = content[:, :4]
        return RayRoPE(28).plan(query, (1, 2), content=own, key=key, key_grid=(1, 1), key_content=content[:, 4:])

    assert_kernels_make(monkeypatch, make, random_content(2, 7))


def test_float32_tables_of_a_long_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Camera centres of 100 m have phases of 10⁴ rad: they are wrapped before they are rounded."""
    cameras = Cameras(random_poses(3, spread_m=100.0), PINHOLE, plan_dtype=torch.float32)
    content = random_content(1, 3)
    assert_kernels_make(monkeypatch, lambda c: RayRoPE().plan(cameras, (1, 1), content=c), content, error=1e-6)


def test_what_the_kernels_cannot_take_goes_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of poses need RayRoPE's own expression, and collapsed intervals the whole of it."""
    calls: list[str] = []
    originals = (mean_phasors._launch, ray_coordinates._launch)
    for name, module, launch in zip(("phasors", "rays"), (mean_phasors, ray_coordinates), originals, strict=True):

        def noted(*arguments: object, name: str = name, launch: Callable[..., None] = launch) -> None:
            calls.append(name)
            launch(*arguments)

        monkeypatch.setattr(module, "_launch", noted)
    content, poses = random_content(1, 4), random_poses(2)
    RayRoPE(28).plan(Cameras(poses, PINHOLE), (1, 2), content=content)
    assert calls == ["rays", "rays", "phasors", "phasors"]
    calls.clear()
    RayRoPE(28, collapse_tol=0.01).plan(Cameras(poses, PINHOLE), (1, 2), content=content)
    assert "phasors" not in calls
    calls.clear()
    learned = poses.clone().requires_grad_()
    plan = RayRoPE(28).plan(Cameras(learned, PINHOLE), (1, 2), content=content)
    plan.blocks[0].key.table.square().sum().backward()
    assert "rays" not in calls
    assert learned.grad is not None
    assert learned.grad.abs().max() > 0

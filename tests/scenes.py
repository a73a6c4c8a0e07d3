"""Camera paths and inputs that the tests share."""

import math

import torch
from torch import Tensor

from merope import (
    AttentionPlan,
    BrownConrady,
    Cameras,
    Equirectangular,
    KannalaBrandt,
    Lens,
    Pinhole,
    UnifiedCamera,
    attend,
)
from merope.attention.dispatch import Backend
from merope.encodings.protocol import Encoding
from merope.geometry.poses import rigid
from merope.geometry.quaternions import matrix_from_quaternion

PINHOLE = Pinhole(120.0, 125.0, 128.0, 70.0, 256, 144)
FISHEYE = UnifiedCamera.from_fov(195.0, 2.13, 256, 144)
RIMMED = UnifiedCamera(60.0, 60.0, 100.0, 72.0, 1.8, 256, 144)  # its corners see nothing
ZOOM = Pinhole(torch.tensor([90.0, 110.0, 130.0]), 100.0, 128.0, torch.tensor([72.0, 70.0, 60.0]), 256, 144)  # of three
LENSES: dict[str, Lens] = {
    "pinhole": PINHOLE,
    "fisheye": FISHEYE,
    "brown": BrownConrady(120.0, 125.0, 128.0, 70.0, 256, 144, k1=-0.1, p1=0.001),
    "kannala": KannalaBrandt(80.0, 80.0, 128.0, 72.0, 256, 144, k1=0.01),
    "panorama": Equirectangular(256, 128),
}


def random_rotations(*shape: int, seed: int = 0) -> Tensor:  # [*shape, 3, 3] float64
    quaternion = torch.randn(*shape, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return matrix_from_quaternion(torch.nn.functional.normalize(quaternion, dim=-1))


def random_poses(*shape: int, seed: int = 0, spread_m: float = 5.0) -> Tensor:  # [*shape, 4, 4] float64
    centres = torch.randn(*shape, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
    return rigid(random_rotations(*shape, seed=seed), spread_m * centres)


def straight_drive(count: int, step_m: float = 1.7) -> Tensor:  # [count, 4, 4]
    """Driving exactly along the optical axis: every past epipole is exactly −z, on MinRot's pole."""
    poses = torch.eye(4, dtype=torch.float64).repeat(count, 1, 1)
    poses[:, 2, 3] = step_m * torch.arange(count, dtype=torch.float64)
    return poses


def curved_drive(count: int, step_m: float = 1.7, yaw_step_rad: float = 0.07) -> Tensor:  # [count, 4, 4]
    poses = [torch.eye(4, dtype=torch.float64)]
    c, s = math.cos(yaw_step_rad), math.sin(yaw_step_rad)
    step = torch.tensor([[c, 0, s, 0.1], [0, 1, 0, 0], [-s, 0, c, step_m], [0, 0, 0, 1]], dtype=torch.float64)
    for _ in range(count - 1):
        poses.append(poses[-1] @ step)
    return torch.stack(poses)


def degenerate_cameras() -> dict[str, Cameras]:
    """Every way in which the paper's construction is undefined, on odd × odd grids so that a central ray exists."""
    centred = Pinhole(120.0, 120.0, 75.0, 45.0, 150, 90)
    backward = random_poses(1, seed=3).repeat(4, 1, 1)
    backward[2:] = backward[2:] @ torch.diag(torch.tensor([-1.0, 1.0, -1.0, 1.0], dtype=torch.float64))
    backward[1, :3, 3] += 3.0 * backward[1, :3, 2]
    tiny = random_poses(4, seed=5)
    tiny[:, :3, 3] = tiny[0, :3, 3] + 1e-12 * torch.randn(4, 3, dtype=torch.float64)
    return {
        "straight": Cameras(straight_drive(5), centred),
        "reversing": Cameras(straight_drive(5).flip(0), centred),
        "coincident": Cameras(torch.cat((random_poses(1).repeat(3, 1, 1), random_poses(1, seed=9))), centred),
        "opposite views": Cameras(backward, centred),
        "1e-12 m": Cameras(tiny, centred),
        "1e7 m": Cameras(random_poses(4, seed=7, spread_m=1e7), centred),
        "straight 1e7 m": Cameras(straight_drive(4, step_m=1e7), centred),
        "fisheye straight": Cameras(straight_drive(4), UnifiedCamera.from_fov(200.0, 2.3, 150, 90)),
    }


def random_qkv(batch: int, heads: int, tokens: int, dim: int, key_tokens: int | None = None) -> tuple[Tensor, ...]:
    shapes = ((batch, heads, n, dim) for n in (tokens, key_tokens or tokens, key_tokens or tokens))
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)


def random_content(batch: int, tokens: int, seed: int = 0) -> Tensor:  # [batch, tokens, 2] float64
    """Log depths about 1, half-widths of both signs, some beyond every clamp; the first clip's are those of one."""
    generator = torch.Generator().manual_seed(seed)
    clips = [torch.randn(tokens, 2, dtype=torch.float64, generator=generator) for _ in range(batch)]
    content = torch.stack(clips) + torch.tensor([1.0, 0.5])
    content[:, 0], content[:, -1] = torch.tensor([8.0, 0.0]), torch.tensor([-6.0, 1.0])
    return content


def mixed_cameras(batch: bool, lens: Lens = RIMMED) -> Cameras:
    """Three cameras of which some have no pose (their matrices are NaN), by default through a lens with a rim."""
    poses = random_poses(2, 3) if batch else random_poses(3)
    has_pose = torch.tensor([[True, False, True], [False, True, True]]) if batch else torch.tensor([True, False, True])
    poses[~has_pose] = float("nan")
    return Cameras(poses, lens, has_pose)


def assert_backends_agree(plan: AttentionPlan, batch: int = 1, heads: int = 2) -> None:
    q, k, v = random_qkv(batch, heads, plan.query_tokens, plan.head_dim, plan.key_tokens)
    reference = attend(q, k, v, plan, backend="reference")
    assert (attend(q, k, v, plan, backend="sdpa") - reference).abs().max() < 1e-11


def assert_gradients_reach_the_content(encoding: Encoding, cameras: Cameras, content: Tensor, backend: Backend) -> None:
    """They are exact, and none of the two cameras' two tokens is left out; the extra token neither gives nor gets."""
    content = content.requires_grad_()
    q, k, v = random_qkv(1, 1, 5, encoding.head_dim)

    def attended(content: Tensor) -> Tensor:  # [5, d]
        plan = encoding.plan(cameras, (1, 2), extra_tokens=1, content=content)
        return attend(q, k, v, plan, backend=backend)[0, 0]

    assert torch.autograd.gradcheck(lambda content: attended(content)[:4], (content,))
    out = attended(content)
    (gradient,) = torch.autograd.grad(out.square().sum(), content, retain_graph=True)
    assert (gradient[:, :4].abs() > 0).all()
    assert (gradient[:, 4] == 0).all()
    (of_extra,) = torch.autograd.grad(out[4].square().sum(), content)
    assert (of_extra == 0).all()

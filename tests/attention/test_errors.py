"""Bad input is refused with the argument's name, what was expected, what came, and the fix."""

from collections.abc import Callable

import pytest
import torch
from scenes import PINHOLE, random_poses, random_qkv

import merope
from merope import Cameras, MeRoPE

GRID = (2, 3)


def poses(change: Callable[[torch.Tensor], object]) -> Callable[[], object]:
    return lambda: Cameras(change(random_poses(3)), PINHOLE)  # type: ignore[arg-type]


def times_at(factor: float, *index: object) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(value: torch.Tensor) -> torch.Tensor:
        value[index] = value[index] * factor
        return value

    return change


def attend(change: Callable[[dict[str, object]], None]) -> Callable[[], object]:
    def make() -> object:
        q, k, v = random_qkv(1, 2, 18, 128)
        arguments: dict[str, object] = {
            "q": q,
            "k": k,
            "v": v,
            "plan": MeRoPE().plan(Cameras(random_poses(3), PINHOLE), GRID),
        }
        change(arguments)
        return merope.attend(**arguments)  # type: ignore[arg-type]

    return make


def plan(**options: object) -> Callable[[], object]:
    return lambda: MeRoPE().plan(Cameras(random_poses(3), PINHOLE), **{"grid": GRID, **options})  # type: ignore[arg-type]


CASES = {
    "scaled rotation": (poses(times_at(1.01, slice(None), slice(3), slice(3))), "world_from_camera.*rotations.*defect"),
    "reflection": (poses(times_at(-1, 1, slice(3), 0)), "world_from_camera.*reflection at index \\[1\\].*diag"),
    "nan": (poses(times_at(float("nan"), 2, 0, 3)), "world_from_camera.*finite.*index \\[2\\]"),
    "inf": (poses(times_at(float("inf"), 0, 0, 3)), "world_from_camera.*finite"),
    "3×4": (poses(lambda p: p[:, :3]), "world_from_camera.*\\[3, 3, 4\\].*append the row"),
    "row vectors": (poses(lambda p: p.mT), "world_from_camera.*\\[0, 0, 0, 1\\].*transpose"),
    "zero cameras": (poses(lambda p: p[:0]), "world_from_camera.*at least one camera.*\\[0, 4, 4\\]"),
    "one matrix": (poses(lambda p: p[0]), "world_from_camera.*\\[4, 4\\]"),
    "integer poses": (poses(lambda p: p.to(torch.int64)), "world_from_camera.*float32 or float64.*int64"),
    "bf16 poses": (poses(lambda p: p.bfloat16()), "world_from_camera.*float32 or float64.*bfloat16"),
    "list": (poses(lambda p: p.tolist()), "world_from_camera.*torch.Tensor.*list"),
    "has_pose": (lambda: Cameras(random_poses(3), PINHOLE, torch.ones(2).bool()), "has_pose.*\\[3\\].*\\[2\\]"),
    "half plan": (lambda: Cameras(random_poses(3), PINHOLE, dtype=torch.bfloat16), "dtype.*bfloat16"),
    "lens": (
        lambda: Cameras(random_poses(3), merope.Pinhole(torch.ones(2), 1.0, 1.0, 1.0, 4, 4)),
        "lens.*\\[3\\].*\\[2\\]",
    ),
    "grid": (plan(grid=(0, 3)), "grid.*rows, columns.*\\(0, 3\\)"),
    "grid of floats": (plan(grid=(2.0, 3.0)), "grid.*rows, columns"),
    "key grid alone": (plan(key_grid=(2, 2)), "key must be given"),
    "key grid": (plan(key=Cameras(random_poses(2), PINHOLE), key_grid=(2, 0)), "key_grid.*\\(2, 0\\)"),
    "times": (plan(times=[0.0, 1.0]), "times.*\\[3\\].*\\[2\\]"),
    "times nan": (plan(times=[0.0, 1.0, float("nan")]), "times.*finite"),
    "extra": (plan(extra_tokens=-1), "extra_tokens.*-1"),
    "key batch": (
        lambda: MeRoPE().plan(Cameras(random_poses(2, 3), PINHOLE), GRID, key=Cameras(random_poses(3, 3), PINHOLE)),
        "key.*batch.*\\[2, 3\\]",
    ),
    "encoding": (lambda: merope.encoding("merop"), "name must be one of.*merope.*'merop'"),
    "tokens": (attend(lambda a: a.update(q=random_qkv(1, 2, 17, 128)[0])), "q.*18 tokens, got 17"),
    "key tokens": (attend(lambda a: a.update(k=random_qkv(1, 2, 20, 128)[0])), "k.*18 tokens, got 20"),
    "head_dim": (attend(lambda a: a.update(q=random_qkv(1, 2, 18, 96)[0])), "q.*head_dim 128, got 96"),
    "heads": (attend(lambda a: a.update(v=random_qkv(1, 1, 18, 128)[0])), "v.*\\[1, 2\\], got \\[1, 1\\]"),
    "3 dimensions": (attend(lambda a: a.update(q=a["q"][0])), "q.*batch, heads, tokens, head_dim"),  # type: ignore[index]
    "integers": (attend(lambda a: a.update({n: a[n].long() for n in "qkv"})), "q.*floating point.*int64"),  # type: ignore[attr-defined]
    "mixed dtypes": (attend(lambda a: a.update(k=a["k"].float())), "k.*one dtype with q.*float32"),  # type: ignore[attr-defined]
    "backend": (attend(lambda a: a.update(backend="flash")), "backend.*auto.*'flash'"),
    "batch": (
        attend(lambda a: a.update(plan=MeRoPE().plan(Cameras(random_poses(2, 3), PINHOLE), GRID))),
        "q.*2 clips, got 1",
    ),
    "device": (
        attend(lambda a: a.update({n: a[n].to("meta") for n in "qkv"})),  # type: ignore[attr-defined]
        "q.*device cpu, got meta.*plan.to",
    ),
    "half tables": (attend(lambda a: a["plan"].to(dtype=torch.float16) and None), "dtype.*float16"),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    make, message = CASES[name]
    with pytest.raises(ValueError, match=f"(?s){message}.*;|{message}"):
        make()


def test_rounded_rotations_are_accepted_and_repaired() -> None:
    """Six printed digits are normal in text files; the plan is orthogonal all the same."""
    rounded = (random_poses(3) * 1e6).round() / 1e6
    plan_of_rounded = MeRoPE().plan(Cameras(rounded, PINHOLE), GRID)
    u = plan_of_rounded.operators(0)
    assert (u.mT @ u - torch.eye(128, dtype=torch.float64)).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_output_keeps_the_dtype(dtype: torch.dtype, backend: str) -> None:
    some_plan = MeRoPE().plan(Cameras(random_poses(2), PINHOLE), (1, 2))
    q, k, v = (x.to(dtype) for x in random_qkv(1, 1, 4, 128))
    assert merope.attend(q, k, v, some_plan, backend=backend).dtype == dtype  # type: ignore[arg-type]

"""Bad input is refused with the argument's name, what was expected, what came, and the fix."""

import re
import warnings
from collections.abc import Callable

import pytest
import torch
from scenes import PINHOLE, random_poses, random_qkv

import merope
from merope import Cameras, Lens, MeRoPE
from merope.attention.operators import Operator
from merope.attention.plan import Block
from merope.encodings.tokens import query_and_key_tokens
from tests.foreign_plans import KEYS, QUERIES, operator, plan_of

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


def block(start: int, stop: int, query: Operator | None, key: Operator, names: tuple[str, ...] = ("own",)) -> object:
    """A plan of such blocks, one after the other."""
    width = stop - start
    places = [(name, start + i * width, stop + i * width) for i, name in enumerate(names)]
    return plan_of([Block(name, *channels, query, key, camera=True) for name, *channels in places])


CASES = {
    "same names": (
        lambda: block(0, 32, None, operator("phasor", 16, KEYS), ("twice", "twice")),
        "blocks.*different names.*twice",
    ),
    "beyond the head": (lambda: block(112, 144, None, operator("phasor", 16, KEYS)), "blocks.*128 channels.*144"),
    "query by camera": (
        lambda: block(0, 32, operator("phasor", 16, QUERIES, groups=2), operator("phasor", 16, KEYS)),
        'query table of block "own".*one group.*\\[1, 1, 2, 6, 16, 2\\]',
    ),
    "groups": (lambda: block(0, 32, None, operator("phasor", 16, KEYS, groups=3)), "key table.*1 or 2 query cameras"),
    "rows": (lambda: block(0, 32, None, operator("phasor", 16, KEYS - 1)), "key table.*one row for each of 4 tokens"),
    "row for all": (lambda: block(0, 32, None, operator("phasor", 16, 1)), "key table.*one row for each of 4 tokens"),
    "rows of cameras": (
        lambda: block(0, 32, None, operator("phasor", 16, KEYS + 2, cameras=2)),
        "key table.*one row for each of 4 tokens",
    ),
    "clips": (
        lambda: block(0, 32, operator("phasor", 16, QUERIES, batch=2), operator("phasor", 16, KEYS, batch=3)),
        "query table.*1 or 3 clips",
    ),
    "unfilled": (lambda: block(0, 32, None, operator("matrix", 3, KEYS, size=3)), "key table.*fill 32 channels"),
    "halves": (
        lambda: block(0, 32, None, operator("phasor", 8, KEYS, split_halves=True)),
        "key table.*1 or 16 matrices of size 2",
    ),
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
    "half plan": (lambda: Cameras(random_poses(3), PINHOLE, plan_dtype=torch.bfloat16), "plan_dtype.*bfloat16"),
    "3×4 with has_pose": (
        lambda: Cameras(random_poses(3)[:, :3], PINHOLE, torch.ones(3).bool()),
        "world_from_camera.*\\[3, 3, 4\\]",
    ),
    "has_pose list": (lambda: Cameras(random_poses(2), PINHOLE, [True, True]), "has_pose.*bool tensor \\[2\\]"),  # type: ignore[arg-type]
    "has_pose device": (
        lambda: Cameras(random_poses(2), PINHOLE, torch.ones(2, device="meta").bool()),
        "has_pose.*on cpu.*meta",
    ),
    "no lens": (lambda: Cameras(random_poses(2), None), "lens.*None.*Pinhole"),  # type: ignore[arg-type]
    "lens": (
        lambda: Cameras(random_poses(3), merope.Pinhole(torch.ones(2), 1.0, 1.0, 1.0, 4, 4)),
        "lens.*\\[3\\].*\\[2\\]",
    ),
    "grid": (plan(grid=(0, 3)), "grid.*rows, columns.*\\(0, 3\\)"),
    "grid of bools": (plan(grid=(True, 3)), "grid.*rows, columns"),
    "grid of floats": (plan(grid=(2.0, 3.0)), "grid.*rows, columns"),
    "key grid alone": (plan(key_grid=(2, 2)), "key must be given"),
    "key grid": (plan(key=Cameras(random_poses(2), PINHOLE), key_grid=(2, 0)), "key_grid.*\\(2, 0\\)"),
    "times": (plan(times=[0.0, 1.0]), "times must be one per camera \\[3\\], got \\[2\\];"),
    "batched times": (plan(times=torch.zeros(2, 3)), "times.*\\[3\\].*\\[2, 3\\].*batched cameras"),
    "times nan": (plan(times=[0.0, 1.0, float("nan")]), "times must be finite, got NaN or inf;"),
    "extra": (plan(extra_tokens=-1), "extra_tokens.*-1"),
    "key batch": (
        lambda: MeRoPE().plan(Cameras(random_poses(2, 3), PINHOLE), GRID, key=Cameras(random_poses(3, 3), PINHOLE)),
        "key.*batch.*\\[2, 3\\]",
    ),
    "encoding": (lambda: merope.encoding("merop"), "name must be one of.*merope.*'merop'"),
    "capitals": (lambda: merope.encoding("MeRoPE"), "name must be one of.*'MeRoPE'; it is spelt 'merope'"),
    "tokens": (attend(lambda a: a.update(q=random_qkv(1, 2, 17, 128)[0])), "q.*18 tokens, got 17"),
    "key tokens": (attend(lambda a: a.update(k=random_qkv(1, 2, 20, 128)[0])), "k.*18 tokens, got 20"),
    "head_dim": (attend(lambda a: a.update(q=random_qkv(1, 2, 18, 96)[0])), "q.*head_dim 128, got 96"),
    "heads": (attend(lambda a: a.update(v=random_qkv(1, 1, 18, 128)[0])), "v.*\\[1, 2\\], got \\[1, 1\\]"),
    "3 dimensions": (attend(lambda a: a.update(q=a["q"][0])), "q.*batch, heads, tokens, head_dim"),  # type: ignore[index]
    "integers": (attend(lambda a: a.update({n: a[n].long() for n in "qkv"})), "q.*floating point.*int64"),  # type: ignore[attr-defined]
    "mixed dtypes": (attend(lambda a: a.update(k=a["k"].float())), "k.*one dtype with q.*float32"),  # type: ignore[attr-defined]
    "empty": (attend(lambda a: a.update({n: a[n][:0] for n in "qkv"})), "q.*not empty.*\\[0, 2, 18, 128\\]"),  # type: ignore[index]
    "budget": (attend(lambda a: a.update(memory_budget=1e9)), "memory_budget.*int.*1000000000"),
    "operator": (lambda: MeRoPE().plan(Cameras(random_poses(1), PINHOLE), GRID).operator(-1, 0), "query_token.*0 … 5"),
    "operator end": (lambda: MeRoPE().plan(Cameras(random_poses(1), PINHOLE), GRID).operator(6, 0), "query_token.*… 5"),
    "operator key": (lambda: MeRoPE().plan(Cameras(random_poses(1), PINHOLE), GRID).operator(0, 6), "key_token.*0 … 5"),
    "content": (plan(content=torch.zeros(1, 18, 2)), "content.*0 channels for MeRoPE"),
    "no content": (
        lambda: merope.encoding("rayrope").plan(Cameras(random_poses(3), PINHOLE), GRID),
        "content.*2 channels",
    ),
    "no tensor": (attend(lambda a: a.update(k=None)), "k must be .*got .*NoneType"),
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
    "half alone": (attend(lambda a: a["plan"].to(torch.float16) and None), "dtype must be.*float16"),  # type: ignore[attr-defined]
    "two dtypes": (
        attend(lambda a: a["plan"].to(torch.float32, torch.float64) and None),  # type: ignore[attr-defined]
        "device must be a device, got torch.float32; pass plan.to",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    make, message = CASES[name]
    with pytest.raises(ValueError, match=f"(?s){message}") as refused:
        make()
    assert re.search(r" must be .+, got .+; .+", str(refused.value))


@pytest.mark.parametrize(
    ("lens", "grid", "size"),
    [
        (PINHOLE, (9, 16), None),
        (merope.Pinhole(120.0, 120.0, 200.0, 80.0, 400, 160), (1, 1), None),
        (PINHOLE, (16, 9), "28 pixels wide and 9 high"),
        (PINHOLE, (2, 16), "16 pixels wide and 72 high"),
        (merope.Equirectangular(256, 128), (16, 9), None),
    ],
)
def test_tokens_far_from_square_are_told(lens: Lens, grid: tuple[int, int], size: str | None) -> None:
    cameras = Cameras(random_poses(2), lens)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        MeRoPE().plan(cameras, grid)
        MeRoPE().plan(Cameras(random_poses(2), PINHOLE), (9, 16), key=cameras, key_grid=grid)
    told = [f"{name} {grid} of a lens of 256×144 pixels makes tokens {size}" for name in ("grid", "key_grid") if size]
    assert [str(one.message) for one in seen] == [f"{text}; a grid is (rows, columns)" for text in told]
    assert {one.filename for one in seen} <= {__file__}


def test_a_graph_of_tokens_far_from_square_is_whole() -> None:
    cameras = Cameras(random_poses(2), PINHOLE)

    def rays() -> torch.Tensor:
        return query_and_key_tokens(cameras, (16, 9), None, None, None, None, 0, None, None, None)[0].rays

    assert torch.equal(torch.compile(rays, fullgraph=True, backend="eager")(), cameras.rays((16, 9))[0][None])


def test_rounded_rotations_are_accepted_and_repaired() -> None:
    """Six printed digits are normal in text files; the plan is orthogonal all the same."""
    rounded = (random_poses(3) * 1e6).round() / 1e6
    plan_of_rounded = MeRoPE().plan(Cameras(rounded, PINHOLE), GRID)
    u = plan_of_rounded.operators(0)
    assert (u.mT @ u - torch.eye(128, dtype=torch.float64)).abs().max() < 1e-12


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_nothing_is_cast_behind_the_callers_back(dtype: torch.dtype, backend: str, autocast: bool) -> None:
    """The output has the dtype of q and at most the error of rounding to it what goes in and out, also in autocast."""
    some_plan = MeRoPE().plan(Cameras(random_poses(2).float(), PINHOLE), (1, 2))
    q, k, v = (x.to(dtype) for x in random_qkv(1, 1, 4, 128))
    exact = merope.attend(q.double(), k.double(), v.double(), some_plan)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = merope.attend(q, k, v, some_plan, backend=backend)  # type: ignore[arg-type]
        u = some_plan.operator(0, 3)
    assert out.dtype == dtype
    assert (out.double() - exact).norm() / exact.norm() < 4 * torch.finfo(dtype).eps
    assert (u.mT.double() @ u.double() - torch.eye(128)).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MeRoPE().plan(random_poses(3), GRID), "cameras must be merope.Cameras, got Tensor"),
        (lambda: MeRoPE().plan(None, GRID), "cameras must be merope.Cameras, got NoneType"),
        (lambda: MeRoPE().plan(Cameras(random_poses(3), PINHOLE), GRID, key=random_poses(3)), "key must be merope.Cam"),
        (lambda: merope.attend(*random_qkv(1, 2, 18, 128), None), "plan must be an AttentionPlan, got NoneType"),
        (lambda: merope.attend(*random_qkv(1, 2, 18, 128), MeRoPE()), "plan must be an AttentionPlan, got MeRoPE"),
    ],
)
def test_another_kind_of_object_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        call()

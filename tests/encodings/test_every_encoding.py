"""What holds of every encoding: backends, batches, tokens without a camera, world frame, norms, finite gradients."""

from dataclasses import fields, replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods import METHODS, Method, each_method, each_method_whose, each_variant_with, plan
from scenes import (
    FISHEYE,
    PINHOLE,
    ZOOM,
    assert_backends_agree,
    degenerate_cameras,
    mixed_cameras,
    random_content,
    random_poses,
    random_qkv,
    random_rotations,
    straight_drive,
)
from torch import Tensor

import merope
from merope import Cameras, Lens, Pinhole
from merope.attention.length_clamp import with_clamped_lengths
from merope.encodings import ENCODINGS
from merope.encodings.protocol import Encoding
from merope.geometry.poses import rigid

GRID = (2, 3)
SEEDS = st.integers(0, 10**6)
GEOMETRIES = list(degenerate_cameras())
degenerate = cache(degenerate_cameras)


def test_the_table_has_every_encoding() -> None:
    assert set(METHODS) == set(ENCODINGS) - {"merope", "none"}
    for name, method in METHODS.items():
        assert all(type(encoding) is ENCODINGS[name] for encoding in method.instances.values())


def contents_of(encoding: Encoding, content: Tensor) -> dict[str, Tensor]:
    """The argument of `plan`, for an encoding that reads it."""
    return {"content": content} if encoding.content_channels else {}


def with_and_without_values(encoding: Encoding) -> tuple[Encoding, Encoding]:
    return replace(encoding, transform_values=True), replace(encoding, transform_values=False)


@each_method
def test_cross_attention_with_other_cameras_grid_and_times(method: Method) -> None:
    key = Cameras(random_poses(2, seed=5), method.other_lens)
    times = {"times": [0.0, 0.5, 7.0], "key_times": torch.tensor([100.0, 101.25])}
    for lens in method.lenses.values() if method.projects else (ZOOM,):
        query = Cameras(random_poses(3), lens)
        for encoding in (*with_and_without_values(method.plain), *(method.options.values() if lens is ZOOM else ())):
            assert_backends_agree(plan(encoding, query, GRID, key=key, key_grid=(3, 2), **times))


def of_clip(cameras: Cameras, clip: int) -> Cameras:
    """One clip of a batch, with its own lenses."""
    if cameras.world_from_camera.ndim == 3:
        return cameras
    has_pose = None if cameras.has_pose is None else cameras.has_pose[clip]
    lens = cameras.lens
    lens = replace(lens, fx=lens.fx[clip]) if len(lens.batch_shape) == 2 else lens
    return Cameras(cameras.world_from_camera[clip], lens, has_pose)


def assert_mixed(flags: Tensor) -> None:
    """Every clip has tokens with a camera and tokens without."""
    assert flags.any(-1).all()
    assert (~flags).any(-1).all()


@each_variant_with("clips", [(1, 1, 2), (2, 2, 2)], projecting=[(1, 2, 2), (2, 1, 1)])
def test_cross_attention_of_batches(method: Method, encoding: Encoding, clips: tuple[int, int, int]) -> None:
    """Poses of queries, poses of keys and contents may each be of one clip or of two."""
    query = mixed_cameras(clips[0] == 2, method.mixed_lens)
    key = Cameras(random_poses(clips[1], 2, seed=5), method.pair_of_lenses(clips[1]))
    options = {"key_grid": (3, 2), "key_times": [100.0, 101.5], "key_extra_tokens": 1}
    together = plan(encoding, query, GRID, clips[2], key=key, **options)
    assert_mixed(together.query_has_camera)
    assert_mixed(together.key_has_camera)
    assert_backends_agree(together, batch=2)
    first = plan(encoding, of_clip(query, 0), GRID, key=of_clip(key, 0), **options)
    for token in (4, 16):
        assert (first.operators(token) - together.operators(token)).abs().max() < 1e-12


@pytest.mark.parametrize("lens_shape", [(), (3,), (2, 3)])
@each_method
def test_a_batch_is_its_clips_one_by_one(method: Method, lens_shape: tuple[int, ...]) -> None:
    content = random_content(2, 18)
    for lens in method.lenses_with(80 + 40 * torch.rand(lens_shape, dtype=torch.float64)):
        cameras = Cameras(random_poses(2, 3), lens)
        together = plan(method.plain, cameras, GRID, **contents_of(method.plain, content))
        if method.projects:
            assert_backends_agree(together, batch=2)
        for clip in range(2):
            contents = contents_of(method.plain, content[clip : clip + 1])
            alone = plan(method.plain, of_clip(cameras, clip), GRID, **contents)
            assert (alone.operators(7) - together.operators(7, batch=clip)).abs().max() < 1e-12


@pytest.mark.parametrize("batch", [False, True])
@each_variant_with("extra", [2], projecting=[0])
def test_tokens_without_a_camera(method: Method, encoding: Encoding, batch: bool, extra: int) -> None:
    """Backends agree, and the camera blocks of such tokens are the identity, already in the tables of tokens.

    A table of cameras cannot say it of a token at the rim of a lens; there the plan does.
    """
    some = plan(encoding, mixed_cameras(batch, method.mixed_lens), GRID, clips=2, extra_tokens=extra)
    assert_mixed(some.query_has_camera)
    assert_backends_agree(some, batch=2)
    for block in some.camera_blocks:
        pairs = some.operators(0)[~some.key_has_camera[0], block.channels, block.channels]
        assert torch.equal(pairs, torch.eye(pairs.shape[-1], dtype=torch.float64).expand_as(pairs))
    for operator in (operator for block in some.camera_blocks for operator in block.operators if operator.rows is None):
        for clip, flags in enumerate(some.key_has_camera.expand(operator.table.shape[0], -1)):
            rows = operator.matrices()[clip, :, :, ~flags]
            assert torch.equal(rows, torch.eye(rows.shape[-1], dtype=torch.float64).expand_as(rows))


@each_method
def test_values_are_transformed_on_request_only(method: Method) -> None:
    cameras = Cameras(random_poses(2), PINHOLE)
    turned, plain = (plan(encoding, cameras, (1, 1)) for encoding in with_and_without_values(method.plain))
    q, k, v = random_qkv(1, 1, 2, plain.head_dim)
    weights = merope.attend(q, k, torch.eye(2, plain.head_dim, dtype=torch.float64)[None, None], plain)[..., :2]
    assert (merope.attend(q, k, v, plain) - weights @ v).abs().max() < 1e-12
    carried = with_clamped_lengths(q, k, v, turned)[2] if turned.clamps_lengths else v
    for a in range(2):
        values = (turned.operators(a) @ carried[0, 0, :, :, None]).squeeze(-1)
        assert (merope.attend(q, k, v, turned)[0, 0, a] - weights[0, 0, a] @ values).abs().max() < 1e-11


@pytest.mark.parametrize("name", METHODS)
def test_values_are_transformed_by_default_where_the_method_does(name: str) -> None:
    assert merope.encoding(name).transform_values == METHODS[name].transforms_values


def change_of_output(encoding: Encoding, lens: Lens, poses: Tensor, world: Tensor, seed: int = 0) -> float:
    """Largest change of the output when the world is turned and moved."""
    q, k, v = random_qkv(1, 4, 18, encoding.head_dim)
    before, after = (
        merope.attend(q, k, v, plan(encoding, Cameras(p, lens), GRID, seed=seed)) for p in (poses, world @ poses)
    )
    return float((before - after).abs().max())


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.farthest is not None])
@given(data=st.data(), seed=SEEDS)
def test_any_rigid_change_of_the_world_changes_nothing(name: str, data: st.DataObject, seed: int) -> None:
    method = METHODS[name]
    encoding = data.draw(st.sampled_from(list(method.instances.values())))
    lens = method.lenses[data.draw(st.sampled_from(sorted(method.lenses)))]
    shift_m = 10 ** data.draw(st.floats(-2, method.farthest)) * random_poses(seed=seed + 2)[:3, 3]
    world = rigid(random_rotations(seed=seed + 1), shift_m)
    assert change_of_output(encoding, lens, random_poses(3, seed=seed), world, seed) < 1e-9


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.farthest is not None])
def test_a_world_6400_km_away_changes_nothing(name: str) -> None:
    world = rigid(random_rotations(seed=5), torch.tensor([4.2e6, -3.1e6, 3.7e6], dtype=torch.float64))
    for encoding in (merope.encoding(name), *METHODS[name].instances.values()):
        assert change_of_output(encoding, PINHOLE, random_poses(3), world) < 1e-6


def orthogonality_defect(some: merope.AttentionPlan) -> float:
    """Largest entry of UᵀU − I over every second query token, whose heads take turns."""
    unit = torch.eye(some.head_dim, dtype=torch.float64)
    operators = (some.operators(token, head=token % 4) for token in range(0, some.query_tokens, 2))
    return max(float((u.mT @ u - unit).abs().max()) for u in operators)


@each_method_whose("kept")
@given(data=st.data(), seed=SEEDS, exponent=st.floats(-12, 7))
def test_orthogonal_for_any_cameras(method: Method, data: st.DataObject, seed: int, exponent: float) -> None:
    encoding = data.draw(st.sampled_from(list(method.instances.values())))
    lens = method.lenses[data.draw(st.sampled_from(sorted(method.lenses)))]
    cameras = Cameras(random_poses(3, seed=seed, spread_m=10**exponent), lens)
    assert orthogonality_defect(plan(encoding, cameras, GRID)) < 1e-12


@each_method_whose("shrunk")
@given(data=st.data(), seed=SEEDS, exponent=st.floats(-12, 7))
def test_norms_never_grow(method: Method, data: st.DataObject, seed: int, exponent: float) -> None:
    lens = method.lenses[data.draw(st.sampled_from(sorted(method.lenses)))]
    cameras = Cameras(random_poses(3, seed=seed, spread_m=10**exponent), lens)
    content = random_content(1, 18, seed)
    content[:, 8] = torch.tensor([0.0, 3.0])
    some = plan(method.plain, cameras, GRID, content=content)
    for token in (7, 8):
        assert torch.linalg.matrix_norm(some.operators(token), 2).max() < 1 + 1e-12
    assert torch.linalg.svdvals(some.operators(8)).amin(-1).max() < 0.999  # and a wide interval shrinks something


@each_method_whose("grown")
def test_logits_and_values_grow_with_the_baseline(method: Method) -> None:
    """Linearly once it dominates: ten times the metres, ten times the logit and the norm."""
    for lens in (PINHOLE,) if method.pinhole_only else (PINHOLE, FISHEYE):
        for encoding in method.instances.values():
            logits, norms = [], []
            for step_m in (1e3, 1e4, 1e5):
                u = plan(encoding, Cameras(straight_drive(2, step_m), lens), (1, 1)).operator(0, 1)
                logits.append(float(u.sum()))
                norms.append(float(u.sum(-1).norm()))
            for near, middle, far in (logits, norms):
                assert middle / near == pytest.approx(10, rel=1e-2)
                assert far / middle == pytest.approx(10, rel=1e-3)


def extreme_content(tokens: int) -> Tensor:  # [1, tokens, 2]
    content = random_content(1, tokens)
    content[:, 1] = torch.tensor([0.5, 0.0])  # an interval of length zero
    content[:, 2] = torch.tensor([0.0, 3.0])  # its far end on RayRoPE's clamp, as at the start of training
    content[:, 3] = torch.tensor([300.0, -2000.0])
    return content.requires_grad_()


@pytest.mark.parametrize("geometry", GEOMETRIES)
@each_method
def test_degenerate_geometry_is_finite(method: Method, geometry: str) -> None:
    """The output and its gradients: of poses, of contents, and of the focal length where the method reads it."""
    cameras = degenerate()[geometry]
    lens, leaves = cameras.lens, [cameras.world_from_camera.clone().requires_grad_()]
    if method.pinhole_only:
        leaves.append(torch.tensor(120.0, dtype=torch.float64, requires_grad=True))
        lens = Pinhole(leaves[1], leaves[1], 75.0, 45.0, 150, 90)
    for encoding in (method.plain, *method.options.values()):
        contents = contents_of(encoding, extreme_content(9 * cameras.count))
        some = plan(encoding, Cameras(leaves[0], lens), (3, 3), **contents)
        out = merope.attend(*random_qkv(1, 4, some.query_tokens, some.head_dim), some)
        gradients = torch.autograd.grad(out.square().sum(), [*leaves, *contents.values()])
        assert out.isfinite().all()
        assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@each_method_whose("kept")
def test_orthogonal_in_degenerate_geometry(method: Method, geometry: str) -> None:
    assert orthogonality_defect(plan(method.plain, degenerate()[geometry], (3, 3))) < 1e-12


@each_method
def test_float32_poses_make_float32_tables(method: Method) -> None:
    contents = contents_of(method.plain, random_content(1, 18).bfloat16())
    some = plan(method.plain, Cameras(random_poses(3).float(), ZOOM), GRID, **contents)
    assert {operator.table.dtype for block in some.blocks for operator in block.operators} == {torch.float32}
    q, k, v = (x.float() for x in random_qkv(1, 2, 18, some.head_dim))
    exact = merope.attend(q.double(), k.double(), v.double(), some)
    assert float((merope.attend(q, k, v, some).double() - exact).norm() / exact.norm()) < 1e-5


@pytest.mark.parametrize("name", METHODS)
def test_contents_are_required_or_refused(name: str) -> None:
    encoding, cameras = METHODS[name].plain, Cameras(random_poses(3), ZOOM)
    expected = f"content must be of {encoding.content_channels} channels for {type(encoding).__name__}, got"
    if encoding.content_channels:
        with pytest.raises(ValueError, match=f"{expected} 0; .*merope.DepthHead\\(width\\)"):
            encoding.plan(cameras, GRID)
    with pytest.raises(ValueError, match=f"{expected} 3;"):
        encoding.plan(cameras, GRID, content=torch.zeros(1, 18, 3))


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.plain.content_channels])
@pytest.mark.parametrize("side", ["", "key_"])
def test_contents_of_other_clips_or_elsewhere_are_refused(name: str, side: str) -> None:
    encoding, cameras = METHODS[name].plain, Cameras(random_poses(2, 3), ZOOM)
    fitting = {
        "content": torch.zeros(2, 18, 2),
        **({"key": cameras, "key_content": torch.zeros(2, 18, 2)} if side else {}),
    }
    for content, message in (
        (torch.zeros(3, 18, 2), "of the cameras' 2 clips, or of 1, got 3; "),
        (torch.zeros(2, 18, 2, device="meta"), "on cpu like the cameras, got meta; "),
        ([[0.0, 3.0]] * 18, "a torch.Tensor, got list; "),
    ):
        with pytest.raises(ValueError, match=f"^{side}content must be {message}"):
            encoding.plan(cameras, GRID, **{**fitting, f"{side}content": content})


@pytest.mark.parametrize(
    ("name", "head_dim", "message"),
    [
        ("cape", 30, "a multiple of 4, got 30; the nearest is 32"),
        ("gta", 30, "a multiple of 8, got 30; the nearest is 32"),
        ("prope", 60, "a multiple of 8, got 60; the nearest is 64"),
        ("ucpe", 100, "a multiple of 8, got 100; the nearest is (96|104)"),
        ("ucpe_clamped", 20, "a multiple of 8, got 20; the nearest is (16|24)"),
        ("raynova", 100, "a multiple of 16, got 100; the nearest is 96"),
        ("viewrope", 31, "even and at least 14, got 31; the nearest is 32$"),
        ("viewrope", 12, "even and at least 14, got 12; the nearest is 14$"),
        ("viewrope", -2, "even and at least 14, got -2; the nearest is 14$"),
        ("urope", 100, "a multiple of 16, got 100; the nearest is 96"),
        ("rayrope", 20, "at least 24, got 20; the nearest is 24"),
        ("crepe", 4, "at least 6, got 4; the nearest is 6"),
    ],
)
def test_heads_that_a_method_does_not_fill_are_refused(name: str, head_dim: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"head_dim must be {message}"):
        merope.encoding(name, head_dim=head_dim)


@pytest.mark.parametrize("value", [0.0, -100.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", sorted(ENCODINGS))
def test_bases_and_scales_that_make_no_phases_are_refused(name: str, value: float) -> None:
    phases = {"native_base", "rope_base", "time_scale", "position_scale", "seconds_per_frame", "direction_scale"}
    for option in phases & {field.name for field in fields(ENCODINGS[name])}:
        with pytest.raises(ValueError, match=rf"^{option} must be .*positive and finite, got {value}; "):
            merope.encoding(name, **{option: value})


@pytest.mark.parametrize("name", sorted(ENCODINGS))
def test_options_of_another_type_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"transform_values must be bool, got 'False' \(str\); write true or false"):
        merope.encoding(name, transform_values="False")
    with pytest.raises(ValueError, match=r"transform_values must be bool, got 'False' \(str\); write true or false"):
        ENCODINGS[name](transform_values="False")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"head_dim must be an int, got '128'; divide"):
        ENCODINGS[name](head_dim="128")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (merope.MeRoPE, {"disparity": "False"}),
        (merope.MeRoPE, {"rotation": 0}),
        (merope.MeRoPE, {"fractions": 3}),
        (merope.MeRoPE, {"wavelengths_m": None}),
        (merope.MeRoPE, {"native_base": "x"}),
        (merope.MeRoPE, {"head_dim": []}),
        (merope.GTA, {"translation_scale": None}),
        (merope.GTA, {"transform_values": "no"}),
        (ENCODINGS["prope"], {"rope_base": "100"}),
        (ENCODINGS["ucpe"], {"ray_offset": 0.5}),
        (ENCODINGS["raynova"], {"position": None}),
        (ENCODINGS["rayrope"], {"point_depth": "no"}),
        (ENCODINGS["crepe"], {"knots": 8.0}),
        (ENCODINGS["urope"], {"anchors_m": 2.0}),
        (merope.RayFeatures, {"samples": "8"}),
    ],
)
def test_classes_check_types_too(kind: type[Encoding] | type[merope.RayFeatures], options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        kind(**options)


@pytest.mark.parametrize("name", ["merope", "crepe", "ucpe", "urope"])
def test_lists_are_the_tuples_for_which_they_stand(name: str) -> None:
    encoding = merope.encoding(name)
    given = {key: list(value) for key, value in vars(encoding).items() if isinstance(value, tuple)}
    assert given
    twin = merope.encoding(name, **given)
    assert twin == encoding
    assert hash(twin) == hash(encoding)


@pytest.mark.parametrize("name", ENCODINGS)
def test_options_that_a_method_does_not_have_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"options of {name} must be among \['head_dim', .*got 'head_dims'"):
        merope.encoding(name, head_dims=128)
    with pytest.raises(ValueError, match=r"head_dim must be an int, got 128\.0; divide"):
        merope.encoding(name, head_dim=768 / 6)


@pytest.mark.parametrize("times", ["x", ["a", "b"], object()])
def test_times_that_are_no_numbers_are_refused(times: object) -> None:
    cameras = Cameras(random_poses(2), PINHOLE)
    with pytest.raises(ValueError, match="times must be a tensor or a list of numbers, got"):
        merope.encoding("none").plan(cameras, (1, 1), times=times)  # type: ignore[arg-type]

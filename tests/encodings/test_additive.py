"""Ray features, the latitude-up map and the layer that adds them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenes import FISHEYE, PINHOLE, degenerate_cameras, random_poses, random_rotations
from torch import Tensor

from merope import Cameras, Equirectangular, Lens, Pinhole, UnifiedCamera
from merope.encodings.additive import AdditiveCamera, AdditiveFeatures, LatitudeUp, RayFeatures
from merope.geometry.poses import relative, rigid

GRID = (2, 3)
LENSES = {"pinhole": PINHOLE, "fisheye": FISHEYE, "panorama": Equirectangular(256, 128)}
KINDS = ("plucker", "origin_direction")


def turn(axis: str, angle_rad: float) -> Tensor:  # [4, 4]
    """Pose at the origin, turned about a camera axis (right-handed)."""
    c, s = math.cos(angle_rad), math.sin(angle_rad)
    pose = torch.eye(4, dtype=torch.float64)
    first, second = {"x": (1, 2), "y": (2, 0), "z": (0, 1)}[axis]
    pose[first, first] = pose[second, second] = c
    pose[second, first], pose[first, second] = s, -s
    return pose


def by_hand(cameras: Cameras, camera: int, pixel: tuple[float, float], kind: str) -> Tensor:  # [6]
    """The numbers of one ray, from one pixel."""
    ray, _ = cameras.lens.unproject(torch.tensor([pixel], dtype=torch.float64))
    pose = torch.linalg.inv(cameras.world_from_camera[0]) @ cameras.world_from_camera[camera]
    direction, centre = pose[:3, :3] @ ray[0], pose[:3, 3]
    return torch.cat((torch.linalg.cross(centre, direction) if kind == "plucker" else centre, direction))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lens", LENSES)
def test_every_ray_stands_where_the_docstring_says(kind: str, lens: str) -> None:
    cameras = Cameras(random_poses(2), LENSES[lens])
    rays = RayFeatures(kind, samples=2).features(cameras, GRID).reshape(2, *GRID, 2, 2, 6)
    height, width = (size / (n * 2) for size, n in zip((cameras.lens.height, cameras.lens.width), GRID, strict=True))
    for camera, row, column, sub_row, sub_column in ((0, 0, 0, 0, 0), (1, 1, 2, 0, 1), (1, 0, 1, 1, 0)):
        pixel = ((2 * column + sub_column + 0.5) * width, (2 * row + sub_row + 0.5) * height)
        expected = by_hand(cameras, camera, pixel, kind)
        assert (rays[camera, row, column, sub_row, sub_column] - expected).abs().max() < 1e-12


@pytest.mark.parametrize("lens", LENSES)
def test_one_sample_is_the_patch_centre(lens: str) -> None:
    cameras = Cameras(random_poses(3), LENSES[lens])
    features = RayFeatures("origin_direction", samples=1).features(cameras, GRID)
    rays, _ = cameras.rays(GRID)
    poses = relative(cameras.world_from_camera[:1], cameras.world_from_camera)
    expected = torch.einsum("vij,vpj->vpi", poses[:, :3, :3], rays).flatten(0, 1)
    assert (features[0, :, 3:] - expected).abs().max() < 1e-12
    assert (features[0, :6, :3]).abs().max() == 0  # the first camera is the origin


@given(seed=st.integers(0, 10**6), samples=st.integers(1, 4), exponent=st.floats(-6, 6))
def test_plucker_moments_are_perpendicular_to_unit_directions(seed: int, samples: int, exponent: float) -> None:
    cameras = Cameras(random_poses(3, seed=seed, spread_m=10**exponent), FISHEYE)
    moment, direction = RayFeatures(samples=samples).features(cameras, GRID).unflatten(-1, (-1, 2, 3)).unbind(-2)
    assert (direction.norm(dim=-1) - 1).abs().max() < 1e-12
    assert ((moment * direction).sum(-1).abs() / (1 + moment.norm(dim=-1))).max() < 1e-12


@given(seed=st.integers(0, 10**6), exponent=st.floats(-2, 3), kind=st.sampled_from(KINDS))
def test_any_rigid_change_of_the_world_changes_no_ray(seed: int, exponent: float, kind: str) -> None:
    poses = random_poses(3, seed=seed)
    world = rigid(random_rotations(seed=seed + 1), 10**exponent * random_poses(seed=seed + 2)[:3, 3])
    before, after = (RayFeatures(kind, 2).features(Cameras(p, PINHOLE), GRID) for p in (poses, world @ poses))
    assert (before - after).abs().max() < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_a_world_6400_km_away_changes_no_ray(kind: str) -> None:
    """1e-9 where shifted centres are exact; turning the world rounds each by up to 4.7e-10 m before it comes here."""
    poses = random_poses(3)
    poses[:, :3, 3] = (poses[:, :3, 3] * 1024).round() / 1024
    shift = torch.tensor([4.2e6, -3.1e6, 3.7e6], dtype=torch.float64)
    for rotation, tolerance in ((torch.eye(3, dtype=torch.float64), 1e-9), (random_rotations(seed=5), 1e-8)):
        world = rigid(rotation, shift)
        before, after = (RayFeatures(kind, 2).features(Cameras(p, PINHOLE), GRID) for p in (poses, world @ poses))
        assert (before - after).abs().max() < tolerance


def test_translation_scale_multiplies_centres_and_moments_only() -> None:
    cameras = Cameras(random_poses(2), PINHOLE)
    for kind in KINDS:
        plain = RayFeatures(kind, 1).features(cameras, GRID)
        scaled = RayFeatures(kind, 1, translation_scale=0.25).features(cameras, GRID)
        factors = torch.tensor([0.25, 0.25, 0.25, 1, 1, 1], dtype=torch.float64)
        assert (scaled - factors * plain).abs().max() < 1e-14


@pytest.mark.parametrize("features", [RayFeatures(samples=2), LatitudeUp()], ids=["rays", "latitude"])
def test_batches_are_their_clips_one_by_one(features: AdditiveFeatures) -> None:
    poses = random_poses(2, 3)
    fx = torch.tensor([[80.0, 90.0, 100.0], [110.0, 120.0, 130.0]])
    lenses: list[tuple[Lens, list[Lens]]] = [
        (PINHOLE, [PINHOLE] * 2),
        (Pinhole(fx[0], 100.0, 128.0, 72.0, 256, 144), [Pinhole(fx[0], 100.0, 128.0, 72.0, 256, 144)] * 2),
        (Pinhole(fx, 100.0, 128.0, 72.0, 256, 144), [Pinhole(f, 100.0, 128.0, 72.0, 256, 144) for f in fx]),
    ]
    for together, alone in lenses:
        batch = features.features(Cameras(poses, together), GRID)
        assert batch.shape == (2, 18, features.channels)
        for b in range(2):
            one = features.features(Cameras(poses[b], alone[b]), GRID)
            assert one.shape == (1, 18, features.channels)
            assert (batch[b] - one[0]).abs().max() < 1e-12


@pytest.mark.parametrize("features", [RayFeatures(samples=2), LatitudeUp()], ids=["rays", "latitude"])
def test_unknown_poses_and_unseen_pixels_are_zero(features: AdditiveFeatures) -> None:
    poses, has_pose = random_poses(3), torch.tensor([False, True, True])
    poses[0] = float("nan")
    lens = UnifiedCamera(60.0, 60.0, 100.0, 72.0, 1.8, 256, 144)  # does not reach the right edge
    cameras = Cameras(poses, lens, has_pose)
    values = features.features(cameras, (3, 4))[0].unflatten(0, (3, 12))
    seen = cameras.rays((3, 4))[1]
    assert (values[0] == 0).all()
    assert values.isfinite().all()
    assert 0 < int(seen.sum()) < 24
    if features.channels == 3:
        assert (values[~seen] == 0).all()
        assert (values[seen] != 0).any(-1).all()
    else:
        unseen = ~cameras.rays((6, 8))[1].reshape(3, 3, 2, 4, 2).transpose(2, 3).reshape(3, 12, 4)
        assert (values.unflatten(-1, (4, 6))[unseen] == 0).all()


def test_dtype_is_that_of_the_poses() -> None:
    cameras = Cameras(random_poses(2).float(), PINHOLE)
    assert RayFeatures().features(cameras, GRID).dtype == torch.float32
    assert RayFeatures().features(cameras, GRID).shape == (1, 12, 384)
    assert LatitudeUp().features(cameras, GRID).dtype == torch.float32


# A centred lens on a 1 × 1 grid: the token's ray is the optical axis.
CENTRED = Pinhole(100.0, 100.0, 75.0, 45.0, 150, 90)


@pytest.mark.parametrize("pitch_deg", [-80, -30, 0, 10, 60])
def test_latitude_of_a_pitched_camera_is_its_pitch(pitch_deg: float) -> None:
    """About x by a positive angle, y (down) goes to z (forward): the camera looks up."""
    pose = turn("x", math.radians(pitch_deg))[None]
    u, v, latitude = LatitudeUp().features(Cameras(pose, CENTRED), (1, 1))[0, 0].tolist()
    assert latitude == pytest.approx(math.radians(pitch_deg), abs=1e-12)
    assert (u, v) == pytest.approx((0, -1), abs=1e-12)


@pytest.mark.parametrize("roll_deg", [-120, -45, 0, 30, 90])
def test_up_of_a_rolled_camera_turns_against_the_roll(roll_deg: float) -> None:
    pose = turn("z", math.radians(roll_deg))[None]
    u, v, latitude = LatitudeUp().features(Cameras(pose, CENTRED), (1, 1))[0, 0].tolist()
    angle = math.radians(roll_deg)
    assert (u, v) == pytest.approx((-math.sin(angle), -math.cos(angle)), abs=1e-12)
    assert latitude == pytest.approx(0, abs=1e-12)


def test_up_of_a_level_camera_is_up_everywhere() -> None:
    for lens in (CENTRED, Equirectangular(150, 90)):
        features = LatitudeUp().features(Cameras(turn("y", 0.7)[None], lens), (4, 6))[0]
        assert (features[:, 0]).abs().max() < 1e-12
        assert (features[:, 1] + 1).abs().max() < 1e-12
    rows = features[:, 2].reshape(4, 6)  # of the panorama: latitude is linear in the row
    assert (rows - torch.tensor([3, 1, -1, -3], dtype=torch.float64)[:, None] * math.pi / 8).abs().max() < 1e-12


def test_up_on_a_panorama_crosses_neither_its_edges_nor_the_zenith() -> None:
    """Its left and right edge are neighbours."""
    level = LatitudeUp().features(Cameras(turn("y", 0.7)[None], Equirectangular(150, 90)), (30, 6))[0]
    assert (level[:, :2] - torch.tensor([0.0, -1.0])).abs().max() < 1e-9
    rolled = LatitudeUp().features(Cameras(turn("z", 0.5)[None], Equirectangular(256, 128)), (18, 64))
    up = rolled.reshape(18, 64, 3)[..., :2]
    assert (up[:, 0] - up[:, -1]).norm(dim=-1).max() < 0.1


@given(seed=st.integers(0, 10**6), lens=st.sampled_from(["pinhole", "fisheye"]))
def test_up_is_a_rotation_of_the_world_ray_by_a_tenth_of_a_radian(seed: int, lens: str) -> None:
    """Against a rotation matrix about d × up, in world coordinates; and the features know nothing of yaw or place."""
    cameras = Cameras(random_poses(2, seed=seed), LENSES[lens])
    features = LatitudeUp().features(cameras, GRID)
    rays, _ = cameras.rays(GRID)
    up = torch.tensor([0.0, -1.0, 0.0], dtype=torch.float64)
    for token, (camera, patch) in enumerate((c, p) for c in range(2) for p in range(6)):
        rotation = cameras.world_from_camera[camera, :3, :3]
        world_ray = rotation @ rays[camera, patch]
        axis = torch.nn.functional.normalize(torch.linalg.cross(world_ray, up), dim=0)
        turned = torch.matrix_exp(0.1 * torch.linalg.cross(axis.expand(3, 3), torch.eye(3).double()).mT) @ world_ray
        assert float(features[0, token, 2]) == pytest.approx(math.asin(-float(world_ray[1])), abs=1e-7)
        assert float(turned @ up) == pytest.approx(math.sin(float(features[0, token, 2]) + 0.1), abs=1e-9)
        pixel, seen = cameras.lens.project((rotation.mT @ turned)[None])
        start, _ = cameras.lens.project(rays[camera, patch][None])
        expected = torch.nn.functional.normalize((pixel - start)[0], dim=0) if seen[0] else torch.zeros(2).double()
        assert (features[0, token, :2] - expected).abs().max() < 1e-7
    yawed = rigid(turn("y", 1.3)[:3, :3], torch.tensor([3e3, 20.0, -5e3], dtype=torch.float64))
    moved = LatitudeUp().features(Cameras(yawed @ cameras.world_from_camera, LENSES[lens]), GRID)
    assert (moved - features).abs().max() < 1e-9
    tilted = LatitudeUp().features(Cameras(turn("x", 0.3) @ cameras.world_from_camera, LENSES[lens]), GRID)
    assert (tilted - features).abs().max() > 0.01


@pytest.mark.parametrize("sign", [1, -1])
def test_at_the_poles_the_direction_is_zero_and_the_latitude_right(sign: int) -> None:
    pose = torch.eye(4, dtype=torch.float64)
    pose[:3, :3] = torch.tensor([[1.0, 0, 0], [0, 0, -sign], [0, sign, 0]])  # optical axis straight up or down
    u, v, latitude = LatitudeUp().features(Cameras(pose[None], CENTRED), (1, 1))[0, 0].tolist()
    assert (u, v) == (0, 0)
    assert latitude == pytest.approx(sign * math.pi / 2)


@pytest.mark.parametrize("features", [RayFeatures(samples=3), LatitudeUp()], ids=["rays", "latitude"])
@pytest.mark.parametrize("name", [*degenerate_cameras(), "straight up", "beyond 180°"])
def test_values_and_gradients_are_finite(features: AdditiveFeatures, name: str) -> None:
    special = {
        "straight up": Cameras(turn("x", math.pi / 2)[None], CENTRED),
        "beyond 180°": Cameras(random_poses(3), UnifiedCamera.from_fov(220.0, 1.3, 150, 90)),
    }
    cameras = special[name] if name in special else degenerate_cameras()[name]
    poses = cameras.world_from_camera.clone().requires_grad_()
    values = features.features(Cameras(poses, cameras.lens), (3, 5))
    assert values.isfinite().all()
    values.sin().sum().backward()
    assert poses.grad is not None
    assert poses.grad.isfinite().all()


def test_the_layer_adds_exactly_nothing_at_first_and_learns() -> None:
    features = RayFeatures(samples=2)
    numbers = features.features(Cameras(random_poses(2), PINHOLE), GRID)
    layer = AdditiveCamera(features, 16)
    hidden = torch.randn(3, 12, 16, requires_grad=True)
    out = layer(hidden, numbers)
    assert out.dtype == hidden.dtype
    assert torch.equal(out, hidden)
    out.sin().sum().backward()
    assert layer.linear.weight.grad is not None
    assert layer.linear.weight.grad.abs().max() > 0.1
    torch.nn.init.normal_(layer.linear.weight)
    numbers[:, 4] = 0  # a token without a camera
    out = layer(hidden, numbers)
    assert torch.equal(out[:, 4], hidden[:, 4])
    expected = hidden + torch.einsum("dc,bnc->bnd", layer.linear.weight, numbers.float())
    assert (out - expected).abs().max() < 1e-4


def test_the_layer_keeps_half_precision_hidden_states() -> None:
    layer = AdditiveCamera(LatitudeUp(), 8).bfloat16()
    numbers = LatitudeUp().features(Cameras(random_poses(1), PINHOLE), GRID)
    assert layer(torch.randn(1, 6, 8).bfloat16(), numbers).dtype == torch.bfloat16


def test_bad_arguments_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"kind must be 'plucker' or 'origin_direction', got .*;"):
        RayFeatures("moment")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"samples must be an int ≥ 1, got 0;"):
        RayFeatures(samples=0)
    with pytest.raises(ValueError, match=r"translation_scale must be positive and finite, got 0;"):
        RayFeatures(translation_scale=0)
    with pytest.raises(ValueError, match=r"grid must be"):
        RayFeatures().features(Cameras(random_poses(1), PINHOLE), (0, 3))
    with pytest.raises(
        ValueError, match=r"features must be \[2 or 1, 7, 3\] like hidden, got \[1, 6, 3\]; append zero"
    ):
        AdditiveCamera(LatitudeUp(), 8)(torch.zeros(2, 7, 8), torch.zeros(1, 6, 3))

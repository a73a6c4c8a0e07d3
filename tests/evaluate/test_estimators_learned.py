"""Adapters of learned estimators, on stand-ins for their packages that return cameras known beforehand.

The stand-ins are real packages on the import path; they speak the encodings of the originals: VGGT and VGGT-Ω give
camera-from-world as (translation, quaternion xyzw, FoV), Depth Anything 3 gives camera-from-world matrices [N, 3, 4],
MapAnything camera-to-world [1, 4, 4] per view.
"""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from scenes import FISHEYE, PINHOLE, random_poses
from torch import Tensor

from merope.evaluate.estimators import learned
from merope.geometry.poses import inverse, rigid
from merope.geometry.quaternions import quaternion_from_matrix

COUNT = 4
POSES = random_poses(COUNT, seed=3)
FRAMES = torch.randint(0, 256, (COUNT, 144, 256, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

VGGT = """
import torch
class {name}(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options
        self.register_buffer("cameras", torch.zeros(1, 4, 9))
        self.seen = []
    def forward(self, images):
        self.seen.append(images)
        return {{"pose_enc": self.cameras}}
    @classmethod
    def from_pretrained(cls, folder):
        model = cls()
        model.load_state_dict(torch.load(folder + "/model.pt"))
        return model
"""
MATRICES = """
import pathlib, types, torch
class {name}(torch.nn.Module):
    @classmethod
    def from_pretrained(cls, folder):
        model = cls()
        model.matrices = torch.load(pathlib.Path(folder) / "model.pt")["cameras"]
        return model
    def inference(self, images):
        assert all(image.dtype == "uint8" and image.shape[-1] == 3 for image in images)
        return types.SimpleNamespace(extrinsics=self.matrices[: len(images), :3].numpy())
    def infer(self, views, use_amp):
        self.views = views
        return [{{"camera_poses": pose[None]}} for pose in self.matrices]
"""
PACKAGES = {
    "vggt_omega": {"models.py": VGGT.format(name="VGGTOmega")},
    "vggt": {"models/__init__.py": "", "models/vggt.py": VGGT.format(name="VGGT")},
    "depth_anything_3": {"api.py": MATRICES.format(name="DepthAnything3")},
    "mapanything": {
        "models.py": MATRICES.format(name="MapAnything"),
        "utils/__init__.py": "",
        "utils/image.py": "def preprocess_inputs(views):\n    return [{**view, 'prepared': True} for view in views]\n",
    },
}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for package, files in PACKAGES.items():
        for file, text in {"__init__.py": "", **files}.items():
            path = tmp_path / "site" / package / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in PACKAGES]:
        del sys.modules[name]


def encoded(world_from_camera: Tensor) -> Tensor:  # [T, 4, 4] -> [1, T, 9] float32
    camera_from_world = inverse(world_from_camera)
    quaternion = quaternion_from_matrix(camera_from_world[:, :3, :3])[:, [1, 2, 3, 0]]
    fov_rad = torch.full((len(quaternion), 2), 0.8, dtype=torch.float64)
    return torch.cat((camera_from_world[:, :3, 3], quaternion, fov_rad), dim=-1)[None].float()


def saved(folder: Path, cameras: Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save({"cameras": cameras, "depth_head.unused": torch.zeros(1)}, folder / "model.pt")
    return folder / "model.pt"


def assert_recovered(estimate: learned.PoseEstimate, tolerance: float = 1e-5) -> None:
    assert bool(estimate.valid.all())
    assert (estimate.world_from_camera - POSES).abs().max() < tolerance


@pytest.mark.usefixtures("packages")
def test_vggt_omega_gives_camera_to_world(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "weights", encoded(POSES))
    estimate = learned.vggt_omega(checkpoint, device="cpu")
    found = estimate(FRAMES, PINHOLE)
    assert_recovered(found)
    assert found.weights_sha256 == hashlib.sha256(checkpoint.read_bytes()).hexdigest()
    assert not found.is_metric
    assert estimate._model.options == {"enable_depth": False}
    (images,) = estimate._model.seen
    assert images.shape == (COUNT, 3, 384, 688)  # what upstream makes of this shape
    assert images.min() >= 0
    assert images.max() <= 1


@pytest.mark.usefixtures("packages")
def test_vggt_omega_at_its_longest_side(tmp_path: Path) -> None:
    estimate = learned.vggt_omega(saved(tmp_path / "weights", encoded(POSES)), "max_size", 256, device="cpu")
    assert_recovered(estimate(FRAMES, None))
    (images,) = estimate._model.seen
    assert torch.equal(images, FRAMES.permute(0, 3, 1, 2) / 255.0)  # no resampling of what already fits
    with pytest.raises(ValueError, match="balanced"):
        learned.vggt_omega(tmp_path, "crop")  # type: ignore[arg-type]


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("as_folder", [False, True])
def test_vggt_gives_camera_to_world(as_folder: bool, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "weights", encoded(POSES))
    if as_folder:  # the hub's layout holds no extra heads
        torch.save({"cameras": encoded(POSES)}, checkpoint)
    estimate = learned.vggt(checkpoint.parent if as_folder else checkpoint, device="cpu")
    assert_recovered(estimate(FRAMES, PINHOLE))
    (images,) = estimate._model.seen
    assert images.shape == (COUNT, 3, 294, 518)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("is_metric", [False, True])
def test_depth_anything_gives_camera_to_world(is_metric: bool, tmp_path: Path) -> None:
    folder = saved(tmp_path / "weights", inverse(POSES).float()).parent
    found = learned.depth_anything_3(folder, is_metric, device="cpu")(FRAMES, PINHOLE)
    assert_recovered(found)
    assert found.is_metric == is_metric


@pytest.mark.usefixtures("packages")
def test_map_anything_is_metric_and_is_told_the_intrinsics(tmp_path: Path) -> None:
    estimate = learned.map_anything(saved(tmp_path / "weights", POSES.float()).parent, device="cpu")
    found = estimate(FRAMES, PINHOLE)
    assert_recovered(found)
    assert found.is_metric
    view = estimate._model.views[1]
    assert torch.equal(view["img"], FRAMES[1])
    assert view["prepared"]
    assert torch.equal(view["intrinsics"], torch.tensor([[120.0, 0, 127.5], [0, 125, 69.5], [0, 0, 1]]))
    estimate(FRAMES, None)
    assert "intrinsics" not in estimate._model.views[0]


@pytest.mark.usefixtures("packages")
def test_a_fisheye_is_shown_as_a_pinhole(tmp_path: Path) -> None:
    estimate = learned.map_anything(saved(tmp_path / "weights", POSES.float()).parent, device="cpu")
    assert_recovered(estimate(FRAMES, FISHEYE))
    view = estimate._model.views[0]
    height, width = view["img"].shape[:2]
    assert (height, width) != (144, 256)
    assert view["intrinsics"][0, 2] == width / 2 - 0.5


@pytest.mark.usefixtures("packages")
def test_rounded_rotations_are_repaired_and_broken_poses_are_invalid(tmp_path: Path) -> None:
    poses = POSES.to(torch.bfloat16).float()
    poses[2, 0, 3] = float("nan")
    found = learned.map_anything(saved(tmp_path / "weights", poses).parent, device="cpu")(FRAMES, None)
    assert found.valid.tolist() == [True, True, False, True]
    rotation = found.world_from_camera[:, :3, :3]
    assert (rotation.mT @ rotation - torch.eye(3, dtype=torch.float64)).abs().max() < 1e-12
    assert "not finite" in found.note


@pytest.mark.usefixtures("packages")
def test_a_checkpoint_that_lacks_parameters_is_refused(tmp_path: Path) -> None:
    torch.save({"something": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="such as cameras"):
        learned.vggt_omega(tmp_path / "other.pt", device="cpu")(FRAMES, None)


@pytest.mark.usefixtures("packages")
def test_missing_weights_say_where_they_come_from(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint must be .*facebookresearch/vggt-omega"):
        learned.vggt_omega(tmp_path / "nowhere.pt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="safetensors"):
        _ = learned.map_anything(tmp_path / "empty").weights_sha256


def test_a_missing_package_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").touch()
    with pytest.raises(
        ValueError, match=r"pip install --no-deps git\+https://github.com/facebookresearch/map-anything"
    ):
        learned.map_anything(tmp_path / "weights.pt")


def test_the_hash_of_a_folder_depends_on_its_weights_only(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"one")
    (tmp_path / "config.json").write_text("{}")
    before = learned._sha256(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert learned._sha256(tmp_path) == before
    (tmp_path / "a.safetensors").write_bytes(b"two")
    assert learned._sha256(tmp_path) != before


def test_the_encoding_is_camera_from_world_with_the_scalar_last() -> None:
    half = 0.5**0.5  # a quarter turn about y carries z to x
    camera_from_world = learned.decoded_cameras(torch.tensor([1.0, 2.0, 3.0, 0.0, half, 0.0, half, 0.9, 0.9]))
    rotation = torch.tensor([[0.0, 0, 1], [0, 1, 0], [-1, 0, 0]], dtype=torch.float64)
    expected = rigid(rotation, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    assert (camera_from_world - expected).abs().max() < 1e-7

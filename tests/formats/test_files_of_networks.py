"""Files that the code of VGGT, MapAnything, LingBot-World and PanShot writes, against what that code makes of them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from paths import largest
from torch import Tensor

from merope import formats
from merope.datasets.panshot_clips import read_sample
from merope.formats.trajectory import Trajectory
from merope.geometry.lens_batches import resized
from merope.geometry.lenses import Pinhole, UnifiedCamera
from merope.geometry.poses import inverse, relative

POSES = Path(__file__).parents[1] / "data" / "poses"


def pixels_and_depths(
    path: Trajectory,
    world_points: Tensor,  # [T, N, 3]
) -> tuple[Tensor, Tensor]:  # [T, N, 2], [T, N]
    """Where every camera sees its points, and how far ahead of it they are."""
    assert path.lens is not None
    camera_from_world = inverse(path.world_from_camera)
    points = world_points @ camera_from_world[:, :3, :3].mT + camera_from_world[:, None, :3, 3]
    return path.lens.project(points)[0], points[..., 2]


def centres(height: int, width: int) -> Tensor:  # [H·W, 2]
    """The centres of all pixels, row by row."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack((columns, rows), dim=-1).reshape(-1, 2).double() + 0.5


def test_what_vggts_demo_saves() -> None:
    """The pixels are those of VGGT's own projection; it holds principal points for the middle of the image."""
    file = POSES / "vggt" / "predictions.npz"
    path = formats.read(file)
    assert formats.detect(file) == "vggt"
    assert not path.is_metric
    assert isinstance(path.lens, Pinhole)
    assert (path.lens.width, path.lens.height) == (28, 14)
    assert path.lens.fx.tolist() == pytest.approx([21.0, 21.0, 23.0], abs=1e-4)
    expected = json.loads((POSES / "vggt" / "projected_by_vggt.json").read_text())
    points = torch.tensor(expected["world_points"], dtype=torch.float64).expand(3, -1, -1)
    pixels, depths = pixels_and_depths(path, points)
    assert largest(pixels - torch.tensor(expected["pixels"], dtype=torch.float64)) < 1e-3  # float32, four digits
    assert float(depths.min()) > 2.0


def test_the_points_that_vggts_demo_saves() -> None:
    """It takes the corner of a pixel for the pixel when it unprojects its depth."""
    file = POSES / "vggt" / "predictions.npz"
    with np.load(file) as arrays:
        points, depth = (torch.from_numpy(arrays[name]).double() for name in ("world_points_from_depth", "depth"))
    pixels, depths = pixels_and_depths(formats.read(file), points.reshape(3, -1, 3))
    assert largest(pixels - (centres(14, 28) - 0.5)) < 1e-3
    assert largest(depths - depth.reshape(3, -1)) < 1e-5


@pytest.mark.parametrize(("file", "name"), [("outputs.npz", "pts3d"), ("predictions.npz", "world_points")])
def test_what_mapanything_and_its_app_save(file: str, name: str) -> None:
    """Every point of the archive is seen where it came from. The app's `extrinsic` is camera-to-world."""
    archive = POSES / "mapanything" / file
    assert formats.detect(archive) == "mapanything"
    path = formats.read(archive)
    assert path.is_metric
    with np.load(archive) as arrays:
        points = torch.from_numpy(arrays[name]).double().reshape(3, -1, 3)
        depth = torch.from_numpy(arrays["depth" if "depth" in arrays else "depth_z"]).double().reshape(3, -1)
    pixels, depths = pixels_and_depths(path, points)
    assert largest(depths - depth) < 1e-5
    assert largest(pixels - centres(14, 28)) < 1e-3


def test_the_keys_of_lingbot_do_what_they_say() -> None:
    """Four steps each of w, d, l, i, and of w and l: ahead, right, look right, look up, and a bend to the right."""
    path = formats.read(POSES / "lingbot")
    assert formats.detect(POSES / "lingbot") == "lingbot"
    assert path.count == 21
    ahead, right, looks_right, looks_up, bend = relative(path.world_from_camera[:-1:4], path.world_from_camera[4::4])
    side, along = math.sin(math.radians(4 * 2.0)), math.cos(math.radians(4 * 2.0))
    assert ahead[:3, 3].tolist() == pytest.approx([0, 0, 0.2], abs=1e-5)
    assert right[:3, 3].tolist() == pytest.approx([0.2, 0, 0], abs=1e-5)
    assert looks_right[:3, 2].tolist() == pytest.approx([side, 0, along])
    assert looks_up[:3, 2].tolist() == pytest.approx([0, -side, along])
    assert float(bend[0, 3]) > 0.01
    assert float(bend[0, 2]) > 0.1


def test_rays_that_lingbot_is_shown() -> None:
    """Of every fourth camera as the one before it sees it, the longest step being 1, at pixel centres of any size."""
    path = formats.read(POSES / "lingbot")
    expected = json.loads((POSES / "lingbot" / "rays_by_fastvideo.json").read_text())
    assert isinstance(path.lens, Pinhole)
    assert (path.lens.width, path.lens.height, float(path.lens.fy)) == (832, 480, 503.5)
    poses = path.world_from_camera[::4]
    steps = torch.cat((torch.eye(4, dtype=torch.float64)[None], relative(poses[:-1], poses[1:])))
    origins = steps[:, :3, 3] / steps[:, :3, 3].norm(dim=-1).max()
    places = torch.tensor(expected["rows_columns"], dtype=torch.float64).flip(-1) + 0.5
    rays, _ = resized(path.lens, expected["width"], expected["height"]).unproject(places)
    true = torch.tensor(expected["origins_directions"], dtype=torch.float64)  # [F, N, 6]
    assert largest(true[..., :3] - origins[:, None]) < 1e-5
    assert largest(true[..., 3:] - rays @ steps[:, :3, :3].mT) < 1e-5


@pytest.mark.parametrize("clip", ["made-up_0-3-0-no_rot_aug_0", "made-up_0-3-0-linear_aug_0"])
def test_a_clip_of_panshot(clip: str) -> None:
    """The lens is that of the meta file; images have the rays at pixel centres that our lens has there."""
    folder, expected = POSES / "panshot", json.loads((POSES / "panshot" / "rays_by_ucpe.json").read_text())
    file, meta, size = folder / "pose-test" / f"{clip}.npy", folder / "meta-test" / "made-up_0-3.json", (52, 30)
    assert formats.detect(file) == "panshot"
    path = formats.read(file, sidecar=meta, image_size=size)
    assert isinstance(path.lens, UnifiedCamera)
    corners = torch.tensor(expected["rows_columns"], dtype=torch.float64).flip(-1)
    directions = torch.tensor(expected["clips"][clip]["image_directions"], dtype=torch.float64)
    assert largest(path.lens.unproject(corners + 0.5)[0] - directions) < 1e-5


@pytest.mark.parametrize("clip", ["made-up_0-3-0-no_rot_aug_0", "made-up_0-3-0-linear_aug_0"])
def test_rays_that_ucpe_is_shown(clip: str) -> None:
    """Moments and directions in the world as its data set normalises it, at the corners of pixels, as it takes them."""
    folder, expected = POSES / "panshot", json.loads((POSES / "panshot" / "rays_by_ucpe.json").read_text())
    meta = json.loads((folder / "meta-test" / "made-up_0-3.json").read_text())
    video = next(video for video in meta[0]["videos"] if video["pose"] == clip)
    row = {"pose_path": f"pose-test/{clip}.npy", "x_fov": video["x_fov"], "xi": video["xi"]}
    sample = read_sample(row, folder, expected["height"], expected["width"], {"made-up_0-3": expected["near_depth"]})
    corners = torch.tensor(expected["rows_columns"], dtype=torch.float64).flip(-1)
    assert sample.lens is not None
    directions = sample.lens.unproject(corners)[0] @ sample.world_from_camera[:, :3, :3].mT
    moments = torch.cross(sample.world_from_camera[:, None, :3, 3].expand_as(directions), directions, dim=-1)
    true = torch.tensor(expected["clips"][clip]["moments_directions"], dtype=torch.float64)
    assert largest(true - torch.cat((moments, directions), dim=-1)) < 1e-5


def test_a_sample_list_may_name_a_path_once_per_lens(tmp_path: Path) -> None:
    """As UCPE's demo/teaser.json does: read which?"""
    rows = [
        {"pose_path": "pose-test/a.npy", "x_fov": x_fov, "xi": xi} for x_fov, xi in ((120, 0), (120, 0.0), (160, 1.5))
    ]
    np.save(tmp_path / "a.npy", torch.eye(4)[None, :3].numpy())
    (tmp_path / "list.json").write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=r"one lens for a.npy, got x_fov and xi \[\(120.0, 0.0\), \(160.0, 1.5\)\]"):
        formats.read(tmp_path / "a.npy", sidecar=tmp_path / "list.json", image_size=(52, 30))
    (tmp_path / "list.json").write_text(json.dumps(rows[:2]))
    assert formats.read(tmp_path / "a.npy", sidecar=tmp_path / "list.json", image_size=(52, 30)).lens is not None

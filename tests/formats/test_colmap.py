"""COLMAP models, text and binary, against pycolmap: poses and every camera model, in both directions."""

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pycolmap
import pytest
import torch
from lens_zoo import LENSES
from paths import largest, lens_difference, random_trajectory

from merope import formats
from merope.formats.colmap import MODELS, NUMBERED
from merope.geometry.poses import inverse

PARAMETERS = {
    "f": 500.0, "fx": 501.0, "fy": 498.0, "cx": 322.0, "cy": 237.0, "k1": 0.02, "k2": -0.01, "k3": 0.003, "k4": -5e-4,
    "k5": 1e-3, "k6": 2e-3, "p1": 1e-3, "p2": -8e-4, "alpha": 0.6, "beta": 1.1, "w": 640.0, "h": 480.0,
}  # fmt: skip


def points_ahead(count: int = 50) -> np.ndarray:  # [count, 3]
    generator = np.random.default_rng(0)
    return np.concatenate((generator.uniform(-0.5, 0.5, (count, 2)), np.ones((count, 1))), axis=1) * 3.0


def write_with_pycolmap(folder: Path, model: str) -> pycolmap.Reconstruction:
    reconstruction = pycolmap.Reconstruction()
    parameters = [PARAMETERS[name] for name in MODELS[model][1].split()]
    camera = pycolmap.Camera(model=model, width=640, height=480, params=parameters, camera_id=3)
    reconstruction.add_camera_with_trivial_rig(camera)
    generator = np.random.default_rng(1)
    for k in (2, 10, 1):
        rotation = pycolmap.Rotation3d(generator.normal(size=4) / 1.0)
        rotation.normalize()
        image = pycolmap.Image(name=f"image {k}.png", camera_id=3, image_id=k)
        reconstruction.add_image_with_trivial_frame(image, pycolmap.Rigid3d(rotation, generator.normal(size=3)))
    reconstruction.write_text(folder)
    return reconstruction


@pytest.mark.parametrize("model", MODELS)
def test_what_pycolmap_writes_is_read_as_it_means(tmp_path: Path, model: str) -> None:
    theirs = write_with_pycolmap(tmp_path, model)
    ours = formats.read(tmp_path)
    assert formats.detect(tmp_path) == formats.detect(tmp_path / "images.txt") == "colmap"
    assert ours.frame_names == ("image 1.png", "image 2.png", "image 10.png")
    assert not ours.is_metric
    camera_from_world = inverse(ours.world_from_camera).numpy()
    for k, image_id in enumerate((1, 2, 10)):
        expected = theirs.images[image_id].cam_from_world().matrix()
        assert np.abs(camera_from_world[k, :3] - expected).max() < 1e-12
    assert ours.lens is not None
    pixels, valid = ours.lens.project(torch.from_numpy(points_ahead()))
    assert valid.all()
    expected = np.asarray(theirs.cameras[3].img_from_cam(points_ahead()))
    assert np.abs(pixels.numpy() - expected).max() < 1e-9


@pytest.mark.parametrize("model", MODELS)
def test_binary_models_are_those_of_the_text(tmp_path: Path, model: str) -> None:
    (tmp_path / "text").mkdir()
    (binary := tmp_path / "binary").mkdir()
    write_with_pycolmap(tmp_path / "text", model).write_binary(binary)
    assert formats.detect(binary) == "colmap"
    ours, expected = formats.read(binary), formats.read(tmp_path / "text")
    assert largest(ours.world_from_camera - expected.world_from_camera) < 1e-14
    assert (ours.name, ours.frame_names) == ("binary", expected.frame_names)
    assert lens_difference(ours.lens, expected.lens) < 1e-14


def test_of_both_kinds_of_files_the_binary_ones_are_read_as_colmap_does(tmp_path: Path) -> None:
    old = write_with_pycolmap(tmp_path, "PINHOLE")
    (refined := tmp_path / "refined").mkdir()
    old.write_binary(refined)
    old.transform(pycolmap.Sim3d(2.0, pycolmap.Rotation3d(), np.zeros(3)))
    old.write_binary(tmp_path)
    ours, theirs = formats.read(tmp_path), pycolmap.Reconstruction(tmp_path)
    assert np.allclose(ours.world_from_camera[0, :3, 3].numpy(), theirs.image(1).projection_center())
    expected = formats.read(refined).world_from_camera  # what the text still says
    assert largest(formats.read(tmp_path / "images.txt").world_from_camera - expected) < 1e-12


def test_numbers_of_models_are_those_of_colmap() -> None:
    theirs = {int(number): name for name, number in pycolmap.CameraModelId.__members__.items() if name != "INVALID"}
    assert theirs == dict(enumerate(NUMBERED))


def test_points_of_images_are_skipped(tmp_path: Path) -> None:
    model = write_with_pycolmap(tmp_path, "PINHOLE")
    for image in model.images.values():
        image.points2D = pycolmap.Point2DList([pycolmap.Point2D(np.array([1.0, 2.0])) for _ in range(7)])
    (binary := tmp_path / "binary").mkdir()
    model.write_binary(binary)
    expected = formats.read(tmp_path)
    assert largest(formats.read(binary).world_from_camera - expected.world_from_camera) < 1e-14


def test_damaged_binary_models_are_refused(tmp_path: Path) -> None:
    """Cut anywhere, a camera that is not there, counts far beyond the file: an error, and no memory for it."""
    write_with_pycolmap(tmp_path, "PINHOLE").write_binary(tmp_path)
    for text in tmp_path.glob("*.txt"):
        text.unlink()
    for name in ("images.bin", "cameras.bin"):
        whole = (tmp_path / name).read_bytes()
        for length in range(len(whole)):
            (tmp_path / name).write_bytes(whole[:length])
            with pytest.raises(ValueError, match=rf"{name} must be .*cut off"):
                formats.read(tmp_path)
        (tmp_path / name).write_bytes(struct.pack("<Q", 2**60) + whole[8:])
        with pytest.raises(ValueError, match=rf"{name} must be a whole COLMAP file"):
            formats.read(tmp_path)
        (tmp_path / name).write_bytes(whole)
    (tmp_path / "images.bin").write_bytes(whole_images(camera=9, points=0))
    with pytest.raises(ValueError, match=r"image 1 must be an image of a camera in cameras.bin \(\[3\]\), got 9"):
        formats.read(tmp_path)
    (tmp_path / "images.bin").write_bytes(whole_images(camera=3, points=2**60))
    with pytest.raises(ValueError, match=r"images.bin must be a whole COLMAP file, with .* more bytes, got 0 of them"):
        formats.read(tmp_path)
    (tmp_path / "cameras.bin").write_bytes(struct.pack("<QiiQQ", 1, 3, 7, 640, 480))
    with pytest.raises(ValueError, match=r"camera 3 must be one of the models SIMPLE_PINHOLE.*got FOV"):
        formats.read(tmp_path)
    (tmp_path / "cameras.bin").write_bytes(struct.pack("<QiiQQ", 1, 3, 99, 640, 480))
    with pytest.raises(ValueError, match=r"camera 3 must be one of the models SIMPLE_PINHOLE.*got number 99"):
        formats.read(tmp_path)


def test_points_in_space_are_not_read(tmp_path: Path) -> None:
    """Eight bytes that promise 2⁶⁰ points, and a model without them at all."""
    write_with_pycolmap(tmp_path, "PINHOLE").write_binary(tmp_path)
    expected = formats.read(tmp_path)
    for text in tmp_path.glob("*.txt"):
        text.unlink()
    (tmp_path / "points3D.bin").write_bytes(struct.pack("<Q", 2**60))
    assert largest(formats.read(tmp_path).world_from_camera - expected.world_from_camera) < 1e-14
    (tmp_path / "points3D.bin").unlink()
    assert formats.read(tmp_path).count == expected.count


def whole_images(camera: int, points: int) -> bytes:
    """An images.bin with one image."""
    return struct.pack("<QI7dI", 1, 1, 1.0, *[0.0] * 6, camera) + b"a.png\0" + struct.pack("<Q", points)


def test_images_without_their_cameras_name_the_missing_file(tmp_path: Path) -> None:
    (tmp_path / "images.txt").write_text("1 1 0 0 0 0 0 1 3 a.png\n\n")
    with pytest.raises(ValueError, match=r"a folder with cameras\.txt and images\.txt, got no cameras\.txt"):
        formats.read(tmp_path / "images.txt", format="colmap")


@pytest.mark.parametrize("name", ["pinhole", "brown", "rational", "fisheye", "extended-0.7", "panorama"])
def test_what_we_write_is_read_by_pycolmap_as_we_mean(tmp_path: Path, name: str) -> None:
    trajectory = replace(random_trajectory("colmap"), lens=LENSES[name])
    formats.write(trajectory, tmp_path / "model", "colmap")
    theirs = pycolmap.Reconstruction(tmp_path / "model")
    assert theirs.num_images() == 7
    images = {image.name: image for image in theirs.images.values()}
    for frame_name, pose in zip(trajectory.frame_names or (), inverse(trajectory.world_from_camera), strict=True):
        assert np.abs(images[frame_name].cam_from_world().matrix() - pose[:3].numpy()).max() < 1e-12
    (camera,) = theirs.cameras.values()
    pixels, _ = LENSES[name].project(torch.from_numpy(points_ahead()))
    assert np.abs(np.asarray(camera.img_from_cam(points_ahead())) - pixels.numpy()).max() < 1e-9
    back = formats.read(tmp_path / "model")
    assert lens_difference(back.lens, LENSES[name]) < 1e-12
    assert largest(back.world_from_camera - trajectory.world_from_camera) < 1e-12


def test_points_may_be_listed_or_blank(tmp_path: Path) -> None:
    write_with_pycolmap(tmp_path, "PINHOLE")
    images = tmp_path / "images.txt"
    blank = formats.read(tmp_path).world_from_camera
    lines = images.read_text().splitlines()
    filled = [line if line.strip() else "10.0 20.0 -1 30.0 40.0 7" for line in lines]
    images.write_text("\n".join(filled))
    assert torch.equal(formats.read(tmp_path).world_from_camera, blank)


@pytest.mark.parametrize("name", ["image 10.png", "a b c", "10"])
def test_images_without_their_lines_of_points_are_refused(tmp_path: Path, name: str) -> None:
    """They would be taken for the points of the image above: every other pose would be lost without a word."""
    (tmp_path / "cameras.txt").write_text("3 PINHOLE 640 480 500 500 320 240\n")
    rows = [f"{k} 1 0 0 0 0 0 {k} 3 {name}{k}\n" for k in range(4)]
    (tmp_path / "images.txt").write_text("".join(rows))
    with pytest.raises(ValueError, match=r"images.txt:2 must be the 2-D points .* put a blank line after every image"):
        formats.read(tmp_path)
    (tmp_path / "images.txt").write_text("\n".join(rows))
    assert formats.read(tmp_path).count == 4


def test_models_without_a_lens_of_ours_and_mixed_models_are_refused(tmp_path: Path) -> None:
    write_with_pycolmap(tmp_path, "PINHOLE")
    cameras, images = tmp_path / "cameras.txt", tmp_path / "images.txt"
    cameras.write_text("# comment\n3 FOV 640 480 500 500 320 240 0.9\n")
    with pytest.raises(ValueError, match=r"cameras.txt:2 must be one of the models SIMPLE_PINHOLE.*, got FOV"):
        formats.read(tmp_path)
    cameras.write_text("1 PINHOLE 640 480 500 500 320 240\n")
    with pytest.raises(
        ValueError, match=r"images.txt:\d+ must be an image of a camera in cameras.txt \(\[1\]\), got 3"
    ):
        formats.read(tmp_path)
    cameras.write_text("3 PINHOLE 640 480 500 500 320 240\n4 PINHOLE 320 240 500 500 320 240\n")
    images.write_text(images.read_text().replace(" 3 image 10", " 4 image 10"))
    with pytest.raises(ValueError, match=r"one camera model and image size for all images, got 2"):
        formats.read(tmp_path)
    cameras.write_text("3 PINHOLE 640 480 500 500 320\n")
    with pytest.raises(ValueError, match=r"cameras.txt:1 must be 4 numbers \(fx fy cx cy\), got 3 of them"):
        formats.read(tmp_path)

"""Structure from motion with COLMAP's global mapper (GLOMAP): needs no weights, and is the default for real video."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from merope.evaluate.estimators.estimator import PoseEstimate, check_frames, failed
from merope.evaluate.estimators.packages import import_package
from merope.evaluate.estimators.remap import pinhole_view
from merope.formats.video import write_image
from merope.geometry.lenses import Lens, Pinhole
from merope.geometry.poses import inverse

MIN_FRAMES = 3  # the smallest model that the mapper keeps
MAX_EPIPOLAR_ERROR_PX = 1.0  # of a match, between two views; COLMAP's 4 px let wrong turns through (docs/estimators.md)


@dataclass(frozen=True)
class ColmapEstimator:
    """SIFT, matches within `overlap` frames, global mapping. Scale is arbitrary.

    A known lens is used and kept; without one a single focal length is estimated, which needs a turn in the path. With
    one thread the seed makes runs repeatable to the last bit; with more the order of the work changes the result within
    its error. Run clips side by side instead.
    """

    overlap: int = 10
    seed: int = 0
    threads: int = 1  # −1 takes all cores

    name = "colmap-global"

    def __call__(self, frames: Tensor, lens: Lens | None) -> PoseEstimate:  # uint8 [T, H, W, 3]
        check_frames(frames, lens)
        if lens is None:
            return self._estimate(frames, None)
        view = pinhole_view(frames, lens)
        return view.restored(self._estimate(view.frames, view.lens))

    def _estimate(self, frames: Tensor, lens: Pinhole | None) -> PoseEstimate:
        if len(frames) < MIN_FRAMES:
            return failed(len(frames), self.name, f"{len(frames)} frames, structure from motion needs {MIN_FRAMES}")
        with tempfile.TemporaryDirectory(prefix="merope-colmap-") as folder, _quiet_logs():
            try:
                models = self._reconstructed(frames, lens, Path(folder))
            except RuntimeError as error:  # what pycolmap raises when its pipeline cannot go on
                return failed(len(frames), self.name, f"COLMAP stopped: {error}")
        if not models:
            return failed(len(frames), self.name, "no reconstruction: too little texture or no parallax")
        found = self._of_largest(models, len(frames))
        return found if lens is None else replace(found, lens=None)

    def _reconstructed(self, frames: Tensor, lens: Pinhole | None, folder: Path) -> list[Any]:
        """The models that COLMAP finds, each a pycolmap.Reconstruction."""
        pycolmap: Any = import_package("pycolmap")

        images, database = folder / "images", folder / "database.db"
        images.mkdir()
        for t, frame in enumerate(frames):
            write_image(frame, images / f"{t:06d}.bmp")  # PNG takes as long as half of the features
        extraction = pycolmap.FeatureExtractionOptions(num_threads=self.threads)
        pycolmap.extract_features(
            database, images, camera_mode=pycolmap.CameraMode.SINGLE, reader_options=_camera_options(lens),
            extraction_options=extraction, device=pycolmap.Device.cpu,
        )  # fmt: skip
        pairing = pycolmap.SequentialPairingOptions(overlap=self.overlap, quadratic_overlap=False)
        matching = pycolmap.FeatureMatchingOptions(num_threads=self.threads)
        verification = pycolmap.TwoViewGeometryOptions()
        verification.ransac.max_error = MAX_EPIPOLAR_ERROR_PX
        pycolmap.match_sequential(database, matching, pairing, verification, device=pycolmap.Device.cpu)
        if lens is None:  # the mapper takes the focal length it is given for nearly right, and COLMAP's guess is not
            pycolmap.calibrate_view_graph(database, pycolmap.ViewGraphCalibrationOptions(random_seed=self.seed))
        options = pycolmap.GlobalPipelineOptions(num_threads=self.threads, random_seed=self.seed)
        options.mapper.bundle_adjustment.refine_focal_length = lens is None
        return list(pycolmap.global_mapping(database, images, folder, options).values())

    def _of_largest(self, models: list[Any], count: int) -> PoseEstimate:
        """Poses of the model that holds most frames; the others have their own scales and are of no use."""
        largest = max(models, key=lambda model: model.num_reg_images())
        camera_from_world = torch.eye(4, dtype=torch.float64).repeat(count, 1, 1)
        valid = torch.zeros(count, dtype=torch.bool)
        registered = [image for image in largest.images.values() if image.has_pose]
        for image in registered:
            t = int(Path(image.name).stem)
            camera_from_world[t, :3] = torch.from_numpy(image.cam_from_world().matrix())
            valid[t] = True
        inliers = min((image.num_points3D for image in registered), default=0)
        missing = count - int(valid.sum())
        note = f"{missing} of {count} frames not registered" if missing else ""
        if len(models) > 1:
            note = "; ".join(filter(None, (note, f"the largest of {len(models)} separate reconstructions")))
        return PoseEstimate(
            inverse(camera_from_world), valid, False, self.name,
            note=note, inliers=inliers, lens=_found_lens(largest), points=_points(largest),
        )  # fmt: skip


def _found_lens(model: Any) -> Pinhole:
    """Of the one camera of all frames."""
    (camera,) = model.cameras.values()
    centre = (float(camera.principal_point_x), float(camera.principal_point_y))
    return Pinhole(float(camera.focal_length_x), float(camera.focal_length_y), *centre, camera.width, camera.height)


def _points(model: Any) -> Tensor:  # [N, 3]
    places = [point.xyz for point in model.points3D.values()]
    return torch.tensor(np.array(places), dtype=torch.float64).reshape(-1, 3)


def _camera_options(lens: Pinhole | None) -> Any:
    """COLMAP's pixels have their top-left centre at (0.5, 0.5), as ours."""
    pycolmap: Any = import_package("pycolmap")

    if lens is None:
        return pycolmap.ImageReaderOptions(camera_model="SIMPLE_PINHOLE")
    parameters = ",".join(repr(float(value)) for value in (lens.fx, lens.fy, lens.cx, lens.cy))
    return pycolmap.ImageReaderOptions(camera_model="PINHOLE", camera_params=parameters)


@contextmanager
def _quiet_logs() -> Iterator[None]:
    """Only errors that end the program reach the terminal: a hard clip is reported in the estimate's note."""
    pycolmap: Any = import_package("pycolmap")

    before = pycolmap.logging.minloglevel
    pycolmap.logging.minloglevel = pycolmap.logging.FATAL.value
    try:
        yield
    finally:
        pycolmap.logging.minloglevel = before

"""Learned pose estimators behind one call: VGGT-Ω (the paper's), VGGT, Depth Anything 3, MapAnything.

Their packages and weights come from their authors, under their licences (docs/estimators.md). Nothing is downloaded: a
checkpoint is a path, and the hash of what was loaded is part of every estimate. Each adapter is two functions: how the
model is loaded from a path, and how frames become world_from_camera [T, 4, 4].
"""

import hashlib
import importlib
import importlib.util
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from merope.errors import invalid
from merope.evaluate.estimators.estimator import PoseEstimate, check_frames
from merope.evaluate.estimators.remap import pinhole_view
from merope.geometry.lenses import Lens, Pinhole
from merope.geometry.poses import inverse, orthonormalise, rigid
from merope.geometry.quaternions import matrix_from_quaternion

WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
OMEGA_PATCH, VGGT_PATCH, VGGT_WIDTH = 16, 14, 518

Load = Callable[[Path], Any]  # checkpoint -> model
Infer = Callable[[Any, Tensor, Pinhole | None, str], Tensor]  # model, frames, lens, device -> [T, 4, 4]


class LearnedEstimator:
    """A model that recovers all poses of a clip in one forward pass. It is loaded at the first clip and kept."""

    def __init__(
        self, name: str, package: str, source: str, checkpoint: Path | str, load: Load, infer: Infer,
        is_metric: bool, device: str | None = None,
    ) -> None:  # fmt: skip
        self.name, self.checkpoint, self.is_metric = name, Path(checkpoint), is_metric
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._load, self._infer = load, infer
        if importlib.util.find_spec(package) is None:
            fix = f"install it from source: pip install --no-deps git+https://github.com/{source}"
            raise invalid(f"package {package}", f"installed for the estimator {name}", "no such package", fix)
        if not self.checkpoint.exists():
            fix = f"download the weights that https://github.com/{source} names and pass their path"
            raise invalid("checkpoint", f"a file or folder with the weights of {name}", str(checkpoint), fix)

    @cached_property
    def weights_sha256(self) -> str:
        """Of the checkpoint; of a folder, that of the list of its weight files with theirs."""
        return _sha256(self.checkpoint)

    @cached_property
    def _model(self) -> Any:
        return self._load(self.checkpoint).to(self.device).eval()

    def __call__(self, frames: Tensor, lens: Lens | None) -> PoseEstimate:  # uint8 [T, H, W, 3]
        check_frames(frames, lens)
        view = None if lens is None else pinhole_view(frames, lens)
        images, pinhole = (frames, None) if view is None else (view.frames, view.lens)
        with torch.inference_mode():
            poses = self._infer(self._model, images, pinhole, self.device)
        poses = poses.detach().to("cpu", torch.float64).clone()
        valid = poses.isfinite().flatten(1).all(dim=-1)
        poses = torch.where(valid[:, None, None], poses, torch.eye(4, dtype=torch.float64))
        poses = rigid(orthonormalise(poses[:, :3, :3]), poses[:, :3, 3])  # float32 and bf16 models round
        lost = int((~valid).sum())
        note = f"{lost} of {len(frames)} poses are not finite" if lost else ""
        estimate = PoseEstimate(poses, valid, self.is_metric, self.name, self.weights_sha256, note)
        return estimate if view is None else view.restored(estimate)


def vggt_omega(
    checkpoint: Path | str,
    mode: Literal["balanced", "max_size"] = "balanced",
    resolution: int = 512,
    device: str | None = None,
) -> LearnedEstimator:
    """VGGT-Ω, with which the paper measures. `mode` is that of its authors' preprocessing, which the paper leaves open:
    "balanced" scales to resolution² pixels, "max_size" the longer side to `resolution`."""
    if mode not in ("balanced", "max_size"):
        raise invalid("mode", "'balanced' or 'max_size'", repr(mode), "'balanced' is upstream's default")

    def load(path: Path) -> Any:
        model = importlib.import_module("vggt_omega.models").VGGTOmega(enable_depth=False)
        return _with_weights(model, path)

    def infer(model: Any, frames: Tensor, lens: Pinhole | None, device: str) -> Tensor:
        images = _scaled(frames, _omega_size(frames.shape[1], frames.shape[2], mode, resolution)).to(device)
        return inverse(decoded_cameras(model(images)["pose_enc"])[0])

    name = f"vggt-omega ({mode} {resolution})"
    return LearnedEstimator(
        name, "vggt_omega", "facebookresearch/vggt-omega", checkpoint, load, infer, False, device
    )  # fmt: skip


def vggt(checkpoint: Path | str, device: str | None = None) -> LearnedEstimator:
    """VGGT from its model.pt or from a folder in Hugging Face's layout."""

    def load(path: Path) -> Any:
        model_class = importlib.import_module("vggt.models.vggt").VGGT
        return model_class.from_pretrained(str(path)) if path.is_dir() else _with_weights(model_class(), path)

    def infer(model: Any, frames: Tensor, lens: Pinhole | None, device: str) -> Tensor:
        height = VGGT_PATCH * max(1, round(VGGT_WIDTH * frames.shape[1] / frames.shape[2] / VGGT_PATCH))
        images = _scaled(frames, (height, VGGT_WIDTH)).to(device)
        with torch.autocast("cuda", torch.bfloat16, enabled=device.startswith("cuda")):
            encoding = model(images)["pose_enc"]
        return inverse(decoded_cameras(encoding)[0])

    return LearnedEstimator("vggt", "vggt", "facebookresearch/vggt", checkpoint, load, infer, False, device)


def depth_anything_3(checkpoint: Path | str, is_metric: bool = False, device: str | None = None) -> LearnedEstimator:
    """Depth Anything 3 from a folder in Hugging Face's layout; pass is_metric=True for the nested models only."""

    def load(path: Path) -> Any:
        return importlib.import_module("depth_anything_3.api").DepthAnything3.from_pretrained(str(path))

    def infer(model: Any, frames: Tensor, lens: Pinhole | None, device: str) -> Tensor:
        camera_from_world = torch.as_tensor(model.inference(list(frames.numpy())).extrinsics, dtype=torch.float64)
        return inverse(rigid(orthonormalise(camera_from_world[:, :3, :3]), camera_from_world[:, :3, 3]))

    return LearnedEstimator(
        "depth-anything-3", "depth_anything_3", "ByteDance-Seed/Depth-Anything-3", checkpoint, load, infer, is_metric,
        device,
    )  # fmt: skip


def map_anything(checkpoint: Path | str, device: str | None = None) -> LearnedEstimator:
    """MapAnything from a folder in Hugging Face's layout: metric, and told the intrinsics where they are known."""

    def load(path: Path) -> Any:
        return importlib.import_module("mapanything.models").MapAnything.from_pretrained(str(path))

    def infer(model: Any, frames: Tensor, lens: Pinhole | None, device: str) -> Tensor:
        views: list[dict[str, Tensor]] = [{"img": frame} for frame in frames]
        if lens is not None:
            views = [{**view, "intrinsics": intrinsics_from_0(lens)} for view in views]
        views = importlib.import_module("mapanything.utils.image").preprocess_inputs(views)
        predictions = model.infer(views, use_amp=device.startswith("cuda"))
        return torch.cat([prediction["camera_poses"] for prediction in predictions])

    return LearnedEstimator(
        "map-anything", "mapanything", "facebookresearch/map-anything", checkpoint, load, infer, True, device
    )


def decoded_cameras(
    encoding: Tensor,  # [..., 9]: translation, quaternion (x, y, z, w), vertical and horizontal FoV in radians
) -> Tensor:  # [..., 4, 4] camera_from_world float64
    """Camera-from-world matrices of VGGT's and VGGT-Ω's pose encoding, OpenCV axes. The FoV is not needed."""
    encoding = encoding.to(torch.float64)
    quaternion = torch.nn.functional.normalize(encoding[..., [6, 3, 4, 5]], dim=-1)
    return rigid(matrix_from_quaternion(quaternion), encoding[..., :3])


def _omega_size(height: int, width: int, mode: str, resolution: int) -> tuple[int, int]:
    """Height and width in whole patches, near the proportions of the frames."""
    scale = resolution / ((height * width) ** 0.5 if mode == "balanced" else max(height, width))
    rows, columns = (max(1, round(side * scale / OMEGA_PATCH)) for side in (height, width))
    return rows * OMEGA_PATCH, columns * OMEGA_PATCH


def _scaled(frames: Tensor, size: tuple[int, int]) -> Tensor:  # uint8 [T, H, W, 3] -> float32 [T, 3, h, w] in [0, 1]
    images = frames.permute(0, 3, 1, 2).float() / 255.0
    if tuple(images.shape[-2:]) == size:
        return images
    return interpolate(images, size, mode="bicubic", antialias=True, align_corners=False).clamp(0.0, 1.0)


def intrinsics_from_0(lens: Pinhole) -> Tensor:  # [3, 3] float32
    """A pinhole where the centre of the first pixel is at 0, as MapAnything has it; ours is at 0.5."""
    fx, fy, cx, cy = (float(value) for value in (lens.fx, lens.fy, lens.cx, lens.cy))
    return torch.tensor([[fx, 0.0, cx - 0.5], [0.0, fy, cy - 0.5], [0.0, 0.0, 1.0]])


def _with_weights(model: Any, path: Path) -> Any:
    """The model with the weights of a file; heads that the checkpoint has and the model left out do not matter."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        state = load_file(str(path))
    else:
        state = torch.load(path, map_location="cpu", weights_only=True)
    missing, _ = model.load_state_dict(state, strict=False)
    if missing:
        got = f"{len(missing)} parameters without a value, such as {missing[0]}"
        raise invalid("checkpoint", f"weights of {type(model).__name__}", got, f"check {path}")
    return model


def _sha256(checkpoint: Path) -> str:
    if checkpoint.is_file():
        with checkpoint.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    files = sorted(path for path in checkpoint.rglob("*") if path.suffix in WEIGHT_SUFFIXES)
    if not files:
        fix = "pass the folder that holds the weights"
        raise invalid("checkpoint", f"a folder with {', '.join(WEIGHT_SUFFIXES)} files", str(checkpoint), fix)
    lines = "".join(f"{_sha256(path)}  {path.relative_to(checkpoint)}\n" for path in files)
    return hashlib.sha256(lines.encode()).hexdigest()

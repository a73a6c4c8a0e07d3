"""FID and FVD with the public TorchScript detectors, given as files. Nothing is downloaded.

A TorchScript file is a program: making a detector from one runs it. Use files whose origin you trust.

Both files scale and normalise frames themselves, from 0 … 255; so frames go in as they are, and the resize filter is
part of the file.
"""

import hashlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from merope.errors import invalid
from merope.evaluate.frechet import FeatureSource, FrechetStatistics, frechet_distance

PREFIX_FRAMES = 9
"""Frames of a 49-frame clip that the model was given: the paper scores the other 40."""

INCEPTION_HINT = (
    "get inception-2015-12-05.pt, the TorchScript file of NVIDIA's StyleGAN3 evaluation (NVIDIA NGC), and pass its path"
)
I3D_HINT = "get i3d_torchscript.pt, the file that StyleGAN-V's FVD code links to, and pass its path"

Videos = Iterable[Tensor]  # each uint8 [T, H, W, 3]
Scored = Videos | FrechetStatistics  # as they are, or what is left to know of them


class Detector(Protocol):
    """Turns the frames of a video into features: one per frame, or one for all of them."""

    name: str
    weights_sha256: str
    resize: str
    is_per_frame: bool

    def __call__(self, frames: Tensor) -> Tensor:  # uint8 [T, H, W, 3] -> [T or 1, d]
        ...


class InceptionDetector:
    """Inception-v3 of 2015 as TensorFlow published it, 2048 numbers per frame: the detector of FID.

    Reads the TorchScript translation that StyleGAN2-ADA and StyleGAN3 evaluate with: called as
    `detector(images, return_features=True)` with uint8 [N, 3, H, W], it resizes to 299 × 299 bilinearly as TensorFlow 1
    did. clean-fid and torchmetrics resize otherwise and give other numbers.
    """

    name = "inception"
    resize = "inside the detector file: bilinear to 299 x 299, as TensorFlow 1"
    is_per_frame = True

    def __init__(self, path: Path | str, device: torch.device | str = "cpu", batch_frames: int = 64) -> None:
        self.weights_sha256, self._network = load_torchscript(path, INCEPTION_HINT, device)
        self._device, self._batch_frames = device, batch_frames

    def __call__(self, frames: Tensor) -> Tensor:  # uint8 [T, H, W, 3] -> [T, d]
        images = frames.permute(0, 3, 1, 2)
        with torch.inference_mode():
            batches = [
                self._network(batch.contiguous().to(self._device), return_features=True).cpu()
                for batch in images.split(self._batch_frames)
            ]
        return torch.cat(batches)


class I3DDetector:
    """I3D trained on Kinetics-400, the 400 numbers before its softmax per video: the detector of FVD.

    Reads the TorchScript file that StyleGAN-V evaluates with: called as
    `detector(videos, rescale=True, resize=True, return_features=True)` with [N, 3, T, H, W] in 0 … 255, it resizes to
    224 × 224 bilinearly. Other I3D files (VideoGPT, TATS) give other numbers.
    """

    name = "i3d"
    resize = "inside the detector file: bilinear to 224 x 224"
    is_per_frame = False

    def __init__(self, path: Path | str, device: torch.device | str = "cpu") -> None:
        self.weights_sha256, self._network = load_torchscript(path, I3D_HINT, device)
        self._device = device

    def __call__(self, frames: Tensor) -> Tensor:  # uint8 [T, H, W, 3] -> [1, d]
        video = frames.permute(3, 0, 1, 2)[None].contiguous().to(self._device, torch.float32)
        with torch.inference_mode():
            return self._network(video, rescale=True, resize=True, return_features=True).cpu()


def load_torchscript(
    path: Path | str, hint: str, device: torch.device | str
) -> tuple[str, torch.jit.ScriptModule]:  # sha256, network
    """A TorchScript file and the sha256 of its bytes; a missing or other file is refused with where to get it."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"detector {path} is missing and is never downloaded; {hint}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    try:
        network = _quiet_load(path, device)
    except RuntimeError as error:
        raise invalid("path", "a TorchScript file", f"{path} ({str(error).splitlines()[0]})", hint) from error
    _warn_once()
    return digest, network.eval()


def _quiet_load(path: Path, device: torch.device | str) -> torch.jit.ScriptModule:
    with warnings.catch_warnings():  # one sentence of ours instead of a warning per file and call
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.load(str(path), map_location=device)


@cache  # so that the second call does nothing
def _warn_once() -> None:
    message = "TorchScript is deprecated in PyTorch; the public FID and FVD detectors exist in no other form"
    warnings.warn(message, FutureWarning, stacklevel=4)


def feature_statistics(videos: Videos, detector: Detector, prefix_frames: int = PREFIX_FRAMES) -> FrechetStatistics:
    """Statistics of a set of videos [T, H, W, 3] that may be a generator, without their first `prefix_frames`.

    All videos must have the same number of frames: features of clips of different length are not comparable, and of
    images the longer clips would weigh more.
    """
    if prefix_frames < 0:
        raise invalid("prefix_frames", "0 or more", prefix_frames, "the paper's clips begin with 9 given frames")
    statistics: FrechetStatistics | None = None
    for frames in _scored_frames(videos, prefix_frames):
        if statistics is None:
            frames_per_feature = 1 if detector.is_per_frame else len(frames)
            identity = detector.name, detector.weights_sha256, detector.resize
            statistics = FrechetStatistics(FeatureSource(*identity, frames_per_feature, prefix_frames))
        statistics.update(detector(frames))
    if statistics is None:
        raise invalid("videos", "at least one video", "none", "check the folder")
    return statistics


def _scored_frames(videos: Videos, prefix_frames: int) -> Iterator[Tensor]:  # uint8 [T − prefix, H, W, 3]
    frames = None
    for index, video in enumerate(videos):
        if video.dtype != torch.uint8 or video.ndim != 4 or video.shape[-1] != 3:
            got = f"{video.dtype} {list(video.shape)}"
            raise invalid(f"videos[{index}]", "uint8 [T, H, W, 3] in 0 … 255", got, "pass frames as decoded")
        frames = frames or len(video)
        if len(video) != frames or frames <= prefix_frames:
            fix = "cut all videos to one length, and pass prefix_frames=0 if they have no given frames"
            raise invalid(f"videos[{index}]", f"{frames} frames, more than {prefix_frames}", len(video), fix)
        yield video[prefix_frames:]


@dataclass(frozen=True)
class FrechetResult:
    """A distance and what it takes to say it again: the sizes of both sets, for it falls with them, and the source."""

    distance: float
    count: int  # features of the generated set: frames for FID, videos for FVD
    reference_count: int
    source: FeatureSource


def fid(generated: Scored, reference: Scored, detector: Detector, prefix_frames: int = PREFIX_FRAMES) -> FrechetResult:
    """Fréchet Inception distance over all frames after the prefix (paper: 512 clips × 40 frames)."""
    if not detector.is_per_frame:
        raise invalid("detector", "one that sees single frames", detector.name, "use InceptionDetector")
    return _distance(generated, reference, detector, prefix_frames)


def fvd(generated: Scored, reference: Scored, detector: Detector, prefix_frames: int = PREFIX_FRAMES) -> FrechetResult:
    """Fréchet video distance over clips after the prefix (paper: 512 clips of 40 frames)."""
    if detector.is_per_frame:
        raise invalid("detector", "one that sees whole clips", detector.name, "use I3DDetector")
    return _distance(generated, reference, detector, prefix_frames)


def _distance(generated: Scored, reference: Scored, detector: Detector, prefix_frames: int) -> FrechetResult:
    sets = [
        part if isinstance(part, FrechetStatistics) else feature_statistics(part, detector, prefix_frames)
        for part in (generated, reference)
    ]
    return FrechetResult(frechet_distance(*sets), sets[0].count, sets[1].count, sets[0].source)

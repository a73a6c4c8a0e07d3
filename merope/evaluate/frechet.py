"""Fréchet distance between two sets of features, each taken for a Gaussian: ‖μ₁ − μ₂‖² + tr(S₁ + S₂ − 2 (S₁ S₂)^½).

The features come from a detector (merope/evaluate/detectors.py); here is only the arithmetic, in float64.
"""

import json
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from merope.errors import invalid
from merope.formats.writing import replacing


@dataclass(frozen=True)
class FeatureSource:
    """What made the features. Distances between features of different sources mean nothing and are refused."""

    detector: str  # "inception", "i3d", …
    weights_sha256: str
    resize: str  # who scales frames to the detector's input, and how
    frames: int  # frames per feature: 1 for images, the clip length for videos
    prefix_frames: int = field(default=0, compare=False)  # left out before; reference clips may come without them


class FrechetStatistics:
    """Count, mean and covariance of features that arrive in batches, in any split and order.

    The features themselves are kept as long as there are no more of them than dimensions: then the covariance has not
    full rank, and the exact routes of `frechet_distance` need them.
    """

    def __init__(self, source: FeatureSource) -> None:
        self.source = source
        self.count = 0
        self.mean = torch.zeros(0, dtype=torch.float64)  # [d]
        self._scatter = torch.zeros(0, 0, dtype=torch.float64)  # [d, d] Σ (x − mean)(x − mean)ᵀ
        self._kept: Tensor | None = torch.zeros(0, 0, dtype=torch.float64)  # [count, d]

    @property
    def dim(self) -> int:
        return len(self.mean)

    @property
    def covariance(self) -> Tensor:  # [d, d] float64
        """Unbiased (n − 1), as every public evaluation has it."""
        if self.count < 2:
            raise invalid("features", "at least 2", self.count, "a covariance needs more images or videos")
        return self._scatter / (self.count - 1)

    @property
    def features(self) -> Tensor | None:  # [n, d] float64
        """All features while n ≤ d, else None."""
        return self._kept

    def update(self, features: Tensor) -> None:  # [n, d]
        """Add a batch. Means are combined by their difference, so that a large common offset costs no digits."""
        batch = self._checked(features)
        if self.count == 0:
            dim = batch.shape[1]
            self.mean, self._scatter = batch.new_zeros(dim), batch.new_zeros(dim, dim)
            self._kept = batch.new_zeros(0, dim)
        total = self.count + len(batch)
        batch_mean = batch.mean(0)
        shift, centred = batch_mean - self.mean, batch - batch_mean
        self._scatter += centred.mT @ centred + torch.outer(shift, shift) * (self.count * len(batch) / total)
        self.mean = self.mean + shift * (len(batch) / total)
        self.count = total
        self._kept = torch.cat((self._kept, batch)) if self._kept is not None and total <= self.dim else None

    def _checked(self, features: Tensor) -> Tensor:  # [n, d] float64
        if features.ndim != 2 or 0 in features.shape or (self.count and features.shape[1] != self.dim):
            expected = f"[n, {self.dim or 'd'}] with n ≥ 1"
            raise invalid("features", expected, list(features.shape), "use one detector for a whole set")
        if not bool(torch.isfinite(features).all()):
            raise invalid("features", "finite", "NaN or inf", "check that frames are uint8 and the detector's weights")
        return features.detach().to("cpu", torch.float64)

    def save(self, path: Path) -> None:
        """Write a .npz that other runs and other people can compare with; replaces the file in one step."""
        arrays: dict[str, Any] = {"count": self.count, "source": json.dumps(asdict(self.source))}
        arrays |= {"mean": self.mean.numpy(), "covariance": self.covariance.numpy()}
        if self._kept is not None:
            arrays["features"] = self._kept.numpy()
        with replacing(path) as part, part.open("wb") as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote."""
        try:
            with np.load(path, allow_pickle=False) as file:
                statistics = cls(FeatureSource(**json.loads(str(file["source"]))))
                statistics.count = int(file["count"])
                statistics.mean = torch.from_numpy(file["mean"])
                statistics._scatter = torch.from_numpy(file["covariance"]) * (statistics.count - 1)
                statistics._kept = torch.from_numpy(file["features"]) if "features" in file else None
        except (KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
            fix = "make it again with FrechetStatistics.save"
            raise invalid("path", "statistics written by merope", f"{path} ({error})", fix) from error
        return statistics


def frechet_distance(a: FrechetStatistics, b: FrechetStatistics) -> float:
    """Distance of two sets. Rounding can leave equal sets at −1e-6 or so of their variance; nothing is clamped.

    tr (S₁ S₂)^½ is taken by the route that is exact for the sets at hand:
    both n ≤ d: nuclear norm of the cross-Gram matrix of the features;
    one n ≤ d: eigenvalues of X S Xᵀ / (n − 1), n × n, with the features X of that one;
    both n > d: eigenvalues of S₁ S₂.
    """
    _check_comparable(a, b)
    apart = (a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace()
    if a.features is not None and b.features is not None:
        root = cross_gram_root(a.features, b.features)
    elif a.features is not None:
        root = projected_root(a.features, b.covariance)
    elif b.features is not None:
        root = projected_root(b.features, a.covariance)
    else:
        root = eigenvalue_root(a.covariance, b.covariance)
    return float(apart - 2.0 * root)


def _check_comparable(a: FrechetStatistics, b: FrechetStatistics) -> None:
    if a.source != b.source:
        fix = "make both with the same detector file, resize mode and clip length"
        raise invalid("b.source", f"{a.source} like a", b.source, fix)
    if a.dim != b.dim:
        raise invalid("b", f"features of dimension {a.dim} like a", b.dim, "make both with the same detector file")


def cross_gram_root(
    a: Tensor,  # [n, d] features
    b: Tensor,  # [m, d] features
) -> Tensor:  # []
    """tr (S_a S_b)^½ = ‖A Bᵀ‖_* / √((n − 1)(m − 1)), A and B centred.

    S_a S_b and A Bᵀ B Aᵀ share their non-zero eigenvalues, and the singular values of A Bᵀ are the roots of these.
    """
    a, b = a - a.mean(0), b - b.mean(0)
    return torch.linalg.svdvals(a @ b.mT).sum() / ((len(a) - 1) * (len(b) - 1)) ** 0.5


def eigenvalue_root(
    a: Tensor,  # [d, d] covariance
    b: Tensor,  # [d, d] covariance
) -> Tensor:  # []
    """tr (S_a S_b)^½ from the eigenvalues of the product, which are real and not negative but for rounding."""
    return torch.linalg.eigvals(a @ b).real.clamp(min=0).sqrt().sum()


def projected_root(
    features: Tensor,  # [n, d]
    covariance: Tensor,  # [d, d] of the other set
) -> Tensor:  # []
    """tr (S_a S)^½ from X S Xᵀ / (n − 1), X centred: the same non-zero eigenvalues, of an n × n symmetric matrix."""
    centred = features - features.mean(0)
    eigenvalues = torch.linalg.eigvalsh(centred @ covariance @ centred.mT) / (len(features) - 1)
    return eigenvalues.clamp(min=0).sqrt().sum()

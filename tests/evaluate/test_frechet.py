"""Fréchet distances: closed form, both exact routes, streaming, few features, files."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import sqrtm
from torch import Tensor

from merope.evaluate.frechet import (
    FeatureSource,
    FrechetStatistics,
    cross_gram_root,
    eigenvalue_root,
    frechet_distance,
    projected_root,
)

SOURCE = FeatureSource("stand-in", "0" * 64, "none", 1)
SEEDS = st.integers(0, 2**31)


def statistics(features: Tensor, batch: int = 64) -> FrechetStatistics:
    result = FrechetStatistics(SOURCE)
    for part in features.split(batch):
        result.update(part)
    return result


def gaussian(count: int, dim: int, seed: int, offset: float = 0.0) -> Tensor:  # [count, dim] float64
    """Features with variances over two orders of magnitude in random directions."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(dim, dim, dtype=torch.float64, generator=generator) * torch.linspace(0.05, 5.0, dim) / dim**0.5
    return torch.randn(count, dim, dtype=torch.float64, generator=generator) @ mixing + offset


def with_exact_moments(features: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:  # [n, d], [d], [d, d] -> [n, d]
    """The same features, made to have this sample mean and covariance."""
    centred = features - features.mean(0)
    own = centred.mT @ centred / (len(features) - 1)
    whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(own), centred.mT, upper=False)
    return whitened.mT @ torch.linalg.cholesky(covariance).mT + mean


@given(SEEDS, st.integers(1, 6))
def test_gaussians_with_common_axes_match_the_closed_form(seed: int, dim: int) -> None:
    """Commuting covariances: Σ (√a − √b)² + ‖difference of means‖²."""
    generator = torch.Generator().manual_seed(seed)
    axes = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64, generator=generator)).Q
    a, b = 0.1 + 3 * torch.rand(2, dim, dtype=torch.float64, generator=generator)
    means = torch.randn(2, dim, dtype=torch.float64, generator=generator)
    sets = [
        statistics(with_exact_moments(gaussian(40, dim, seed + k), means[k], axes @ variances.diag() @ axes.mT))
        for k, variances in enumerate((a, b))
    ]
    expected = float((a.sqrt() - b.sqrt()).square().sum() + (means[0] - means[1]).square().sum())
    assert frechet_distance(*sets) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("n", "m", "dim"), [(100, 80, 20), (80, 90, 79), (30, 40, 50), (30, 90, 50), (2, 2, 8)])
def test_the_routes_agree(n: int, m: int, dim: int) -> None:
    x, y = gaussian(n, dim, 0), gaussian(m, dim, 1, offset=0.5)
    a, b = statistics(x), statistics(y)
    by_gram = float(cross_gram_root(x, y))
    assert float(eigenvalue_root(a.covariance, b.covariance)) == pytest.approx(by_gram, rel=1e-6)
    assert float(projected_root(x, b.covariance)) == pytest.approx(by_gram, rel=1e-6)
    assert float(projected_root(y, a.covariance)) == pytest.approx(by_gram, rel=1e-6)
    apart = float((x.mean(0) - y.mean(0)).square().sum() + a.covariance.trace() + b.covariance.trace())
    assert frechet_distance(a, b) == pytest.approx(apart - 2 * by_gram, rel=1e-6)
    assert frechet_distance(b, a) == pytest.approx(frechet_distance(a, b), rel=1e-6)


def test_equals_the_matrix_square_root() -> None:
    x, y = gaussian(200, 30, 2), gaussian(150, 30, 3, offset=1.0)
    s1, s2 = np.cov(x.numpy().T), np.cov(y.numpy().T)
    apart = float((x.mean(0) - y.mean(0)).square().sum())
    expected = apart + np.trace(s1 + s2 - 2 * sqrtm(s1 @ s2).real)
    assert frechet_distance(statistics(x), statistics(y)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("n", "dim"), [(200, 40), (20, 40), (40, 40), (41, 40)])
def test_identical_sets_are_at_distance_zero(n: int, dim: int) -> None:
    a = statistics(gaussian(n, dim, 4, offset=10.0))
    assert abs(frechet_distance(a, a)) < 1e-6 * float(a.covariance.trace())


@given(SEEDS, st.integers(1, 90), st.booleans())
def test_any_split_gives_the_same_statistics(seed: int, batch: int, is_far: bool) -> None:
    """Also a million away from the origin, where sums of squares would keep no digit of the covariance."""
    features = gaussian(90, 5, seed, offset=1e6 if is_far else 0.0)
    result = statistics(features, batch)
    assert result.count == 90
    assert torch.allclose(result.mean, features.mean(0), rtol=1e-12, atol=1e-12)
    assert torch.allclose(result.covariance, features.mT.cov(), rtol=1e-7, atol=1e-9)


def test_float32_features_are_accumulated_in_float64() -> None:
    features = (gaussian(300, 4, 5) + 1000).to(torch.float32)
    assert torch.allclose(statistics(features).covariance, features.double().mT.cov(), rtol=1e-10)


def test_features_are_kept_only_while_they_are_needed() -> None:
    features = gaussian(9, 8, 6)
    result = FrechetStatistics(SOURCE)
    result.update(features[:5])
    result.update(features[5:8])
    assert torch.equal(result.features, features[:8])
    result.update(features[8:])
    assert result.features is None


@pytest.mark.parametrize("count", [6, 30])
def test_files_return_what_was_written(tmp_path: Path, count: int) -> None:
    source = FeatureSource("i3d", "ab" * 32, "inside", 40, prefix_frames=9)
    written = FrechetStatistics(source)
    written.update(gaussian(count, 12, 7))
    written.save(tmp_path / "new folder" / "reference.npz")
    read = FrechetStatistics.load(tmp_path / "new folder" / "reference.npz")
    assert (read.source, read.source.prefix_frames, read.count, read.dim) == (source, 9, count, 12)
    assert torch.allclose(read.covariance, written.covariance, rtol=1e-14)
    assert (read.features is None) == (written.features is None) == (count > 12)
    other = FrechetStatistics(source)
    other.update(gaussian(20, 12, 8))
    assert frechet_distance(read, other) == pytest.approx(frechet_distance(written, other), rel=1e-12)
    read.update(gaussian(5, 12, 9))
    written.update(gaussian(5, 12, 9))
    assert torch.allclose(read.covariance, written.covariance, rtol=1e-12)
    assert [path.name for path in (tmp_path / "new folder").iterdir()] == ["reference.npz"]


def test_other_files_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", mean=np.zeros(3))
    (tmp_path / "text.npz").write_text("nothing")
    (tmp_path / "empty.npz").touch()
    for name in ("other.npz", "text.npz", "empty.npz"):
        with pytest.raises(ValueError, match="statistics written by merope"):
            FrechetStatistics.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        FrechetStatistics.load(tmp_path / "missing.npz")


@pytest.mark.parametrize("change", [{"weights_sha256": "1" * 64}, {"resize": "bicubic"}, {"frames": 16}])
def test_features_of_different_sources_are_not_compared(change: dict[str, object]) -> None:
    a, b = FrechetStatistics(SOURCE), FrechetStatistics(replace(SOURCE, **change))
    for part in (a, b):
        part.update(gaussian(10, 4, 0))
    with pytest.raises(ValueError, match=r"b\.source must be"):
        frechet_distance(a, b)


def test_reference_clips_may_come_without_a_prefix() -> None:
    a, b = FrechetStatistics(SOURCE), FrechetStatistics(replace(SOURCE, prefix_frames=9))
    for part in (a, b):
        part.update(gaussian(10, 4, 0))
    assert frechet_distance(a, b) == pytest.approx(0.0, abs=1e-9)


def test_bad_features_are_refused() -> None:
    result = statistics(gaussian(5, 4, 0))
    for features, message in (
        (torch.zeros(3, 5), r"features must be \[n, 4\]"),
        (torch.zeros(0, 4), "n ≥ 1"),
        (torch.zeros(4), "n ≥ 1"),
        (torch.full((1, 4), math.nan), "features must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            result.update(features)
    assert result.count == 5
    with pytest.raises(ValueError, match="features must be at least 2"):
        frechet_distance(statistics(gaussian(1, 4, 0)), result)
    with pytest.raises(ValueError, match="features must be at least 2"):
        frechet_distance(FrechetStatistics(SOURCE), FrechetStatistics(SOURCE))
    with pytest.raises(ValueError, match="dimension 4"):
        frechet_distance(result, statistics(gaussian(5, 3, 0)))

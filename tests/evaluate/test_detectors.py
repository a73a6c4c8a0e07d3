"""FID and FVD through small scripted stand-ins that are called and answer like the public detector files."""

import hashlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from merope.evaluate import detectors
from merope.evaluate.detectors import (
    I3DDetector,
    InceptionDetector,
    feature_statistics,
    fid,
    fvd,
)
from merope.evaluate.frechet import FrechetStatistics, frechet_distance


class StandInInception(nn.Module):
    """Mean, spread and corner of an image; refuses what the public file does not take."""

    def forward(self, img: Tensor, return_features: bool = False) -> Tensor:
        assert img.dtype == torch.uint8
        assert img.shape[1] == 3
        assert return_features
        x = img.to(torch.float32)
        return torch.cat((x.mean(dim=(2, 3)), x.flatten(1).std(1, keepdim=True), x[:, :, 0, 0]), dim=1)


class StandInI3D(nn.Module):
    """Colours, motion and length of a video in 0 … 255."""

    def forward(self, x: Tensor, rescale: bool = False, resize: bool = False, return_features: bool = False) -> Tensor:
        assert rescale
        assert resize
        assert return_features
        assert x.dim() == 5
        assert x.shape[1] == 3
        motion = (x[:, :, 1:] - x[:, :, :-1]).abs().mean(dim=(2, 3, 4))
        frames = torch.full((x.shape[0], 1), float(x.shape[2]))
        return torch.cat((x.mean(dim=(2, 3, 4)) / 255, motion, frames), dim=1)


def saved(module: nn.Module, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(module).save(str(path))
    return path


@pytest.fixture(scope="module")
def inception_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(StandInInception(), tmp_path_factory.mktemp("inception") / "inception.pt")


@pytest.fixture(scope="module")
def i3d_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(StandInI3D(), tmp_path_factory.mktemp("i3d") / "i3d.pt")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def videos(count: int, seed: int, frames: int = 13) -> list[Tensor]:  # each uint8 [frames, 6, 8, 3]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (frames, 6, 8, 3), generator=generator, dtype=torch.uint8) for _ in range(count)]


def test_fid_scores_every_frame_after_the_prefix(inception_path: Path) -> None:
    detector = InceptionDetector(inception_path, batch_frames=3)
    generated, real = videos(8, 0), videos(6, 1)
    result = fid(iter(generated), real, detector)
    assert (result.count, result.reference_count) == (8 * 4, 6 * 4)
    assert (result.source.detector, result.source.frames, result.source.prefix_frames) == ("inception", 1, 9)
    assert result.source.weights_sha256 == hashlib.sha256(inception_path.read_bytes()).hexdigest()
    assert "299" in result.source.resize

    expected = []
    for part in (generated, real):
        images = torch.cat([video[9:] for video in part]).permute(0, 3, 1, 2)
        statistics = FrechetStatistics(result.source)
        statistics.update(StandInInception()(images, return_features=True))
        expected.append(statistics)
    assert result.distance == pytest.approx(frechet_distance(*expected), rel=1e-6)


def test_fvd_scores_clips_after_the_prefix(i3d_path: Path) -> None:
    detector = I3DDetector(i3d_path)
    generated, real = videos(20, 0), videos(15, 1)
    result = fvd(generated, real, detector)
    assert (result.count, result.reference_count, result.source.frames) == (20, 15, 4)
    features = detector(generated[0][9:])
    assert features.shape == (1, 7)
    assert features[0, 6] == 4
    assert features[0, :3].tolist() == pytest.approx(
        (generated[0][9:].double().mean((0, 1, 2)) / 255).tolist(), rel=1e-5
    )


def test_given_frames_do_not_matter(inception_path: Path, i3d_path: Path) -> None:
    real, generated = videos(10, 1), videos(10, 2)
    changed = [torch.cat((torch.zeros_like(video[:9]), video[9:])) for video in generated]
    for score, detector in ((fid, InceptionDetector(inception_path)), (fvd, I3DDetector(i3d_path))):
        assert score(changed, real, detector) == score(generated, real, detector)
        assert score(changed, real, detector, prefix_frames=8) != score(generated, real, detector, prefix_frames=8)


def test_a_set_against_itself_is_zero_and_a_shift_is_seen(inception_path: Path) -> None:
    detector = InceptionDetector(inception_path)
    real = videos(10, 1)
    assert fid(real, real, detector).distance == pytest.approx(0.0, abs=1e-3)
    darker = [video // 2 for video in real]
    assert fid(darker, real, detector).distance > 3 * 60**2


def test_saved_statistics_stand_for_their_videos(inception_path: Path, tmp_path: Path) -> None:
    detector = InceptionDetector(inception_path)
    generated, real = videos(5, 0), videos(6, 1)
    feature_statistics(real, detector).save(tmp_path / "real.npz")
    loaded = FrechetStatistics.load(tmp_path / "real.npz")
    assert fid(generated, loaded, detector).distance == pytest.approx(fid(generated, real, detector).distance, rel=1e-9)


def test_statistics_of_another_file_are_refused(inception_path: Path, tmp_path: Path) -> None:
    one = InceptionDetector(inception_path)
    other = InceptionDetector(saved(StandInInception().to(torch.float64), tmp_path / "another_name.pt"))
    assert one.weights_sha256 != other.weights_sha256
    with pytest.raises(ValueError, match="same detector file"):
        fid(feature_statistics(videos(3, 0), other), videos(3, 1), one)


@pytest.mark.parametrize("make", [InceptionDetector, I3DDetector])
def test_a_missing_file_says_where_to_get_it(make: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"never downloaded; get (inception-2015-12-05|i3d_torchscript)\.pt"):
        make(tmp_path / "missing.pt")


def test_a_file_that_is_no_torchscript_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_text("not a network")
    torch.save({"weight": torch.zeros(2)}, tmp_path / "state.pt")
    for name in ("weights.pt", "state.pt"):
        with pytest.raises(ValueError, match="path must be a TorchScript file"):
            I3DDetector(tmp_path / name)


def test_the_deprecation_is_mentioned_once(inception_path: Path, i3d_path: Path) -> None:
    detectors._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        InceptionDetector(inception_path)
        I3DDetector(i3d_path)
        InceptionDetector(inception_path)
    assert [warning.category for warning in caught] == [FutureWarning]
    assert "TorchScript is deprecated" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_detectors_serve_one_score_each(inception_path: Path, i3d_path: Path) -> None:
    with pytest.raises(ValueError, match="use InceptionDetector"):
        fid(videos(2, 0), videos(2, 1), I3DDetector(i3d_path))
    with pytest.raises(ValueError, match="use I3DDetector"):
        fvd(videos(2, 0), videos(2, 1), InceptionDetector(inception_path))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "videos must be at least one video"),
        ([*videos(1, 0), *videos(1, 0, frames=12)], r"videos\[1\] must be 13 frames"),
        (videos(1, 0, frames=9), "more than 9"),
        ([video.float() / 255 for video in videos(1, 0)], "uint8"),
        ([video.permute(0, 3, 1, 2) for video in videos(1, 0)], r"\[T, H, W, 3\]"),
    ],
)
def test_bad_videos_are_refused(i3d_path: Path, bad: list[Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        feature_statistics(bad, I3DDetector(i3d_path))


def test_a_negative_prefix_is_refused(i3d_path: Path) -> None:
    with pytest.raises(ValueError, match="prefix_frames must be 0 or more"):
        feature_statistics(videos(1, 0), I3DDetector(str(i3d_path)), prefix_frames=-4)

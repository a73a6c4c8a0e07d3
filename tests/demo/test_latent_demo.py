"""The demo with a small latent model, a VAE and a transformer that this file writes: the same code, other clips."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from latent_folder import write_latent_model
from PIL import Image
from scenes import straight_drive

import merope.demo.drive
from merope import formats
from merope.cli import main
from merope.demo.drive import SHIPPED_MODEL, DemoConfig, Drive, loaded, run
from merope.formats.trajectory import Trajectory
from merope.formats.video import read_image
from merope.geometry.lenses import UnifiedCamera
from merope.world.clips import WorldClips
from merope.world.clips_file import DEFAULT_STEPS, read_clips, write_clips
from merope.world.commanded import MANOEUVRES

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latent")
    write_latent_model(folder)
    return folder


@pytest.fixture(scope="module")
def driven(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Drive]]:
    out = tmp_path_factory.mktemp("driven")
    return out, run(DemoConfig(out=out, model=model, device="cpu"))


def test_the_models_folder_decides_frames_size_rate_and_steps(driven: tuple[Path, list[Drive]]) -> None:
    import av

    out, drives = driven
    assert [drive.name for drive in drives] == list(MANOEUVRES)
    for drive in drives:
        assert drive.video.shape == drive.clip.true.shape == (9, 32, 64, 3)
        assert drive.floor.metrics.frames == 3  # at 4 Hz
        with av.open(str(out / f"{drive.name}.mp4")) as container:
            stream = container.streams.video[0]
            assert (stream.height, stream.width) == (28 + 9 * 32, 2 * 9 * 64 + 9 * 32 + 2 * 8)
            assert (float(stream.average_rate), sum(1 for _ in container.decode(video=0))) == (16.0, 9)
        cameras = formats.read(out / "clips" / f"{drive.name}.cameras.json")
        assert cameras.timestamps_s is not None
        assert float(cameras.timestamps_s[-1]) == 0.5
    assert json.loads((out / "results.json").read_text())["settings"]["steps"] == 2


def test_its_frames_are_what_the_pipeline_makes(model: Path, driven: tuple[Path, list[Drive]]) -> None:
    """The pipeline's own call, without the demo."""
    pipeline, (original, left, _) = loaded(model, torch.device("cpu")), driven[1]
    frames = pipeline(
        cameras=left.clip.cameras,
        prefix=left.clip.true[:5],
        height=32,
        width=64,
        num_frames=9,
        num_inference_steps=2,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(0),
    ).frames[0]
    assert (torch.from_numpy(frames) * 255.0 - left.video).abs().max() < 1.0
    assert not torch.equal(original.video, left.video)


def test_the_animation_shows_true_above_generated_and_plays_for_ever(driven: tuple[Path, list[Drive]]) -> None:
    drives, file = driven[1], driven[0] / "demo.webp"
    with Image.open(file) as animation:
        assert (animation.n_frames, animation.info["loop"]) == (9, 0)  # type: ignore[attr-defined]
        assert animation.size == (3 * 4 * 64 + 2 * 8, 2 * (28 + 4 * 32))
    first = read_image(file, 2 * (28 + 128), 3 * 256 + 16).float()
    for column, drive in enumerate(drives):
        shown = []
        for row in range(2):
            top, left = 28 + row * (28 + 128), column * (256 + 8)
            panel = first[top : top + 128, left : left + 256].unflatten(0, (32, 4)).unflatten(2, (64, 4))
            shown.append(panel.mean(dim=(1, 3)))
        wanted = [video[0].float() for video in (drive.clip.true, drive.video)]
        errors = torch.stack([torch.stack([(a - b).abs().mean() for b in wanted]) for a in shown])
        assert errors.diagonal().max() < 12  # of 255: Lanczos and WebP, on the noise that random weights make
        assert errors.argmin(dim=1).tolist() == [0, 1]


def test_another_lens_and_path_are_driven(
    model: Path, driven: tuple[Path, list[Drive]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = straight_drive(20, step_m=0.5)
    formats.write(Trajectory(path, True, "test"), tmp_path / "long.json")
    arguments = [
        "--model",
        str(model),
        "--steps",
        "1",
        "--lens",
        "fisheye",
        "--trajectory",
        str(tmp_path / "long.json"),
    ]
    assert main(["demo", *arguments, "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().err
    assert "long.json lasts 1.19 s; the clip is its first 0.5 s; cut off its beginning" in told
    assert "a 140° fisheye (xi = 1); the model has seen a 70° pinhole only" in told
    again = formats.read(tmp_path / "out" / "clips" / "trajectory.cameras.json")
    assert isinstance(again.lens, UnifiedCamera)
    assert (again.lens.width, again.count) == (64, 9)


def edited(**changes: Any) -> Callable[[Path], None]:
    """An edit of a JSON file: None takes a key away."""

    def edit(file: Path) -> None:
        content = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return edit


def emptied(text: str) -> Callable[[Path], None]:
    return lambda file: file.write_text(text) and None


def replaced(source: str) -> Callable[[Path], None]:
    """The weights of a part of the shipped model."""
    return lambda file: shutil.copy(SHIPPED_MODEL / source / WEIGHTS, file) and None


BAD_FOLDERS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "no clips.json": ("clips.json", Path.unlink, "a folder with clips.json, as every model with a VAE needs"),
    "no JSON": ("clips.json", emptied("{"), "clips.json must be JSON"),
    "a list": ("clips.json", emptied("[]"), "an object with frames, height"),
    "a key too few": ("clips.json", edited(frames=None), "an object with frames, height"),
    "a key too many": ("clips.json", edited(fps=16), "an object with frames, height"),
    "half a frame": ("clips.json", edited(frames=8.5), "a whole number of at least 1, got 8.5"),
    "words": ("clips.json", edited(frame_rate_hz="16"), "a number, got '16'"),
    "standing still": ("clips.json", edited(frame_rate_hz=0), "positive and at most 1000, got 0"),
    "no range": ("clips.json", edited(fov_deg=70), "its lowest and highest value, got 70"),
    "falling range": ("clips.json", edited(fov_deg=[80, 70]), "fov_deg must be a rising range"),
    "no steps": ("clips.json", edited(steps=0), "steps in"),
    "frames": ("clips.json", edited(frames=10), "num_frames must be 4k + 1 frames, got 10; use 9 or 13"),
    "size": ("clips.json", edited(height=40), "height must be a multiple of 16, the pixels of a token, got 40"),
    "prefix": ("clips.json", edited(prefix_frames=4), "prefix frames must be 4k + 1 frames, got 4; use 1 or 5"),
    "long prefix": ("clips.json", edited(prefix_frames=9), "prefix_frames must be in [1, frames = 9), got 9"),
    "stride in space": ("vae/config.json", edited(scale_factor_spatial=16), "8, the stride of its layers, got 16"),
    "stride in time": (
        "vae/config.json",
        edited(temperal_downsample=[False, True]),
        "2, the stride of its layers, got 4",
    ),
    "other latents": ("vae/config.json", edited(z_dim=6), "in_channels must be 6, the VAE's latents, got 4"),
    "VAE's weights": (f"vae/{WEIGHTS}", replaced("branch"), "got no encoder.conv_in.weight"),
    "VAE's sizes": ("vae/config.json", edited(base_dim=8), "encoder.conv_in.weight of [4, 12, 3, 3, 3]"),
    "transformer's sizes": ("transformer/config.json", edited(freq_dim=48), "of its config.json, condition_embedder"),
    "branch's weights": (f"branch/{WEIGHTS}", replaced("branch"), "weights in"),
    "damaged": (f"vae/{WEIGHTS}", emptied("nothing"), "must be a safetensors file"),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_a_folder_that_does_not_fit_is_refused_before_weights_are_read(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def heavy(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(merope.demo.drive, "loaded", heavy)
    shutil.copytree(model, tmp_path / "model")
    file, spoil, message = BAD_FOLDERS[name]
    spoil(tmp_path / "model" / file)
    assert main(["demo", "--model", str(tmp_path / "model"), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert ", got " in told
    assert not (tmp_path / "out").exists()


def test_clips_survive_their_file_and_a_folder_without_one_has_the_benchmarks(tmp_path: Path) -> None:
    clips = WorldClips(21, 48, 64, 8.0, 5, (60.0, 90.0), (0.0, 0.5))
    write_clips(tmp_path, clips, steps=7)
    assert read_clips(tmp_path) == (clips, 7)
    assert read_clips(tmp_path / "nowhere") == (WorldClips(), DEFAULT_STEPS)
    shipped, strides = read_clips(SHIPPED_MODEL)[0], loaded(SHIPPED_MODEL, torch.device("cpu")).strides
    rows, columns = strides.latent_size(shipped.height, shipped.width)
    assert (strides.latent_frames(shipped.frames), strides.tokens_per_frame(rows, columns)) == (15, 9 * 16)

"""`merope data cache`: complete, continued, refused where it must be, and the same training as from frames."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from merope.cli import main
from merope.datasets.cache import CachedSource, without_padding, write_cache
from merope.datasets.checked_tensors import is_whole, read_checked
from merope.datasets.clip import Clip
from merope.formats import writing
from merope.generate.camera_video import CameraVideoPipeline
from merope.train.caching import cache_clips
from merope.train.clip_streams import clip_stream
from merope.train.config import TrainConfig
from merope.train.loop import train
from merope.train.losses import clip_losses
from merope.train.model import Model, build_model
from merope.train.streams import Share
from merope.train.toml_config import read_config
from tests.train.test_clip_streams import LENS, write_videos
from tests.train.tiny_files import file_config

CPU = torch.device("cpu")
ALONE = Share(0, 1, 1)
ONE_STEP_OF_BF16 = {"rtol": 2**-7, "atol": 1e-5}  # where rounding may fall on either side


@pytest.fixture(scope="module")
def cached(tiny_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The training clips in `train`, the validation clips in `val`."""
    folder = tmp_path_factory.mktemp("cached")
    assert main(["data", "cache", str(tiny_files / "tiny.toml"), "--out", str(folder / "train")]) == 0
    assert main(["data", "cache", str(tiny_files / "tiny.toml"), "--out", str(folder / "val"), "--validation"]) == 0
    return folder


def cached_config(root: Path, cached: Path, out: Path, *changes: str) -> TrainConfig:
    """The config of `file_config`, with the cache for its data."""
    text = (root / "tiny.toml").read_text()
    start, end = text.index("[data]"), text.index("[objective]")
    data = f'[data]\nkind = "cache"\nroot = "{cached / "train"}"\nvalidation_root = "{cached / "val"}"\nworkers = 0\n\n'
    file = out / "cached.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text[:start] + data + text[end:])
    return read_config(TrainConfig, file, [f"run.out={out}", *changes])


def fresh_model(config: TrainConfig) -> Model:
    return build_model(config, CPU, sharded=False)


def test_a_cache_holds_what_the_clips_hold(tiny_files: Path, cached: Path) -> None:
    config = file_config(tiny_files, cached)
    source, stored, model = config.data.training_clips(), CachedSource.open(cached / "train"), fresh_model(config)
    assert len(stored) == len(source) == 10
    assert [stored.name(index) for index in range(10)] == [source.name(index) for index in range(10)]
    for index in (0, 9):
        clip, held = source.clip(index), stored.clip(index)
        latents = model.pipeline.encode_frames(clip.frames[None])[0]
        torch.testing.assert_close(held.latents, latents.to(torch.bfloat16), **ONE_STEP_OF_BF16)
        assert torch.equal(held.trajectory.world_from_camera, clip.world_from_camera)
        assert str(held.trajectory.lens) == str(clip.lens)
        assert held.text.shape == (512, 8)
        assert (held.text[:8] != 0).any()
    assert len(list((cached / "train" / "text").iterdir())) == 3  # two captions and the empty one


def test_the_prefix_of_a_cached_clip_is_the_prefix_encoded_alone(tiny_files: Path, cached: Path) -> None:
    config = file_config(tiny_files, cached)
    clip, model = config.data.training_clips().clip(0), fresh_model(config)
    alone = model.pipeline.encode_frames(clip.frames[None, :1])[0]
    held = CachedSource.open(cached / "train").clip(0).latents[:, :1]
    torch.testing.assert_close(held, alone.to(torch.bfloat16), **ONE_STEP_OF_BF16)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 3e-3), ("fp32", 1e-3)])
def test_training_from_a_cache_is_training_from_frames(
    tiny_files: Path, cached: Path, tmp_path: Path, precision: str, tolerance: float
) -> None:
    changes = (f"model.precision={precision}", "objective.text_dropout=0.0")
    from_frames = file_config(tiny_files, tmp_path, *changes)
    from_cache = cached_config(tiny_files, cached, tmp_path, *changes)
    model = fresh_model(from_frames)
    streams = [clip_stream(config, model, ALONE) for config in (from_frames, from_cache)]
    for step in range(4):
        for frames, stored in zip(*(stream.step(step) for stream in streams), strict=True):
            assert stored.names == frames.names
            assert stored.text.shape == frames.text.shape
            of_cache, of_frames = (examples.clean[:, :, :1].bfloat16() for examples in (stored, frames))
            torch.testing.assert_close(of_cache, of_frames, **ONE_STEP_OF_BF16)
            with torch.no_grad():
                a, b = (clip_losses(from_frames, model, examples, step) for examples in (frames, stored))
            torch.testing.assert_close(b, a, rtol=tolerance, atol=0)


def test_the_length_of_the_text_matters_to_the_model(tiny_files: Path, cached: Path) -> None:
    """Or the test above would not notice text that lost its padding."""
    config = file_config(tiny_files, cached, "objective.text_dropout=0.0")
    model = fresh_model(config)
    (examples, *_) = clip_stream(config, model, ALONE).step(0)
    with torch.no_grad():
        whole = clip_losses(config, model, examples, 0)
        object.__setattr__(examples, "text", without_padding(examples.text[0])[None])
        object.__setattr__(examples, "no_text", examples.no_text[: examples.text.shape[1]])
        assert not torch.allclose(clip_losses(config, model, examples, 0), whole, rtol=1e-2)


def test_a_run_from_the_cache_validates_and_samples(tiny_files: Path, cached: Path, tmp_path: Path) -> None:
    train(cached_config(tiny_files, cached, tmp_path, "run.sample_every=2", "run.sample_steps=1"))
    assert "validation_loss" in (tmp_path / "log.jsonl").read_text()
    assert (tmp_path / "samples" / "step-00000002.mp4").is_file()


def test_an_interrupted_cache_goes_on_where_it_stopped(
    tiny_files: Path, cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, calls, encode = file_config(tiny_files, tmp_path), [], CameraVideoPipeline.encode_frames

    def counted(self: CameraVideoPipeline, frames: Tensor) -> Tensor:
        calls.append(len(frames))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return encode(self, frames)

    monkeypatch.setattr(CameraVideoPipeline, "encode_frames", counted)
    with pytest.raises(KeyboardInterrupt):
        cache_clips(config, tmp_path / "cache", validation=False)
    with pytest.raises(ValueError, match=r"clips\.jsonl; finish caching"):
        CachedSource.open(tmp_path / "cache")
    assert cache_clips(config, tmp_path / "cache", validation=False) == {}
    assert len(calls) == 4 + 7
    for file in (path for path in (cached / "train").rglob("*") if path.is_file()):
        same = tmp_path / "cache" / file.relative_to(cached / "train")
        assert same.read_bytes() == file.read_bytes(), file


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["model.pretrained={other}"], ["other-wan"]),
        (["data.frames=9"], ['"frames": 9', '"frames": 5']),
        (["data.window_step=2"], ["window_step"]),
        (["--validation"], ["validation", "training"]),
    ],
    ids=["model", "frames", "windows", "validation"],
)
def test_a_cache_of_something_else_is_not_added_to(
    tiny_files: Path,
    cached: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: list[str],
    words: list[str],
) -> None:
    other = tmp_path / "other-wan"
    other.symlink_to(tiny_files / "wan")
    flags = [change for change in changes if change.startswith("--")]
    sets = [part for c in changes if not c.startswith("--") for part in ("--set", c.format(other=other))]
    before = {file: file.read_bytes() for file in cached.rglob("*") if file.is_file()}
    assert main(["data", "cache", str(tiny_files / "tiny.toml"), "--out", str(cached / "train"), *flags, *sets]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert [word for word in words if word.replace('"', "'") not in message] == []
    assert {file: file.read_bytes() for file in cached.rglob("*") if file.is_file()} == before


def test_other_workers_and_clusters_may_add_to_a_cache(tiny_files: Path, cached: Path) -> None:
    config = file_config(tiny_files, cached, "data.workers=3", "data.prototypes_only=true")
    assert cache_clips(config, cached / "train", validation=False) == {}


def test_two_clips_of_one_name_are_refused(tmp_path: Path) -> None:
    """The second would take the file of the first, and be trained on twice."""

    class Twins:
        def __len__(self) -> int:
            return 2

        def name(self, index: int) -> str:
            return "street"

        def clip(self, index: int) -> Clip:
            raise AssertionError("nothing is read")

    with pytest.raises(ValueError, match=r"names of clips.*'street' at position 1"):
        write_cache(tmp_path / "cache", Twins(), torch.zeros_like, lambda caption: torch.ones(1, 3), {})
    assert not (tmp_path / "cache").exists()


def test_clips_that_cannot_be_read_are_named_and_the_others_train(
    tiny_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = shutil.copytree(tiny_files, tmp_path / "broken")
    config = root / "tiny.toml"
    config.write_text(config.read_text().replace(str(tiny_files), str(root)))
    images = sorted((root / "nuscenes").glob("s*/CAM_FRONT/scene0000*"), key=lambda file: file.name)
    images[8].write_bytes(b"")
    assert main(["data", "cache", str(config), "--out", str(tmp_path / "train")]) == 1
    said = capsys.readouterr()
    assert "skipped clip scene-0000/CAM_FRONT/4: image" in said.err
    assert "1 clips could not be read" in said.out
    shutil.copy(images[7], images[8])  # mended: the same command completes the cache
    assert main(["data", "cache", str(config), "--out", str(tmp_path / "train")]) == 0
    assert len(CachedSource.open(tmp_path / "train")) == 10


def test_a_manifest_of_all_clips_serves_a_cache_of_some(tiny_files: Path, cached: Path, tmp_path: Path) -> None:
    names = [f"scene-{scene:04d}/CAM_FRONT/{9 * scene + start}" for scene in range(3) for start in range(5)]
    rows = [{"id": name, "cluster": 0, "prototype": name, "is_prototype": True} for name in names]
    (tmp_path / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = cached_config(tiny_files, cached, tmp_path, f"data.clusters={tmp_path / 'manifest.jsonl'}")
    assert len(clip_stream(config, fresh_model(config), ALONE).loader.sampler.members) == 10


def test_rows_that_say_something_else_are_cached_again(tiny_files: Path, tmp_path: Path) -> None:
    """A new caption or another part of a video under an old id must not be trained on as it was."""
    write_videos(tmp_path)
    text = (tiny_files / "tiny.toml").read_text()
    start, end = text.index("[data]"), text.index("[objective]")
    size = f'root = "{tmp_path}"\nframes = 5\nheight = {LENS.height}\nwidth = {LENS.width}\nworkers = 0\n'
    data = f'[data]\nkind = "videos"\nmanifest = "{tmp_path}/rows.jsonl"\n{size}'
    (tmp_path / "videos.toml").write_text(text[:start] + data + text[end:])
    command = ["data", "cache", str(tmp_path / "videos.toml"), "--out", str(tmp_path / "cache")]
    assert main(command) == 0
    before = [CachedSource.open(tmp_path / "cache").clip(index) for index in (0, 1)]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    rows[0] |= {"caption": "sun", "start": 4}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(command) == 0
    after = CachedSource.open(tmp_path / "cache")
    assert [row["caption"] for row in after.rows] == ["sun", "rain"]
    same = [torch.equal(old.latents, after.clip(index).latents) for index, old in enumerate(before)]
    assert same == [False, True]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left")])
def test_a_disk_that_is_full_is_one_line_and_not_a_broken_clip(
    tiny_files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    def full(tensors: dict[str, Tensor], file: Path, about: dict[str, str] | None) -> None:
        raise error

    monkeypatch.setattr(writing, "save_file", full)
    assert main(["data", "cache", str(tiny_files / "tiny.toml"), "--out", str(tmp_path / "cache")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"merope: {tmp_path / 'cache' / 'text'}")
    assert "No space left" in said
    assert "free some space" in said
    assert [file.name for file in (tmp_path / "cache").rglob("*") if file.is_file()] == ["cache.json"]


def test_damaged_and_deleted_files_are_encoded_again(
    tiny_files: Path, cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(cached / "train", tmp_path / "cache")
    files = [row["file"] for row in CachedSource.open(folder).rows]
    (folder / "latents" / f"{files[0]}.safetensors").unlink()
    for index, suffix in ((1, ".safetensors"), (2, ".json"), (3, ".row.json")):
        file = folder / "latents" / f"{files[index]}{suffix}"
        file.write_bytes(file.read_bytes()[:-7])
    (folder / "latents" / f"{files[4]}.json").unlink()
    (folder / "latents" / f"{files[5]}.row.json").write_text("[]")
    calls, encode = [], CameraVideoPipeline.encode_frames
    monkeypatch.setattr(CameraVideoPipeline, "encode_frames", lambda *given: calls.append(1) or encode(*given))
    config = file_config(tiny_files, tmp_path)
    assert cache_clips(config, folder, validation=False) == {}
    assert len(calls) == 6
    for text in (folder / "text").iterdir():  # each caption belongs to five clips or to none
        text.write_bytes(text.read_bytes()[:-3])
    assert cache_clips(config, folder, validation=False) == {}
    for file in (path for path in (cached / "train").rglob("*") if path.is_file()):
        assert (folder / file.relative_to(cached / "train")).read_bytes() == file.read_bytes(), file


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_a_flipped_bit_is_not_trained_on_and_encoded_again(
    tiny_files: Path, cached: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(cached, tmp_path / "cached") / "train"
    rows = CachedSource.open(folder).rows
    flipped = [folder / "latents" / f"{row['file']}.safetensors" for row in rows[:9]]
    for file in flipped:
        flip(file, -1)
    with pytest.raises(ValueError, match=r"\.safetensors must be what was written, got other numbers"):
        CachedSource.open(folder).clip(0)
    with caplog.at_level("WARNING"):
        train(cached_config(tiny_files, tmp_path / "cached", tmp_path / "out", "run.steps=1"))
    assert "its checksum differs" in caplog.text
    text = next((folder / "text").iterdir())
    flip(text, -1)
    assert cache_clips(file_config(tiny_files, tmp_path), folder, validation=False) == {}
    for file in (*flipped, text):
        assert file.read_bytes() == (cached / "train" / file.relative_to(folder)).read_bytes(), file


def test_no_flipped_bit_of_a_latent_changes_what_is_read(cached: Path, tmp_path: Path) -> None:
    """Also in its head: the file is refused, or read as it was written."""
    whole = next((cached / "train" / "latents").glob("*.safetensors"))
    written, file = read_checked(whole)["latents"], tmp_path / whole.name
    for place in range(whole.stat().st_size):
        shutil.copy(whole, file)
        flip(file, place)
        try:
            assert torch.equal(read_checked(file)["latents"], written), place
        except (ValueError, OSError, SafetensorError):
            assert not is_whole(file), place


def test_caches_without_checksums_are_read_as_they_are(cached: Path, tmp_path: Path) -> None:
    """Those of older versions."""
    folder = shutil.copytree(cached / "train", tmp_path / "old")
    for file in folder.rglob("*.safetensors"):
        save_file(load_file(file), file)
    before, after = CachedSource.open(folder).clip(0), CachedSource.open(cached / "train").clip(0)
    assert torch.equal(before.latents, after.latents)
    assert torch.equal(before.text, after.text)


def test_a_second_process_does_not_disturb_the_first(
    tiny_files: Path, cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second takes the row of a clip away while it writes the clip anew."""
    config, folder, encode = file_config(tiny_files, tmp_path), tmp_path / "cache", CameraVideoPipeline.encode_frames

    def disturbed(self: CameraVideoPipeline, frames: Tensor) -> Tensor:
        for row in folder.glob("latents/*.row.json"):
            row.unlink()
        return encode(self, frames)

    monkeypatch.setattr(CameraVideoPipeline, "encode_frames", disturbed)
    assert cache_clips(config, folder, validation=False) == {}
    assert (folder / "clips.jsonl").read_bytes() == (cached / "train" / "clips.jsonl").read_bytes()


def test_a_list_of_cached_clips_that_is_damaged_is_named(cached: Path, tmp_path: Path) -> None:
    text = (cached / "train" / "clips.jsonl").read_text()
    (tmp_path / "clips.jsonl").write_text(text[: len(text) // 2])
    with pytest.raises(ValueError, match=r"clips\.jsonl, line \d+ must be a JSON object"):
        CachedSource.open(tmp_path)


def test_a_cache_of_another_kind_of_model_is_refused_in_training(
    tiny_files: Path, cached: Path, tmp_path: Path
) -> None:
    config = cached_config(tiny_files, cached, tmp_path)
    model = fresh_model(config)
    model.transformer.register_to_config(in_channels=16, out_channels=16)
    with pytest.raises(ValueError, match=r"latents of .*train must be \(16, 2, 2, 4\), got \(4, 2, 2, 4\)"):
        clip_stream(config, model, ALONE)
    with pytest.raises(ValueError, match="prefix_frames"):
        clip_stream(cached_config(tiny_files, cached, tmp_path, "objective.prefix_frames=5"), model, ALONE)


def test_validation_clips_of_another_kind_are_refused_before_the_first_step(
    tiny_files: Path, cached: Path, tmp_path: Path
) -> None:
    """They would be validated on at their own size, or end the run at its first validation."""
    config = str(tiny_files / "tiny.toml")
    other = ["--set", "data.height=64", "--out", str(tmp_path / "val"), "--validation"]
    assert main(["data", "cache", config, *other]) == 0
    mixed = cached_config(tiny_files, cached, tmp_path, f"data.validation_root={tmp_path / 'val'}")
    with pytest.raises(ValueError, match=r"latents of .*val must be \(4, 2, 2, 4\), got \(4, 2, 4, 4\)"):
        clip_stream(mixed, fresh_model(mixed), ALONE)


def test_a_cache_that_lost_the_files_of_its_first_clip_is_trained_on(
    tiny_files: Path, cached: Path, tmp_path: Path
) -> None:
    shutil.copytree(cached, tmp_path / "cached")
    name = CachedSource.open(cached / "train").rows[0]["file"]
    (tmp_path / "cached" / "train" / "latents" / f"{name}.safetensors").unlink()
    train(cached_config(tiny_files, tmp_path / "cached", tmp_path / "out", "run.steps=1"))


def test_worlds_are_not_cached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = Path(__file__).parents[2] / "configs" / "tiny.toml"
    assert main(["data", "cache", str(tiny), "--out", str(tmp_path / "cache")]) == 2
    assert "data.kind" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()

"""Clips and caches in object stores: by fsspec's memory and its plain files, with the bytes of a local folder."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from scenes import PINHOLE, curved_drive
from torch import Tensor

from merope import formats
from merope.datasets.cache import CachedSource, collate_cached, write_cache
from merope.datasets.videos import VideoData, VideoSource
from merope.formats.parts import Part
from merope.formats.stores import exists, is_remote, names_in, remove, url_of
from merope.formats.trajectory import Trajectory
from merope.formats.video import read_image, write_image, write_video

HEIGHT, WIDTH, FRAMES, CLIPS = 16, 24, 5, 4


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for `kind = "videos"`."""
    root, rows = tmp_path_factory.mktemp("local"), []
    for number in range(CLIPS):
        frames = torch.full((FRAMES, HEIGHT, WIDTH, 3), 40 * number, dtype=torch.uint8)
        write_video(frames, root / "videos" / f"{number}.mp4", 12.0)
        times_s = torch.arange(FRAMES, dtype=torch.float64) / 12
        path = Trajectory(curved_drive(FRAMES, step_m=0.5 + number), True, "a test", times_s, PINHOLE)
        formats.write(path, root / "poses" / f"{number}.json")
        rows.append({"id": f"clip-{number}", "video": f"videos/{number}.mp4", "poses": f"poses/{number}.json"})
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.fixture
def memory(local: Path) -> Iterator[Path]:
    """The same folder in fsspec's memory."""
    store = fsspec.filesystem("memory")
    store.put(f"{local}/", "/bucket/clips/", recursive=True)
    yield Path("memory://bucket/clips")
    store.rm("/", recursive=True)


def source(root: Path) -> VideoSource:
    data = VideoData("videos", root, root / "train.jsonl", frames=FRAMES, height=HEIGHT, width=WIDTH)
    data.check_files()
    return data.training_clips()


def encode_frames(frames: Tensor) -> Tensor:  # uint8 [1, T, H, W, 3] -> [1, 3, T, 2, 3]
    return frames[:, :, ::8, ::8].permute(0, 4, 1, 2, 3).float() / 7


def encode_text(caption: str) -> Tensor:
    return torch.full((4, 3), float(len(caption) + 1))


def cached(folder: Path, clips: VideoSource, part: Part | None = None) -> dict[str, str]:
    return write_cache(folder, clips, encode_frames, encode_text, {"model": "a test"}, part=part)


def content(folder: Path) -> dict[str, bytes]:
    store, place = fsspec.core.url_to_fs(url_of(folder) if is_remote(folder) else str(folder))
    return {file[len(place) :].lstrip("/"): store.cat_file(file) for file in store.find(place)}


def test_clips_are_those_of_the_disk(local: Path, memory: Path) -> None:
    ours, theirs = source(local), source(memory)
    assert len(theirs) == CLIPS
    for index in (0, 3):
        a, b = ours.clip(index), theirs.clip(index)
        assert a.frames is not None
        assert b.frames is not None
        assert torch.equal(a.frames, b.frames)
        assert torch.equal(a.world_from_camera, b.world_from_camera)
    assert theirs.trajectory(1).name == "clip-1"


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_cache_in_a_store_has_the_bytes_of_a_local_one(
    local: Path, memory: Path, tmp_path: Path, scheme: str
) -> None:
    """Written by parts into it, read from it, and nothing encoded twice."""
    assert cached(tmp_path / "plain", source(local)) == {}
    folder = Path("memory://bucket/cache") if scheme == "memory" else Path(f"file://{tmp_path}/there")
    cached(folder, source(memory), Part(2, 2))
    assert cached(folder, source(memory)) == {}
    assert content(folder) == content(tmp_path / "plain")

    def never(_: object) -> Tensor:
        raise AssertionError("everything is there")

    assert write_cache(folder, source(memory), never, never, {"model": "a test"}) == {}
    ours, theirs = CachedSource.open(tmp_path / "plain"), CachedSource.open(folder)
    batches = [collate_cached([one.clip(index) for index in range(CLIPS)]) for one in (ours, theirs)]
    assert torch.equal(batches[0].latents, batches[1].latents)
    assert torch.equal(batches[0].cameras.world_from_camera, batches[1].cameras.world_from_camera)
    with pytest.raises(ValueError, match="must be a cache of"):
        write_cache(folder, source(memory), never, never, {"model": "another"})


def test_a_row_that_changes_is_encoded_again(memory: Path) -> None:
    folder, clips = Path("memory://bucket/cache"), source(memory)
    cached(folder, clips)
    before = content(folder)
    other = replace(clips, rows=[replace(clips.rows[0], caption="rain"), *clips.rows[1:]])
    cached(folder, other)
    changed = {name for name, data in content(folder).items() if before.get(name) != data}
    assert len([name for name in changed if name.endswith(".row.json")]) == 1
    assert "clips.jsonl" in changed


def test_pose_files_and_folders_come_from_a_store(memory: Path, tmp_path: Path) -> None:
    path = Trajectory(curved_drive(3), False, "a test", lens=PINHOLE)
    formats.write(path, tmp_path / "model", "colmap")
    fsspec.filesystem("memory").put(f"{tmp_path}/model", "/bucket/model", recursive=True)
    back = formats.read(Path("memory://bucket/model"))
    torch.testing.assert_close(back.world_from_camera, path.world_from_camera, rtol=0, atol=1e-12)
    formats.write(path, Path("memory://bucket/new/path.json"))
    assert formats.read("memory://bucket/new/path.json").count == 3


def test_images_come_from_a_store(memory: Path, tmp_path: Path) -> None:
    write_image(torch.full((8, 8, 3), 90, dtype=torch.uint8), tmp_path / "a.png")
    fsspec.filesystem("memory").put_file(f"{tmp_path}/a.png", "/bucket/a.png")
    assert int(read_image(Path("memory://bucket/a.png"), 4, 4).float().mean()) == 90


def test_what_is_wrong_is_said_of_the_file_in_the_store(memory: Path) -> None:
    fsspec.filesystem("memory").pipe_file("/bucket/bad.txt", b"1 2 3\n")
    with pytest.raises(ValueError, match=r"memory://bucket/bad.txt:1 must be 12 numbers"):
        formats.read("memory://bucket/bad.txt", "kitti")
    with pytest.raises(FileNotFoundError, match=r"memory://bucket/no.txt is missing"):
        formats.read("memory://bucket/no.txt")
    with pytest.raises(ValueError, match=r"nowhere://a/b must be in a store that can be opened"):
        formats.read("nowhere://a/b")
    with pytest.raises(ValueError, match=r"data.root must be a file or folder that exists, got memory:/bucket/none"):
        replace(VideoData("videos", memory, memory / "train.jsonl"), root=Path("memory://bucket/none")).check_files()


def test_paths_and_what_they_name(memory: Path) -> None:
    assert is_remote(memory / "videos")
    assert url_of(Path("s3://bucket/a") / "b") == "s3://bucket/a/b"
    assert url_of(Path("file:///abs/b")) == "file:///abs/b"
    assert not any(is_remote(Path(text)) for text in ("a/b", "/a/b", "a:b", "c:", "..", "s3:"))
    assert sorted(names_in(memory)) == ["poses", "train.jsonl", "videos"]
    assert names_in(memory / "none") == []
    remove(memory / "train.jsonl")
    remove(memory / "train.jsonl")
    assert not exists(memory / "train.jsonl")

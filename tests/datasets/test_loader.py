"""The loader: order, resume, bad clips, workers."""

import json
import logging
import os
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenes import PINHOLE, curved_drive

from merope.curation.curate import Curation, Manifest
from merope.datasets.clip import Clip
from merope.datasets.loader import ClipLoader, collate, curation_of
from merope.datasets.nuscenes import NuScenes
from merope.datasets.nuscenes_clips import NuScenesSource
from merope.datasets.sampler import ClusterSampler
from merope.datasets.synth import Drive, write_nuscenes
from merope.datasets.videos import VideoSource, read_video_rows
from merope.formats import write
from merope.formats.trajectory import Trajectory
from merope.formats.video import read_video, write_video
from merope.geometry.lens_batches import picked, resized, stacked
from merope.geometry.lenses import Pinhole, UnifiedCamera


@dataclass(frozen=True)
class Source:
    """Clips whose frames hold their index; some cannot be read."""

    count: int = 12
    bad: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        return f"clip-{index}"

    def clip(self, index: int) -> Clip:
        if index in self.bad:
            raise ValueError(f"video clip-{index}.mp4 cannot be decoded")
        frames = torch.full((3, 4, 6, 3), index, dtype=torch.uint8)
        lens = Pinhole(5.0 + index, 5.0, 3.0, 2.0, 6, 4)
        times = torch.arange(3, dtype=torch.float64)
        return Clip(self.name(index), curved_drive(3), lens, times, 12.0, frames, caption=f"caption {index}")


def sampler(count: int = 12, **options: int) -> ClusterSampler:
    cluster = torch.arange(count) % 3
    return ClusterSampler(Curation(cluster, torch.arange(count)), seed=4, **options)


def names(loader: ClipLoader, batches: int) -> list[tuple[str, ...]]:
    return [batch.names for batch in islice(loader, batches)]


def test_batches_carry_everything() -> None:
    batch = next(iter(ClipLoader(Source(), sampler(), batch_size=4)))
    indices = [int(name.split("-")[1]) for name in batch.names]
    assert batch.frames.shape == (4, 3, 4, 6, 3)
    assert batch.frames[:, 0, 0, 0, 0].tolist() == indices
    assert batch.captions == tuple(f"caption {index}" for index in indices)
    rays, valid = batch.cameras.rays((2, 3))
    assert rays.shape == (4, 3, 6, 3)
    assert valid.all()
    assert isinstance(batch.cameras.lens, Pinhole)
    assert batch.cameras.lens.fx[:, 0].tolist() == [5.0 + index for index in indices]


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_goes_on_with_the_next_clip(workers: int) -> None:
    """Over the end of an epoch (12 clips) too, and although workers fetch ahead."""
    whole = names(ClipLoader(Source(), sampler(), 5), 6)
    first = ClipLoader(Source(), sampler(), 5, workers)
    assert names(first, 3) == whole[:3]
    second = ClipLoader(Source(), sampler(), 5, workers)
    second.load_state_dict(first.state_dict())
    assert names(second, 3) == whole[3:]


def test_ranks_share_one_sequence() -> None:
    together = [name for batch in names(ClipLoader(Source(), sampler(), 1), 12) for name in batch]
    ranks = [names(ClipLoader(Source(), sampler(rank=rank, world_size=2), 1), 6) for rank in range(2)]
    assert [name for pair in zip(*ranks, strict=True) for batch in pair for name in batch] == together


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_resumes_where_all_ranks_stand(rank: int) -> None:
    """Draws that all ranks have used, not its own, are what a rank's state counts; also over the end of an epoch."""
    whole = names(ClipLoader(Source(), sampler(rank=rank, world_size=2), 2), 8)
    for handed_out in (1, 2, 4, 5):
        first, second = (ClipLoader(Source(), sampler(rank=rank, world_size=2), 2) for _ in range(2))
        names(first, handed_out)
        second.load_state_dict(first.state_dict())
        assert names(second, 8 - handed_out) == whole[handed_out:]


def test_bad_clips_are_named_counted_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    loader = ClipLoader(Source(bad=(2, 5)), sampler(), 4)
    with caplog.at_level(logging.WARNING):
        drawn = [name for batch in names(loader, 20) for name in batch]
    assert len(drawn) == 80
    assert not {"clip-2", "clip-5"} & set(drawn)
    assert loader.skipped.keys() == {"clip-2", "clip-5"}
    assert "clip-2.mp4 cannot be decoded" in loader.skipped["clip-2"]
    with pytest.raises(ValueError, match="sampler must be over the 11 clips"):
        ClipLoader(Source(11), sampler(), 4)
    assert sorted(record.args[0] for record in caplog.records) == ["clip-2", "clip-5"]  # type: ignore[index]
    everything = [name for batch in names(ClipLoader(Source(), sampler(), 1), 110) for name in batch]
    stand_in = {"clip-2": "clip-8", "clip-5": "clip-8"}  # clips 2, 5, 8 and 11 are a cluster
    assert drawn == [stand_in.get(name, name) for name in everything][:80]


def test_more_workers_than_cores_are_one_line(
    caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    cores = len(os.sched_getaffinity(0))
    with caplog.at_level(logging.WARNING):
        loader = ClipLoader(Source(), sampler(), 4, workers=cores + 6)
        assert len(names(loader, 7)) == 7  # into the third epoch
        assert ClipLoader(Source(), sampler(), 4, workers=cores).workers == loader.workers == cores
    assert [record.message for record in caplog.records] == [
        f"data.workers = {cores + 6} is more than there are cores; {cores} are used"
    ]
    assert [str(warning.message) for warning in recwarn if "worker" in str(warning.message)] == []


def test_bad_clips_do_not_part_the_ranks() -> None:
    source = Source(bad=(2, 5))
    whole = names(ClipLoader(source, sampler(), 2), 15)
    ranks = [ClipLoader(source, sampler(rank=rank, world_size=2), 1) for rank in (0, 1)]
    parts = [names(loader, 15) for loader in ranks]
    assert [(*a, *b) for a, b in zip(*parts, strict=True)] == whole
    assert ranks[0].state_dict() == ranks[1].state_dict()


def test_a_source_without_any_readable_clip_stops() -> None:
    with pytest.raises(ValueError, match=r"none of 12 clips could be read, the last: clip-"):
        next(iter(ClipLoader(Source(bad=tuple(range(12))), sampler(), 2)))
    with pytest.raises(ValueError, match="source must be at least one clip"):
        ClipLoader(Source(0), sampler(), 2)


def test_lenses_and_frames_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ValueError, match="lenses must be of one kind"):
        stacked([PINHOLE, UnifiedCamera(100.0, 100.0, 128.0, 72.0, 0.5, 256, 144)])
    clip = Source().clip(1)
    without = Clip(clip.name, clip.world_from_camera, clip.lens, clip.timestamps_s, 12.0)
    with pytest.raises(ValueError, match="clip-1"):
        collate([clip, without])
    with pytest.raises(ValueError, match=r"frames of x must be \[3, 4, 6, 3\]"):
        Clip(
            "x", clip.world_from_camera, clip.lens, clip.timestamps_s, 12.0, torch.zeros(3, 5, 6, 3, dtype=torch.uint8)
        )


def test_nuscenes_through_the_loader(tmp_path: Path) -> None:
    lens = Pinhole(126.64, 126.64, 81.63, 49.15, 160, 90)
    grey = lambda cameras: torch.full((cameras.count, 90, 160, 3), 128, dtype=torch.uint8)  # noqa: E731
    write_nuscenes(tmp_path, "v1.0-mini", [Drive(curved_drive(14), "a"), Drive(curved_drive(14), "b")], lens, grey)
    data = NuScenes(tmp_path, "v1.0-mini")
    (tmp_path / str(data.frames.filename[0])).unlink()
    source = NuScenesSource(data, data.windows(count=9), 36, 64)
    loader = ClipLoader(source, sampler(len(source)), 2, workers=1)
    batches = list(islice(loader, 12))
    assert batches[0].frames.shape == (2, 9, 36, 64, 3)
    assert loader.skipped.keys() == {"scene-0000/CAM_FRONT/0"}


def test_video_round_trip_and_truncation(tmp_path: Path) -> None:
    ramp = torch.linspace(0, 255, 64)[None, None, :, None].expand(12, 48, 64, 3)
    frames = (ramp * torch.linspace(0.3, 1, 12)[:, None, None, None]).to(torch.uint8)
    file = tmp_path / "clip.mp4"
    write_video(frames, file, 12.0)
    back = read_video(file, [0, 3, 11], 48, 64)
    assert (back.float() - frames[[0, 3, 11]].float()).abs().mean() < 3
    assert read_video(file, [2], 24, 32).shape == (1, 24, 32, 3)
    with pytest.raises(ValueError, match=r"clip.mp4 ends before frame 12 of 15"):
        read_video(file, [0, 12, 15], 48, 64)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"clip.mp4"):
        read_video(file, list(range(12)), 48, 64)
    with pytest.raises(FileNotFoundError, match=r"gone.mp4 is missing"):
        read_video(tmp_path / "gone.mp4", [0], 48, 64)


def write_video_data(folder: Path, lens: Pinhole | None, times_s: torch.Tensor) -> None:
    """A video of 20 frames that brighten, its poses, and a manifest of three clips, the last too long."""
    frames = torch.arange(20, dtype=torch.uint8)[:, None, None, None].expand(20, 32, 48, 3) * 10
    write_video(frames, folder / "drive.mp4", 10.0)
    path = Trajectory(curved_drive(20), True, "made for a test", times_s, lens)
    write(path, folder / "drive.json")
    rows = [
        {"id": f"drive-{start}", "video": "drive.mp4", "poses": "drive.json", "start": start} for start in (0, 6, 14)
    ]
    rows[1]["stride"], rows[1]["caption"] = 2, "a street"
    (folder / "clips.jsonl").write_text("\n".join(json.dumps(row) for row in rows))


def test_videos_with_pose_files(tmp_path: Path) -> None:
    write_video_data(tmp_path, Pinhole(60.0, 60.0, 48.0, 32.0, 96, 64), torch.arange(20, dtype=torch.float64) / 10)
    source = VideoSource(read_video_rows(tmp_path / "clips.jsonl"), tmp_path, frames=7, height=16, width=24)
    clip = source.clip(1)
    assert clip.frames is not None
    assert (clip.frames[:, 8, 12, 0].float() - torch.arange(60, 200, 20)).abs().max() < 8
    assert (clip.world_from_camera - curved_drive(20)[6:20:2]).abs().max() < 1e-12
    assert clip.fps == pytest.approx(5.0)
    assert clip.caption == "a street"
    assert float(clip.lens.fx) == pytest.approx(15.0)  # type: ignore[attr-defined]
    loader = ClipLoader(source, sampler(3), 2)
    next(iter(loader))
    with pytest.raises(ValueError, match=r"poses of drive-14 must be at least 21, got 20"):
        source.clip(2)


def test_a_zoom_is_cut_with_its_path(tmp_path: Path) -> None:
    focal = 60.0 + torch.arange(20, dtype=torch.float64)
    write_video_data(tmp_path, Pinhole(focal, 60.0, 48.0, 32.0, 96, 64), torch.arange(20, dtype=torch.float64) / 10)
    source = VideoSource(read_video_rows(tmp_path / "clips.jsonl"), tmp_path, frames=7, height=16, width=24)
    lens = source.clip(1).lens
    assert isinstance(lens, Pinhole)
    assert lens.fx.tolist() == pytest.approx((focal[6:20:2] / 4).tolist())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"id": 7}, "id must be a text, got 7"),
        ({"caption": None}, "caption of a must be a text, got None"),
        ({"video": None, "poses": None}, "video of a must be a file, or a list of files, got None"),
        ({"video": ["b", 3], "poses": ["c", "d"]}, r"video of a must be a file, or a list of files, got \['b', 3\]"),
    ],
)
def test_video_rows_of_other_types_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    row = {"id": "a", "video": "b", "poses": "c"} | changed
    (tmp_path / "clips.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=message):
        read_video_rows(tmp_path / "clips.jsonl")


def test_video_rows_name_what_is_missing(tmp_path: Path) -> None:
    times = torch.arange(20, dtype=torch.float64) / 10
    write_video_data(tmp_path, None, times)
    source = VideoSource(read_video_rows(tmp_path / "clips.jsonl"), tmp_path, frames=3, height=16, width=24)
    with pytest.raises(ValueError, match=r"lens of drive-0 must be in the pose file"):
        source.clip(0)
    (tmp_path / "bad.jsonl").write_text('{"id": "a", "video": "b"}')
    with pytest.raises(ValueError, match=r"bad.jsonl, line 1"):
        read_video_rows(tmp_path / "bad.jsonl")
    (tmp_path / "start.jsonl").write_text('{"id": "a", "video": "b", "poses": "c", "start": "0"}')
    with pytest.raises(ValueError, match=r"start of a must be an int ≥ 0, got '0'"):
        read_video_rows(tmp_path / "start.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"empty.jsonl must be at least one clip"):
        read_video_rows(tmp_path / "empty.jsonl")
    row = {"id": "a", "video": "a.mp4", "poses": "a.json", "prompt": "night"}
    (tmp_path / "prompt.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=r"line 1 must be a text under \"caption\", got one under 'prompt'"):
        read_video_rows(tmp_path / "prompt.jsonl")


@dataclass(frozen=True)
class Broken(Source):
    """Clips that fail in other ways than a reader would."""

    def clip(self, index: int) -> Clip:
        clip = super().clip(index)
        if index == 3:
            return replace(clip, world_from_camera=clip.world_from_camera * float("nan"))
        if index == 7:
            raise KeyError("cam_intrinsic")
        return clip


def test_nan_poses_and_surprises_are_named_too() -> None:
    loader = ClipLoader(Broken(), sampler(), 4)
    names(loader, 20)
    assert "poses of clip-3" in loader.skipped["clip-3"]
    assert "KeyError: 'cam_intrinsic'" in loader.skipped["clip-7"]


def test_manifests_are_matched_by_name() -> None:
    order = torch.randperm(12, generator=torch.Generator().manual_seed(2))
    curation = Curation((torch.arange(12) % 3)[order], torch.arange(12).index_fill(0, torch.tensor([4]), 0))
    manifest = Manifest(tuple(f"clip-{index}" for index in order.tolist()), curation)
    matched = curation_of(Source(), manifest)
    assert matched.cluster.tolist() == [index % 3 for index in range(12)]
    assert int(matched.prototype[order[4]]) == int(order[0])
    assert int(matched.kept.sum()) == 11
    with pytest.raises(ValueError, match="manifest must be a manifest with a row for every clip"):
        curation_of(Source(13), manifest)


@given(data=st.data(), count=st.integers(1, 8))
def test_a_manifest_of_more_clips_keeps_clusters_and_whole_prototypes(data: st.DataObject, count: int) -> None:
    """Those of other splits, or those that could not be cached, are left out."""
    cluster = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    kept = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    prototype = [row if row in kept else data.draw(st.sampled_from(sorted(kept))) for row in range(count)]
    order = data.draw(st.permutations(range(count)))
    place = {row: index for index, row in enumerate(order)}
    ids = tuple(f"clip-{row}" for row in order)
    stands_for = torch.tensor([place[prototype[row]] for row in order])
    chosen = data.draw(st.integers(1, count))  # the source has the first clips
    cut = curation_of(Source(chosen), Manifest(ids, Curation(cluster[list(order)], stands_for)))
    assert cut.cluster.tolist() == cluster[:chosen].tolist()
    assert cut.prototype.tolist() == [p if p < chosen else row for row, p in enumerate(prototype[:chosen])]
    assert cut.kept[cut.prototype].all()


def test_lenses_of_a_clip_and_of_frames_stack() -> None:
    one, many = Pinhole(5.0, 5.0, 3.0, 2.0, 6, 4), Pinhole(torch.arange(1.0, 4.0).double(), 5.0, 3.0, 2.0, 6, 4)
    together = stacked([one, many])
    assert together.fx.tolist() == [[5.0, 5.0, 5.0], [1.0, 2.0, 3.0]]  # type: ignore[attr-defined]


def test_lenses_picked_and_resized() -> None:
    lens = Pinhole(torch.arange(1.0, 7.0), 5.0, 3.0, 2.0, 6, 4)
    some = picked(lens, torch.tensor([4, 1]))
    assert isinstance(some, Pinhole)
    assert some.fx.tolist() == [5.0, 2.0]  # type: ignore[union-attr]
    assert picked(PINHOLE, torch.tensor([0])) is PINHOLE
    pixels = 256 * torch.rand(10, 2, dtype=torch.float64)
    scaled = resized(PINHOLE, 64, 72)
    expected, _ = PINHOLE.unproject(pixels)
    assert (scaled.unproject(pixels * torch.tensor([0.25, 0.5]))[0] - expected).abs().max() < 1e-12

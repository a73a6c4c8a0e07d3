"""Streams of world clips: the same clips for any split over ranks, shared renders, and one step ahead."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from merope.geometry.lenses import Pinhole, UnifiedCamera
from merope.train.streams import Ahead, Examples, Share, WorldStream
from merope.world import kept_renders
from merope.world.clips import HELD_OUT_SEEDS, SEEDS, WorldClips
from merope.world.kept_renders import KeptRenders
from merope.world.scene import World

CPU = torch.device("cpu")
NO_TEXT = torch.zeros(1, 8)
ONE_LEVEL = 1.001 / 127.5  # of 8 bits
CLIPS = WorldClips(frames=3, height=8, width=16, prefix_frames=1)
MIXED = WorldClips(frames=3, height=8, width=16, prefix_frames=1, fov_deg=(60.0, 120.0), xi=(0.0, 1.0))


def stream(
    rank: int = 0, ranks: int = 1, micro_batch: int = 2, clips: WorldClips = CLIPS, **options: int
) -> WorldStream:
    return WorldStream(clips, 5, 4, Share(rank, ranks, micro_batch), NO_TEXT, CPU, **options)


def by_place(parts: list[Examples]) -> dict[int, tuple[str, torch.Tensor, torch.Tensor]]:
    return {
        place: (part.names[k], part.clean[k], part.cameras.world_from_camera[k])
        for part in parts
        for k, place in enumerate(part.places)
    }


@pytest.mark.parametrize("clips", [CLIPS, MIXED], ids=["one lens", "many lenses"])
def test_any_split_over_ranks_gives_the_same_clips(clips: WorldClips) -> None:
    whole = by_place(list(stream(micro_batch=4, clips=clips).step(3)))
    split = by_place([part for rank in (0, 1) for part in stream(rank, 2, 1, clips).step(3)])
    assert whole.keys() == split.keys() == {0, 1, 2, 3}
    for place, (name, clean, poses) in whole.items():
        assert split[place][0] == name
        torch.testing.assert_close(split[place][1], clean, rtol=0, atol=ONE_LEVEL)
        assert torch.equal(split[place][2], poses)


def test_steps_and_held_out_clips_never_share_a_world() -> None:
    training = {name for step in range(3) for part in stream().step(step) for name in part.names}
    held_out = {name for part in stream().held_out(4) for name in part.names}
    assert len(training) == 12
    assert len(held_out) == 4
    assert all(int(name.split()[1]) % SEEDS >= HELD_OUT_SEEDS for name in training)
    assert all(int(name.split()[1]) < HELD_OUT_SEEDS for name in held_out)


def test_no_training_clip_has_the_bits_of_a_held_out_seed() -> None:
    """Generators read 32 bits of a seed, and these were below 2¹⁷: the world is that of a smaller seed."""
    drawn = replace(stream(), seed=1)._training_seed(987, 20)
    one, other = World(drawn), World(drawn % SEEDS)
    assert torch.equal(one.streets.lanes, other.streets.lanes)
    assert torch.equal(one.solids.centre_m, other.solids.centre_m)
    assert drawn % SEEDS >= HELD_OUT_SEEDS


def test_noise_draws_share_a_clip() -> None:
    (part,) = stream(micro_batch=4, noise_draws=2).step(0)
    assert part.names[0] == part.names[1] != part.names[2] == part.names[3]
    assert torch.equal(part.clean[0], part.clean[1])
    assert torch.equal(part.cameras.world_from_camera[2], part.cameras.world_from_camera[3])
    assert part.cameras.world_from_camera.shape == (4, 3, 4, 4)


def test_kept_renders_are_the_same_clips_and_are_rendered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, kept = stream(), replace(stream(), kept=KeptRenders(tmp_path / "renders"))
    expected = by_place([part for parts in plain.steps([0, 1]) for part in parts])
    first = by_place([part for parts in kept.steps([0, 1]) for part in parts])
    monkeypatch.setattr(WorldClips, "pictures", None)  # from here on nothing can be rendered
    again = by_place([part for parts in kept.steps([0, 1]) for part in parts])
    for place, (name, clean, poses) in expected.items():
        for other in (first, again):
            assert other[place][0] == name
            assert torch.equal(other[place][1], clean)
            assert torch.equal(other[place][2], poses)
    with pytest.raises(TypeError):
        kept.steps([2])
    with pytest.raises(TypeError):
        replace(kept, clips=replace(CLIPS, frame_rate_hz=5.0)).steps([0, 1])


def test_half_a_file_of_kept_renders_is_rendered_again(tmp_path: Path) -> None:
    kept, frames = KeptRenders(tmp_path), torch.full((1, 2, 2, 2, 3), 7, dtype=torch.uint8)
    kept.clips(CLIPS, [3], lambda: frames)
    (file,) = tmp_path.glob("*.safetensors")
    for size in (0, 20, file.stat().st_size - 1):
        os.truncate(file, size)
        assert torch.equal(kept.clips(CLIPS, [3], lambda: frames), frames)
        assert torch.equal(kept.clips(CLIPS, [3], lambda: frames + 1), frames)


def test_other_code_renders_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, frames = KeptRenders(tmp_path), torch.full((1, 2, 2, 2, 3), 7, dtype=torch.uint8)
    kept.clips(CLIPS, [3], lambda: frames)
    monkeypatch.setattr(kept_renders, "_source", lambda: "another version")
    assert torch.equal(kept.clips(CLIPS, [3], lambda: frames + 1), frames + 1)


def test_of_two_who_want_a_clip_one_renders(tmp_path: Path) -> None:
    kept, rendered = KeptRenders(tmp_path), []

    def slowly() -> torch.Tensor:
        rendered.append(1)
        time.sleep(0.2)
        return torch.full((1, 2, 2, 2, 3), 7, dtype=torch.uint8)

    with ThreadPoolExecutor(4) as threads:
        got = list(threads.map(lambda _: kept.clips(CLIPS, [3], slowly), range(4)))
    assert len(rendered) == 1
    assert all(torch.equal(each, got[0]) for each in got)
    assert not list(tmp_path.glob(".part-*"))


def test_steps_ahead_give_the_same_clips() -> None:
    ahead = Ahead(stream(), steps=200)
    for step in (0, 1, 31, 32, 3 * 32 + 2):
        expected, got = by_place(list(stream().step(step))), by_place(list(ahead.step(step)))
        assert [expected[place][0] for place in range(4)] == [got[place][0] for place in range(4)]
        for place in range(4):
            torch.testing.assert_close(got[place][1], expected[place][1], rtol=0, atol=ONE_LEVEL)


def test_nothing_is_prepared_beyond_the_run_and_errors_come_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[range] = []

    def noted(_: WorldStream, numbers: range) -> list[list[int]]:
        asked.append(numbers)
        return [[number] for number in numbers]

    monkeypatch.setattr(WorldStream, "steps", noted)
    ahead = Ahead(stream(), steps=35)
    got: list[Any] = [list(ahead.step(step)) for step in range(35)]
    assert got == [[step] for step in range(35)]
    ahead._thread.shutdown()
    assert asked == [range(32), range(32, 35)]

    def fail(_: WorldStream, numbers: range) -> list[list[Examples]]:
        raise RuntimeError(f"steps {numbers} cannot be rendered")

    monkeypatch.setattr(WorldStream, "steps", fail)
    with pytest.raises(RuntimeError, match="cannot be rendered"):
        list(Ahead(stream(), steps=35).step(0))


@pytest.mark.parametrize("other", ["held_out", "example"])
def test_other_clips_wait_for_those_that_are_prepared(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both may go through one VAE, which remembers where it is in a large clip."""
    is_prepared = threading.Event()

    def prepared(_: WorldStream, numbers: range) -> list[list[int]]:
        if numbers.start:
            time.sleep(0.2)
            is_prepared.set()
        return [[number] for number in numbers]

    monkeypatch.setattr(WorldStream, "steps", prepared)
    monkeypatch.setattr(WorldStream, other, lambda *_: is_prepared.is_set())
    ahead = Ahead(stream(), steps=64)
    list(ahead.step(0))
    assert getattr(ahead, other)(*(() if other == "example" else (1,))) is True


def test_large_clips_are_prepared_fewer_at_a_time() -> None:
    small = WorldClips(frames=13, height=72, width=128)
    shipped = WorldStream(small, 5, 48, Share(0, 1, 48), NO_TEXT, CPU, noise_draws=4)
    large = WorldStream(WorldClips(frames=49, height=288, width=512), 5, 64, Share(0, 1, 1), NO_TEXT, CPU)
    assert shipped.steps_at_once == 32
    assert large.steps_at_once == 1  # 32 steps would be 165 GiB


def test_lenses_are_drawn_per_clip_within_their_ranges() -> None:
    lens = MIXED.lenses(range(20))
    assert isinstance(lens, UnifiedCamera)
    assert lens.batch_shape == (20, 1)
    assert 0.0 <= float(lens.xi.min()) < 0.3 < 0.7 < float(lens.xi.max()) <= 1.0
    assert isinstance(CLIPS.lenses(range(20)), Pinhole)
    assert CLIPS.lenses(range(20)).batch_shape == ()


def test_scenery_does_not_tell_the_drive() -> None:
    seeds = list(range(400))
    lanes = World(seeds).streets.lanes[:, 0]
    ends_m = torch.stack([WorldClips().path(seed)[-1, :3, 3].norm() for seed in seeds])
    assert torch.corrcoef(torch.stack((lanes, ends_m)))[0, 1].abs() < 0.15


def test_clips_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="prefix_frames"):
        WorldClips(frames=3, prefix_frames=3)
    with pytest.raises(ValueError, match=r"fov_deg.*rising"):
        WorldClips(fov_deg=(90.0, 60.0))

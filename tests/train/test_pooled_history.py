"""References of clips that are kept as latents: as many for every clip, so that clips are learnt together."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from merope.geometry.poses import relative
from merope.train.clip_pool import Growth
from merope.train.config import TrainConfig
from merope.train.latent_pool import LatentPool, PooledHistoryStream
from merope.train.loop import train
from merope.train.streams import Examples, Share
from merope.world.clips import WorldClips
from merope.world.kept_renders import KeptRenders
from merope.world.revisits import EarlierDrives
from tests.tiny_pipelines import miniature_vae
from tests.train.test_latent_pool import HALF, latent_config, thumbnails
from tests.train.tiny_runs import tiny_config

CPU = torch.device("cpu")
CLIPS = WorldClips(frames=9, height=16, width=32, frame_rate_hz=16.0, prefix_frames=5)
EARLIER = EarlierDrives(CLIPS, count=2, latent_stride=4)


def stream(rank: int = 0, ranks: int = 1, kept: KeptRenders | None = None) -> PooledHistoryStream:
    common = (CLIPS, 5, 4, Share(rank, ranks, 2), torch.zeros(1, 8), CPU)
    pool, references = (LatentPool(each, 16, thumbnails, CPU, kept) for each in (CLIPS, EARLIER))
    pools = {"pool": pool, "growth": Growth(16, 0.0, 16), "earlier": EARLIER, "references": references}
    return PooledHistoryStream(*common, encode=thumbnails, **pools)


def by_place(parts: list[Examples]) -> dict[int, tuple[str, Tensor, Tensor]]:
    return {
        place: (part.names[k], part.history.latents[k], part.history.posed.world_from_camera[k])
        for part in parts
        for k, place in enumerate(part.places)
        if part.history is not None
    }


def test_references_are_pictures_of_the_clips_world_by_themselves() -> None:
    seeds = [7, 100_003]
    cameras = CLIPS.cameras(seeds)
    there = EARLIER.pictures(seeds, cameras.at(slice(2, 4)))  # from where the clip's own cameras stand
    assert (there.int() - CLIPS.pictures(seeds, cameras)[:, 2:4].int()).abs().max() <= 1
    (part, *_) = stream().step(0)
    assert part.history is not None
    assert part.history.latents.shape == (2, 3, 2, 2, 4)
    assert part.history.moments.tolist() == [100.0, 102.0]
    for k, name in enumerate(part.names):
        seed = int(name.split()[1])
        own = EARLIER.pictures([seed], EARLIER.cameras([seed]))
        for reference in range(2):
            alone = thumbnails(own[:, reference : reference + 1])[0, :, 0]
            torch.testing.assert_close(part.history.latents[k, :, reference], alone, rtol=0, atol=HALF + 1 / 255)


def test_an_earlier_drive_was_near_what_it_is_matched_with() -> None:
    for seed in range(20):
        path = CLIPS.path(seed)
        offset = relative(path[::4][EARLIER.matched], EARLIER.poses(path, seed))
        assert float(offset[:, :3, 3].norm(dim=-1).max()) < 1.2  # inside of what is cleared for the clip
        assert float(offset[:, :3, 3].norm(dim=-1).min()) > 0.0


def test_a_drive_with_fewer_pictures_than_asked_for_is_refused() -> None:
    standing = torch.eye(4, dtype=torch.float64).repeat(9, 1, 1)
    with pytest.raises(ValueError, match=r"history.frames must be that many different pictures, 2, got 1"):
        EARLIER.poses(standing, seed=0)


def test_any_split_over_ranks_and_any_start_give_the_same_references(tmp_path: Path) -> None:
    whole = stream(kept=KeptRenders(tmp_path, "thumbnails"))
    steps = [by_place(list(whole.step(step))) for step in range(3)]
    kept = by_place(list(stream(kept=KeptRenders(tmp_path, "thumbnails")).step(2)))
    split = by_place([part for rank in (0, 1) for part in stream(rank, 2).step(2)])
    for other in (kept, split):
        assert other.keys() == steps[2].keys() == {0, 1, 2, 3}
        for place, (name, latents, poses) in steps[2].items():
            assert other[place][0] == name
            assert torch.equal(other[place][1], latents)
            assert torch.equal(other[place][2], poses)


def test_held_out_clips_have_references_too() -> None:
    clips = stream()
    first, again = (by_place(list(clips.held_out(3))) for _ in range(2))
    assert first.keys() == {0, 1, 2}
    for place, (name, latents, poses) in first.items():
        seed = int(name.split()[1])
        assert torch.equal(poses, EARLIER.poses(CLIPS.path(seed), seed))
        assert torch.equal(latents, again[place][1])


def pooled_config(out: Path, path: str, *changes: str) -> TrainConfig:
    """Clips of three latent frames, two at a time, each with two references."""
    history = (f"branch.history={path}", "history.frames=2", "history.conflict_rate=0.0")
    vae = out.parent / "vae"
    if not vae.exists():
        miniature_vae().save_pretrained(vae)
    return latent_config(vae, out, *history, "run.micro_batch=2", "data.frame_rate_hz=16.0", *changes)


@pytest.mark.parametrize("path", ["sa", "ca"])
def test_a_run_in_pieces_is_a_run_at_once(tmp_path: Path, path: str) -> None:
    losses = []
    for name, pieces in (("whole", (3,)), ("pieces", (1, 3))):
        for steps in pieces:
            config = pooled_config(tmp_path / name, path, f"run.steps={steps}", "run.validate_every=3")
            train(replace(config, run=replace(config.run, validation_clips=2)))
        rows = [json.loads(row) for row in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in rows] + [rows[-1]["validation_loss"]])
    assert losses[0] == losses[1]


def test_clips_of_two_lanes_are_not_drawn_from_a_pool(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"history.conflict_rate with data.worlds must be 0, got 0.25"):
        pooled_config(tmp_path / "run", "ca", "history.conflict_rate=0.25")
    with pytest.raises(ValueError, match=r"run.micro_batch with \[history\] must be 1, got 2"):
        tiny_config(tmp_path, "branch.history=sa", "history.frames=2", "run.micro_batch=2")

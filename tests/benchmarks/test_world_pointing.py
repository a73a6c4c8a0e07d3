"""benchmarks/world_pointing.py: where the right token is, and how attention on it is counted."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from scenes import PINHOLE, curved_drive
from torch import Tensor

import merope
from merope import Cameras
from merope.train.build import world_clips
from merope.world.clips import WorldClips

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import world_pointing as pointing

TOKENS = pointing.GRID[0] * pointing.GRID[1]


class Still(WorldClips):
    """A camera that does not move."""

    def path(self, seed: int) -> Tensor:
        return torch.eye(4, dtype=torch.float64).repeat(self.frames, 1, 1)


@pytest.mark.parametrize("clips", [Still(), Still(fov_deg=(60.0, 150.0), xi=(0.0, 1.5))], ids=["pinhole", "mixed"])
def test_a_camera_that_stays_shows_everything_in_its_own_place(clips: WorldClips) -> None:
    pairs = pointing.pairs_of(clips, range(2))
    assert pairs.visible.float().mean() > 0.4  # the sky has no surface
    own = torch.arange(TOKENS).repeat(len(pointing.LATER)).expand_as(pairs.target)
    assert torch.equal(pairs.target[pairs.visible], own[pairs.visible])


def test_driving_ahead_moves_what_is_seen_away_from_the_centre() -> None:
    """In the last given frame, which is farther back, the same points lie nearer to the middle of the picture."""
    pairs = pointing.pairs_of(WorldClips(), range(2))
    later = torch.arange(TOKENS).repeat(len(pointing.LATER)).expand_as(pairs.target)[pairs.visible]
    assert (row_distance(pairs.target[pairs.visible]) - row_distance(later)).mean() < -0.3


def row_distance(token: Tensor) -> Tensor:  # int64 [...] -> float [...]
    """Rows from the middle row of the grid."""
    return (token // pointing.GRID[1] - pointing.GRID[0] // 2).abs().float()


def test_heads_are_measured_on_other_drives_than_they_are_fitted_on() -> None:
    drives = [WorldClips().path(seed) for seed in (*pointing.MEASURED_ON, *pointing.FITTED_ON)]
    assert len({drive.numpy().tobytes() for drive in drives}) == 2 * pointing.CLIPS


def test_marked_weights_are_those_of_attention() -> None:
    cameras = Cameras(curved_drive(2), PINHOLE)
    plan = merope.encoding("ucpe", head_dim=32, transform_values=False).plan(cameras, pointing.GRID)
    q, k = torch.randn(2, 1, 2, 2 * TOKENS, 32, generator=torch.Generator().manual_seed(0)).double()
    weights = torch.cat([pointing.marked(q, k, plan, frame * TOKENS) for frame in range(2)], dim=-1)
    query = 2 * TOKENS - 5
    logits = torch.einsum("hi,bij,hbj->hb", q[0, :, query], plan.operators(query).double(), k[0]) / math.sqrt(32)
    assert (weights[0, :, query] - logits.softmax(-1)).abs().max() < 1e-9


@pytest.mark.parametrize(("sharpness", "nats"), [(0.0, math.log(TOKENS)), (100.0, 0.0)])
def test_nats_are_counted_within_the_frame(sharpness: float, nats: float) -> None:
    """Half of the attention is elsewhere: that does not count."""
    pairs = pointing.pairs_of(Still(), range(1))
    on_target = torch.nn.functional.one_hot(pairs.target, TOKENS)[:, None].double()
    weights = 0.5 * (sharpness * on_target).softmax(dim=-1)
    assert float(pointing.missed(weights, pairs)) == pytest.approx(nats, abs=1e-9)


def test_a_row_can_be_changed() -> None:
    finer = "direction-phases branch.encoding_options.direction_scale=25.0 data.fov_deg=[60.0,150.0] data.xi=[0.0,1.5]"
    pairs = pointing.pairs_of(Still(), range(1))
    plans = [pointing.plan_of(pointing.config_of(row), pairs) for row in ("direction-phases", finer)]
    tables = [plan.operators(0) for plan in plans]
    assert (tables[0] - tables[1]).abs().max() > 0.1
    assert world_clips(pointing.config_of(finer)).fov_deg == (60.0, 150.0)
    with pytest.raises(ValueError, match=r"--rows must be one of none, .*, got 'rayrope run.steps=1'"):
        pointing.config_of("rayrope run.steps=1")


def test_what_was_measured_before_stays_until_it_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other gains of a row, too, and rows that a stopped run did not come to."""

    def fitted(row: str, gain: float, train: object, test: object) -> dict[str, object]:
        if row == "gta":
            raise KeyboardInterrupt
        return {"row": row, "gain": gain, "nats": 1.0}

    file = tmp_path / "pointing.json"
    before = [{"row": row, "gain": 1.0, "nats": 5.0} for row in ("gta", "merope")]
    file.write_text(json.dumps([*before, {"row": "merope", "gain": 3.0, "nats": 5.0}]))
    monkeypatch.setattr(pointing, "pairs_of", lambda *_: None)
    monkeypatch.setattr(pointing, "fitted", fitted)
    words = ["--models", "--rows", "merope", "gta", "--gains", "3", "--out", str(file)]
    monkeypatch.setattr(sys, "argv", ["world_pointing.py", *words])
    with pytest.raises(KeyboardInterrupt):
        pointing.main()
    nats = {(row["row"], row["gain"]): row["nats"] for row in json.loads(file.read_text())}
    assert nats == {("gta", 1.0): 5.0, ("merope", 1.0): 5.0, ("merope", 3.0): 1.0}

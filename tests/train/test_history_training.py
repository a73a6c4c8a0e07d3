"""Training with retrieved history: what is retrieved, what is dropped, and that ranks and stops change nothing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from merope.adapters.attachment import attached_branch
from merope.curation.retrieve import Gates
from merope.datasets.cache import CachedData
from merope.datasets.nuscenes_clips import NuScenesData
from merope.datasets.synth import Drive, write_nuscenes
from merope.geometry.lenses import Pinhole
from merope.geometry.poses import relative
from merope.geometry.trajectories import unicycle_path
from merope.train import checkpoint
from merope.train.build import build_stream
from merope.train.clip_streams import HistoryEncoder
from merope.train.config import HistorySection, TrainConfig
from merope.train.loop import train
from merope.train.losses import clip_losses
from merope.train.model import Model, build_model
from merope.train.objective import VALIDATION, Noised, clip_generator, history_generator
from merope.train.parallel import Ranks, start
from merope.train.streams import Examples, WorldHistoryStream
from merope.train.toml_config import read_config
from merope.world.clips import WorldClips, as_video
from merope.world.revisits import other_drives, retrieve_revisits
from tests.train.ranks import run_ranks
from tests.train.test_parallel import SMOOTH, assert_same_weights
from tests.train.test_streams import ONE_LEVEL
from tests.train.tiny_runs import tiny_config

CONFIGS = Path(__file__).parents[2] / "configs"
CLIPS = WorldClips(frames=7, height=24, width=40, prefix_frames=2)


def with_history(out: Path, path: str, *changes: str) -> TrainConfig:
    return tiny_config(out, f"branch.history={path}", "history.frames=2", *changes)


def model_and_stream(config: TrainConfig) -> tuple[Model, Any, Ranks]:
    ranks = start(config.parallel)
    model = build_model(config, ranks.device, sharded=False)
    return model, build_stream(config, model, ranks), ranks


class TestWorlds:
    @settings(max_examples=30, deadline=None)
    @given(seed=st.integers(0, 1 << 40))
    def test_other_drives_are_near_and_a_lane_away(self, seed: int) -> None:
        path, gates = CLIPS.path(seed), Gates()
        again, beside = other_drives(path, seed)
        assert float(relative(path, again)[:, 0, 3].abs().max()) < gates.lane_m[0]
        for conflict in (False, True):
            dice = torch.Generator().manual_seed(0)
            found = retrieve_revisits(CLIPS, seed, 3, float(conflict), dice)
            assert found.history.is_conflict == conflict
            assert found.history.count >= 2
            assert found.history.time.tolist() == (found.history.target + 100.0).tolist()
            assert bool((found.history.frame >= len(path)).all()) == conflict  # the second drive is the one beside
            expected = torch.cat((again, beside))[found.history.frame]
            assert torch.allclose(found.cameras.world_from_camera[0], expected, atol=1e-12)
            side_m = found.history.lateral_m.abs()
            assert float(side_m.min() if conflict else -side_m.max()) > (
                gates.lane_m[0] if conflict else -gates.lane_m[0]
            )

    def test_clip_and_references_are_pictures_of_one_world(self, tmp_path: Path) -> None:
        """A reference rendered where a frame of the clip stands is that frame."""
        _, stream, _ = model_and_stream(with_history(tmp_path, "sa"))
        examples = next(stream.step(3))
        seed = int(examples.names[0].removeprefix("world "))
        dice = history_generator(0, 3, examples.places[0])
        found = retrieve_revisits(stream.clips, seed, 2, stream.history.conflict_rate, dice)
        there = replace(found, cameras=stream.clips.cameras([seed]).at(slice(1, 3)))
        of_references = there.video(stream.clips, seed)
        torch.testing.assert_close(of_references, examples.clean[:, :, 1:3], rtol=0, atol=ONE_LEVEL)
        assert examples.history is not None
        assert torch.equal(found.video(stream.clips, seed), examples.history.latents)
        assert not torch.equal(examples.history.latents, examples.clean[:, :, 1:3])

    def test_what_stands_in_the_way_of_any_drive_is_gone_for_all(self) -> None:
        seed = 4  # something stands in the lane beside
        found = retrieve_revisits(CLIPS, seed, 2, 0.0, torch.Generator().manual_seed(0))
        own = CLIPS.cameras([seed])
        clip = CLIPS.pictures([seed], own, found.all_poses)
        assert torch.equal(replace(found, cameras=own).video(CLIPS, seed), as_video(clip))
        assert not torch.equal(CLIPS.pictures([seed], own), clip)

    def test_a_conflict_leaves_the_clip_alone(self, tmp_path: Path) -> None:
        config = with_history(tmp_path, "sa")
        _, stream, _ = model_and_stream(config)
        always = replace(stream, history=HistorySection(2, conflict_rate=1.0))
        never = replace(stream, history=HistorySection(2, conflict_rate=0.0))
        one, other = next(always.step(5)), next(never.step(5))
        assert torch.equal(one.clean, other.clean)
        assert torch.equal(one.cameras.world_from_camera, other.cameras.world_from_camera)
        assert not torch.equal(one.history.latents, other.history.latents)

    def test_conflicts_come_at_their_rate_from_the_dice_of_the_place(self) -> None:
        drawn = [
            retrieve_revisits(CLIPS, 77, 2, 0.25, history_generator(1, 2, place)).history.is_conflict
            for place in range(300)
        ]
        assert abs(sum(drawn) / len(drawn) - 0.25) < 0.08
        again = [
            retrieve_revisits(CLIPS, 77, 2, 0.25, history_generator(1, 2, place)).history.is_conflict
            for place in (7, 299)
        ]
        assert again == [drawn[7], drawn[299]]

    def test_they_are_independent_of_the_noise(self) -> None:
        """A conflict must not go with a noise level."""
        places = range(300)
        cpu = torch.device("cpu")
        of_noise = torch.stack([torch.rand((), generator=clip_generator(1, 2, place, cpu)) for place in places])
        of_history = torch.stack([torch.rand((), generator=history_generator(1, 2, place)) for place in places])
        assert float(torch.corrcoef(torch.stack((of_noise, of_history)))[0, 1].abs()) < 0.2

    def test_validation_takes_the_nearest_and_is_always_the_same(self, tmp_path: Path) -> None:
        config = with_history(tmp_path, "ca", "history.conflict_rate=1.0", "run.validation_clips=4")
        _, stream, _ = model_and_stream(config)
        assert isinstance(stream, WorldHistoryStream)
        first, second = list(stream.held_out(2)), list(stream.held_out(2))
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one.history.latents, other.history.latents)
            offset_m = relative(one.cameras.world_from_camera[0, 1], one.history.posed.world_from_camera[0, :1])
            assert float(offset_m[0, 0, 3].abs()) < 2.5


class TestPrefixDropout:
    """Current-image dropout: the whole prefix goes, only where there is usable history, never in validation."""

    def shares_without_prefix(self, config: TrainConfig, model: Model, examples: Examples, step: int) -> float:
        seen: list[Noised] = []
        measured = replace(model)

        def predicted(noised: Noised, *_: object) -> Tensor:
            seen.append(noised)
            return torch.zeros_like(noised.latents)

        object.__setattr__(measured, "predicted", predicted)
        for place in range(120):
            clip_losses(config, measured, replace(examples, places=(place,)), step)
        return sum(float(noised.generated[0, : model.prefix].all()) for noised in seen) / len(seen)

    def test_it_happens_at_its_rate(self, tmp_path: Path) -> None:
        config = with_history(tmp_path, "sa", "history.prefix_dropout=0.5")
        model, stream, _ = model_and_stream(config)
        examples = stream.example()
        assert model.prefix == 2
        assert abs(self.shares_without_prefix(config, model, examples, 1) - 0.5) < 0.15
        assert self.shares_without_prefix(config, model, replace(examples, history=None), 1) == 0
        assert self.shares_without_prefix(config, model, examples, VALIDATION) == 0
        always = replace(config, objective=replace(config.objective, prefix_dropout=1.0))
        assert self.shares_without_prefix(always, model, examples, 1) == 1  # the higher rate of the two


@pytest.mark.parametrize("path", ["sa", "ca"])
def test_the_model_is_given_the_references(path: str, tmp_path: Path) -> None:
    config = with_history(tmp_path, path)
    model, stream, _ = model_and_stream(config)
    branch = attached_branch(model.transformer)
    assert branch is not None
    with torch.no_grad():
        for parameter in branch.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    one, other = next(stream.step(0)), next(stream.step(1))
    with torch.no_grad():
        losses = [
            float(clip_losses(config, model, replace(one, history=history), 0))
            for history in (one.history, other.history, None)
        ]
    assert len(set(losses)) == 3


@pytest.mark.parametrize("path", ["sa", "ca"])
def test_two_ranks_take_the_steps_of_one(path: str, tmp_path: Path) -> None:
    steps = ("run.steps=2", *SMOOTH)
    train(with_history(tmp_path / "one", path, *steps))
    run_ranks(2, train, with_history(tmp_path / "two", path, *steps, "parallel.shard=2"))
    assert_same_weights(tmp_path / "two" / "trained", tmp_path / "one" / "trained")


def train_with_every_other_history(config: TrainConfig) -> None:
    whole = WorldHistoryStream._with_history

    def every_other(self: Any, world: int, place: int, step: int) -> Examples:
        examples = whole(self, world, place, step)
        return replace(examples, history=None) if place % 2 else examples

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorldHistoryStream, "_with_history", every_other)
        train(config)


def test_ranks_with_and_without_history_train_together(tmp_path: Path) -> None:
    """Real data: one rank's clip has references, the other's has none. With "ca" both must have gradients to add."""
    steps = ("run.steps=2", *SMOOTH)
    train_with_every_other_history(with_history(tmp_path / "one", "ca", *steps))
    two = with_history(tmp_path / "two", "ca", *steps, "parallel.shard=2")
    run_ranks(2, train_with_every_other_history, two)
    assert_same_weights(tmp_path / "two" / "trained", tmp_path / "one" / "trained")


def test_stopping_and_going_on_changes_nothing(tmp_path: Path) -> None:
    train(with_history(tmp_path / "whole", "ca", "run.steps=4"))
    parts = with_history(tmp_path / "parts", "ca", "run.steps=2")
    train(parts)
    train(replace(parts, run=replace(parts.run, steps=4)))
    assert_same_weights(tmp_path / "parts" / "trained", tmp_path / "whole" / "trained", 0.0)
    saved = json.loads((tmp_path / "whole" / "trained" / "branch" / "config.json").read_text())
    assert saved["history"] == "ca"
    with pytest.raises(ValueError, match=r"history.*frames.*2.*3"):
        train(with_history(tmp_path / "parts", "ca", "run.steps=5", "history.frames=3"))
    assert len(checkpoint.complete(tmp_path / "parts" / "checkpoints")) == 2


class TestNuScenes:
    """Drives along one street: the clips', one half a metre aside, one in the lane to the right, one far away."""

    LENS = Pinhole(30.0, 30.0, 24.0, 16.0, 48, 32)
    SHADES = (20, 80, 140, 200)  # of grey, one a drive

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        path = unicycle_path(torch.full((8,), 12.0), torch.zeros(8), 12.0)
        drives = []
        for number, right_m in enumerate((0.0, 0.5, 3.5, 500.0)):
            aside = torch.eye(4, dtype=torch.float64)
            aside[0, 3] = right_m
            drives.append(Drive(path @ aside, "a street", start_us=10**15 + 10**9 * number))
        shades = iter(self.SHADES)
        write_nuscenes(
            tmp_path,
            "v1.0-mini",
            drives,
            self.LENS,
            lambda cameras: torch.full((cameras.count, 32, 48, 3), next(shades), dtype=torch.uint8),
        )
        return tmp_path

    def stream(self, root: Path, train: tuple[int, ...], validation: tuple[int, ...] = (3,), rate: float = 0.0) -> Any:
        """Clips of four frames of the given drives."""
        splits = {name: [f"scene-{n:04d}" for n in drives] for name, drives in (("train", train), ("val", validation))}
        (root / "splits.json").write_text(json.dumps(splits))
        config = with_history(root / "run", "sa", f"history.conflict_rate={rate}", "run.batch_size=8")
        size = {"frames": 4, "height": 16, "width": 24, "workers": 0}
        data = NuScenesData("nuscenes", root, version="v1.0-mini", split_file=root / "splits.json", **size)
        _, stream, _ = model_and_stream(replace(config, data=data))
        return stream

    def shade(self, examples: Examples) -> int | None:
        """The grey that a history shows, None without one."""
        if examples.history is None:
            return None
        value = (examples.history.latents.unique().mean() + 1) * 127.5
        return min(self.SHADES, key=lambda shade: abs(shade - float(value)))

    def shades(self, examples: list[Examples], drive: int) -> set[int | None]:
        return {self.shade(e) for e in examples if e.names[0].startswith(f"scene-{drive:04d}")}

    def test_the_nearest_frames_of_another_log(self, root: Path) -> None:
        stream = self.stream(root, (0, 1, 2, 3))
        assert isinstance(stream.encoder, HistoryEncoder)
        examples = [e for step in range(4) for e in stream.step(step)]
        assert [self.shades(examples, drive) for drive in range(4)] == [{80}, {20}, {80}, {None}]
        one = next(e for e in examples if e.names[0].startswith("scene-0000"))
        history = one.history
        assert history is not None
        assert history.moments.tolist() == [101.0, 103.0]
        offset = relative(one.cameras.world_from_camera[0, [1, 3]], history.posed.world_from_camera)
        assert torch.allclose(offset[:, 0, 3], torch.tensor(0.5, dtype=torch.float64), atol=1e-6)
        assert torch.allclose(history.posed.lens.fx, torch.tensor(15.0, dtype=torch.float64))

    def test_lateral_conflicts_where_there_are_some(self, root: Path) -> None:
        stream = self.stream(root, (0, 1, 2, 3), rate=1.0)
        examples = [e for step in range(4) for e in stream.step(step)]
        assert [self.shades(examples, drive) for drive in (0, 1, 3)] == [{140}, {140}, {None}]

    def test_the_dice_of_the_place_choose(self, root: Path) -> None:
        stream = self.stream(root, (0, 1, 2), rate=0.5)
        wanted, got = [], []
        for step in range(6):
            for examples in stream.step(step):
                if examples.names[0].startswith("scene-0000"):
                    dice = history_generator(0, step, examples.places[0])
                    wanted.append(140 if float(torch.rand((), dtype=torch.float64, generator=dice)) < 0.5 else 80)
                    got.append(self.shade(examples))
        assert got == wanted
        assert set(wanted) == {80, 140}

    def test_validation_finds_what_was_driven_in_training(self, root: Path) -> None:
        stream = self.stream(root, (1, 2), validation=(0,), rate=1.0)
        assert self.shades(list(stream.held_out(2)), 0) == {80}
        trained = [e for step in range(2) for e in stream.step(step)]
        assert 20 not in self.shades(trained, 1) | self.shades(trained, 2)


class TestConfigs:
    @pytest.mark.parametrize("name", ["history-sa", "history-ca"])
    def test_the_papers_rows(self, name: str) -> None:
        config = read_config(TrainConfig, CONFIGS / "nuscenes" / f"{name}.toml")
        assert config.branch != "none"
        assert config.branch.history == name.removeprefix("history-")
        assert config.history == HistorySection()

    def test_what_does_not_go_together(self, tmp_path: Path) -> None:
        for changes, message in (
            (["branch.history=sa"], r"both branch.history and \[history\]"),
            (["history.frames=2"], r"both branch.history and \[history\]"),
            (["branch.history=sa", "history.frames=0"], r"history.frames.*at least 1"),
            (["branch.history=sa", "history.conflict_rate=2.0"], r"history.conflict_rate"),
            (["branch.history=sa", "history.frames=2", "run.micro_batch=2"], r"run.micro_batch.*history.*1"),
            (["branch.history=sa", "history.frames=2", "parallel.context=2"], r"parallel.context.*history"),
        ):
            with pytest.raises(ValueError, match=message):
                tiny_config(tmp_path, *changes)
        config = with_history(tmp_path, "sa")
        with pytest.raises(ValueError, match=r'"world" or "nuscenes"'):
            replace(config, data=CachedData("cache", tmp_path))

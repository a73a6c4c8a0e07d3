"""The world benchmark: what is commanded, what is generated, how it is scored."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from merope.bench import generated
from merope.bench.generated import (
    about_videos,
    benchmark_tests,
    generate_clips,
    generate_row,
    sampled_precision,
)
from merope.bench.lens_kinds import lens_kind
from merope.bench.scores import summaries
from merope.evaluate.world_scores import frame_psnr_db, psnr_db, score_clip, score_floor
from merope.generate.camera_video import CameraVideoPipeline
from merope.geometry.lenses import UnifiedCamera
from merope.geometry.trajectories import driving_path
from merope.train.loop import train
from merope.world.clips import HELD_OUT_SEEDS, WorldClips
from merope.world.commanded import (
    FIRST_TEST_SEED,
    MANOEUVRES,
    CommandedClip,
    WorldTest,
    clips_of_world,
    commanded_clips,
    stretched,
)
from merope.world.scene import World
from tests.train.tiny_runs import tiny_config

CPU = torch.device("cpu")
CLIPS = WorldClips(frames=5, height=72, width=128, prefix_frames=2)


def clips_in(seed: int, stretch: float = 1.0) -> list[CommandedClip]:
    return clips_of_world(WorldTest(stretch=stretch).paths(CLIPS, seed), CLIPS, seed, CPU)


def test_three_paths_share_prefix_and_world_and_then_part() -> None:
    test = WorldTest(worlds=1)
    original, left, right = clips_in(FIRST_TEST_SEED)
    assert [clip.manoeuvre for clip in (original, left, right)] == list(MANOEUVRES)
    assert torch.equal(original.true[:2], left.true[:2])
    assert torch.equal(original.cameras.world_from_camera[:2], right.cameras.world_from_camera[:2])
    heading = [float(clip.cameras.world_from_camera[-1, 0, 2]) for clip in (left, original, right)]
    assert heading == sorted(heading)
    assert heading[2] - heading[0] > 0.8  # sines of ±30° about the original
    assert (left.true[-1].int() - right.true[-1].int()).abs().float().mean() > 5
    assert max(test.seeds) < HELD_OUT_SEEDS


def test_a_true_video_scores_perfectly_and_a_wrong_one_does_not() -> None:
    clip, left, _ = clips_in(FIRST_TEST_SEED + 1)
    perfect = score_clip(clip, clip.true, 2)
    assert perfect.metrics.rot_deg < 0.05
    assert perfect.metrics.metric_tr_percent is not None
    assert perfect.metrics.metric_tr_percent < 0.2
    assert perfect.psnr_db == 60.0
    assert len(perfect.pairs.rotation_deg) == 9  # ten pairs of five frames, less that of the two given ones
    numbers = perfect.as_dict()
    assert (numbers["auc_3"], numbers["auc_10"], numbers["failed_frames"]) == (100.0, 100.0, 0)
    wrong = score_clip(clip, left.true, 2)  # went left instead
    assert wrong.psnr_db < 25
    assert wrong.metrics.valid_frames < 5 or wrong.metrics.rot_deg > 3


def test_a_clip_of_which_only_the_given_frames_are_right_has_failed() -> None:
    clip = clips_in(FIRST_TEST_SEED + 1)[0]
    noise = torch.randint(0, 256, clip.true.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    score = score_clip(clip, torch.cat((clip.true[:2], noise[2:])), 2)
    assert score.metrics.valid_frames == 0
    assert math.isnan(score.metrics.rot_deg)
    assert score.pairs.hits(10) == 0


def test_videos_of_another_test_or_of_other_weights_are_generated_anew(tmp_path: Path) -> None:
    config, test = tiny_config(tmp_path / "row", "run.steps=1"), WorldTest(worlds=1, steps=1)
    train(config)
    file = generate_row(config, test, CPU)
    first, written = load_file(file), file.stat().st_mtime_ns
    train(config)  # a finished run is written out again, to the same bytes
    assert generate_row(config, test, CPU).stat().st_mtime_ns == written
    more = replace(test, worlds=2)
    assert len(load_file(generate_row(config, more, CPU))) == 6
    file.write_bytes(file.read_bytes()[:1000])  # a run that was stopped while it wrote
    again = load_file(generate_row(config, test, CPU))
    assert all(torch.equal(first[name], video) for name, video in again.items())
    trained = next((config.run.out / "trained" / "transformer").glob("*.safetensors"))
    save_file({name: weight + 0.1 for name, weight in load_file(trained).items()}, trained)
    other = load_file(generate_row(config, test, CPU))
    assert any(not torch.equal(first[name], video) for name, video in other.items())
    written = file.stat().st_mtime_ns
    wider = replace(config, data=replace(config.data, fov_deg=(80.0, 80.0)))  # the same weights tested on other clips
    assert generate_row(wider, test, CPU).stat().st_mtime_ns > written


def test_a_gpu_generates_in_the_precision_of_training_and_a_cpu_in_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, test = tiny_config(tmp_path / "row", "run.steps=1", "model.precision=bf16"), WorldTest(worlds=1, steps=1)
    assert sampled_precision(config, torch.device("cuda")) == "bf16"
    exact = replace(config, model=replace(config.model, precision="fp32"))
    assert sampled_precision(exact, torch.device("cuda")) == "fp32"
    train(config)
    file = generate_row(config, test, CPU)
    assert about_videos(file)["precision"] == "fp32"
    in_fp32 = load_file(file)
    unsaid = {name: value for name, value in about_videos(file).items() if name != "precision"}
    save_file(in_fp32, file, unsaid)  # what was generated before files said so
    written = file.stat().st_mtime_ns
    assert generate_row(config, test, CPU).stat().st_mtime_ns == written
    monkeypatch.setattr(generated, "sampled_precision", lambda *_: "bf16")
    in_bf16 = load_file(generate_row(config, test, CPU))
    assert about_videos(file)["precision"] == "bf16"
    name = f"world-{FIRST_TEST_SEED}-left"
    assert torch.equal(in_bf16[name][:2], in_fp32[name][:2])  # the prefix
    assert not torch.equal(in_bf16[name][2:], in_fp32[name][2:])
    assert (in_bf16[name].int() - in_fp32[name].int()).abs().float().mean() < 3


def test_a_model_is_shown_its_prefix_and_no_more_is_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = clips_in(FIRST_TEST_SEED)
    paths = WorldTest().paths(CLIPS, FIRST_TEST_SEED)
    for clip, short in zip(whole, clips_of_world(paths, CLIPS, FIRST_TEST_SEED, CPU, seen_frames=2), strict=True):
        assert (short.true.int() - clip.true[:2].int()).abs().max() <= 1  # frames are drawn together, or a few of them
        assert torch.equal(short.world.solids.present, clip.world.solids.present)
        assert short.cameras.count == CLIPS.frames
    config, seen = tiny_config(tmp_path / "row", "run.steps=1"), list[int]()
    train(config)
    monkeypatch.setattr(
        generated, "generate_clips", lambda pipe, commanded, *_: seen.extend(len(clip.true) for clip in commanded) or {}
    )
    generate_row(config, WorldTest(worlds=1, steps=1), CPU)
    assert seen == [config.objective.prefix_frames] * 3


def test_psnr_is_that_of_the_mean_square() -> None:
    true = torch.full((2, 4, 4, 3), 100, dtype=torch.uint8)
    off = true + torch.tensor([0, 10], dtype=torch.uint8)[:, None, None, None]
    assert psnr_db(off, true) == pytest.approx((60.0 + 20 * torch.log10(torch.tensor(25.5)).item()) / 2)


def test_psnr_in_integers_is_that_in_float64() -> None:
    one, other = torch.randint(256, (2, 3, 144, 256, 3), dtype=torch.uint8)
    one[0], other[0] = 255, 0  # the largest sum there is
    mean = (one.double() - other.double()).square().mean(dim=(1, 2, 3))
    torch.testing.assert_close(frame_psnr_db(one, other), 10.0 * torch.log10(255.0**2 / mean), rtol=1e-12, atol=0)


def test_a_stretched_test_has_the_same_rotations_and_longer_ways() -> None:
    once, twice = WorldTest().paths(CLIPS, 7), WorldTest(stretch=2.0).paths(CLIPS, 7)
    for manoeuvre in MANOEUVRES:
        assert torch.equal(once[manoeuvre][:, :3, :3], twice[manoeuvre][:, :3, :3])
        torch.testing.assert_close(2.0 * once[manoeuvre][:, :3, 3], twice[manoeuvre][:, :3, 3])
    path = driving_path(5, 4.0, torch.Generator().manual_seed(0), 2)
    path[:, :3, 3] += torch.tensor([1e6, 5.0, -3.0], dtype=torch.float64)
    assert torch.equal(stretched(path, 3.0)[0], path[0])
    assert torch.equal(stretched(path, 1.0), path)
    for factor in (0.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="stretch must be positive and finite"):
            WorldTest(stretch=factor)


def test_a_stretched_street_is_cleared_for_the_longer_way() -> None:
    original = clips_in(FIRST_TEST_SEED + 2, stretch=4.0)[0]
    near = original.seen.depth_m.flatten(1).min(dim=1).values
    assert (near > 0.9).all()  # nothing is nearer than the margin allows, houses on the way included


def test_the_floor_is_not_zero_by_construction_and_far_below_what_it_strays_by() -> None:
    clip = clips_in(FIRST_TEST_SEED + 1)[0]
    floor = score_floor(clip, 2).metrics
    assert floor.valid_frames == 5
    assert 1e-4 < floor.rot_deg < 0.5  # it strays by 2° and 3 %
    assert floor.metric_tr_percent is not None
    assert 1e-3 < floor.metric_tr_percent < 1.5


def test_the_floor_is_of_noisy_renders_that_stray_as_far_as_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    clip = clips_in(FIRST_TEST_SEED + 1)[0]
    floor, commanded = score_floor(clip, 2), clip.cameras.world_from_camera
    lengths_m = [path[:, :3, 3].diff(dim=0).norm(dim=-1).sum() for path in (floor.recovered, commanded)]
    assert float(lengths_m[0] / lengths_m[1]) == pytest.approx(1.03, abs=0.01)
    turn_deg = [math.degrees(torch.atan2(path[-1, 0, 2], path[-1, 2, 2])) for path in (floor.recovered, commanded)]
    assert turn_deg[0] - turn_deg[1] == pytest.approx(2.0, abs=0.5)
    monkeypatch.setattr("merope.evaluate.world_scores.FLOOR_NOISE", 0.0)
    assert score_floor(clip, 2).psnr_db > floor.psnr_db


def test_a_street_is_cleared_for_all_three_paths() -> None:
    struck = 0
    for seed in range(FIRST_TEST_SEED, FIRST_TEST_SEED + 8):
        clips = clips_in(seed)
        for clip in clips:
            cleared = clip.world.cleared(clip.cameras.world_from_camera).solids.present
            assert torch.equal(cleared, clip.world.solids.present)
        alone = World(seed, CPU).cleared(clips[0].cameras.world_from_camera).solids.present
        struck += int((alone & ~clips[0].world.solids.present).sum())
    assert struck > 0  # what stands in the way of a turn only


def test_the_three_clips_of_a_world_start_from_one_noise_and_worlds_from_others() -> None:
    test, given = WorldTest(worlds=2), list[torch.Generator]()

    class Pipeline:
        transformer = SimpleNamespace(device=CPU)
        causal_block_frames = None

        def set_progress_bar_config(self, **_: object) -> None: ...

        def __call__(
            self, *, prefix: torch.Tensor, generator: list[torch.Generator], **_: object
        ) -> list[torch.Tensor]:
            given.extend(generator)
            return [torch.zeros(len(prefix), CLIPS.frames, 3, CLIPS.height, CLIPS.width)]

    generate_clips(cast(CameraVideoPipeline, Pipeline()), commanded_clips(test, CLIPS, CPU), test, 2, cameras=True)
    seeds = [generator.initial_seed() for generator in given]
    assert seeds[:3] == [seeds[0]] * 3
    assert seeds[3:] == [seeds[3]] * 3
    assert seeds[0] != seeds[3]


def test_lenses_are_told_apart_and_grouped() -> None:
    kinds = {(70, 0.0): "pinhole-like", (80, 1.2): "pinhole-like", (100, 1.0): "wide", (140, 0.1): "wide"}
    for (fov_deg, xi), kind in (kinds | {(140, 1.0): "fisheye", (260, 1.0): "fisheye"}).items():
        assert lens_kind(UnifiedCamera.from_fov(fov_deg, xi, 128, 72)) == kind
    mixed = replace(CLIPS, fov_deg=(60.0, 150.0), xi=(0.0, 1.5))
    clip = clips_of_world(WorldTest(worlds=1).paths(mixed, FIRST_TEST_SEED), mixed, FIRST_TEST_SEED, CPU)[0]
    groups = summaries([replace(score_clip(clip, clip.true, 2), manoeuvre=name) for name in MANOEUVRES], mixed)
    assert set(groups) == {"all", *MANOEUVRES, lens_kind(clip.cameras.lens)}
    assert groups["all"]["clips"] == 3
    assert groups["all"]["psnr_db"] == pytest.approx(60.0)
    assert groups["left"]["clips"] == 1


def test_a_sweep_has_half_of_the_worlds_and_no_stretch_twice() -> None:
    assert benchmark_tests(32) == [WorldTest(32)]
    assert benchmark_tests(5, [4.0, 1.0, 2.0, 4.0]) == [
        WorldTest(5),
        WorldTest(3, stretch=2.0),
        WorldTest(3, stretch=4.0),
    ]

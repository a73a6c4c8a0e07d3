"""Tables of the world benchmark: intervals, verdicts, and what is open."""

import argparse
import json
import math
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merope.bench.comparisons import verdict
from merope.bench.groups import BENCHMARKS
from merope.bench.intervals import RESAMPLES, Grid, difference, interval
from merope.bench.measured_rows import Row
from merope.bench.table import read_rows, tables
from merope.cli import main
from merope.commands.bench import add_bench
from merope.world.commanded import FIRST_TEST_SEED
from tests.bench.made_up_results import write_result

ROOT = Path(__file__).parents[2]


def made_up_grid(seeds: int, worlds: int, dice: int, spread: float = 1.0) -> Grid:
    values = np.random.default_rng(dice).normal(5.0, spread, (seeds, worlds, 3))
    return Grid(tuple(range(seeds)), values)


@settings(max_examples=20, deadline=None)
@given(seeds=st.integers(1, 4), worlds=st.integers(2, 9), dice=st.integers(0, 99))
def test_an_interval_holds_its_mean_and_is_always_the_same(seeds: int, worlds: int, dice: int) -> None:
    of = made_up_grid(seeds, worlds, dice)
    found = interval(of)
    assert found.mean == pytest.approx(of.values.mean())
    assert found.low <= found.mean + 1e-12
    assert found.mean - 1e-12 <= found.high
    assert found.count == of.values.size
    assert interval(Grid(of.seeds, of.values.copy())) == found
    scaled = interval(Grid(of.seeds, 3.0 * of.values))
    assert scaled.low == pytest.approx(3.0 * found.low)


def test_a_floor_that_could_not_be_measured_is_a_dash(tmp_path: Path) -> None:
    """Frames may be too small for any pose to be found, of true renders, too."""
    result = deepcopy(write_result(tmp_path, "tiny", 0, 1.0, stretches=(1.0, 2.0)))
    for part in (result, *result["sweep"]):
        for value in part["rows"]["floor"]["all"]["values"].values():
            value["mean"] = None
    (tmp_path / "tiny-seed0.json").write_text(json.dumps(result))
    text = tables(read_rows(tmp_path))
    assert "rot –°, metric tr – %, CamMC –, " in text
    swept = next(line for line in text.splitlines() if line.startswith("| tiny | ×2"))
    assert "| – |" in swept


def test_an_interval_is_as_wide_as_theory_says() -> None:
    many = made_up_grid(1, 400, dice=1)
    found = interval(many)
    error = many.values.mean(axis=-1).std(ddof=1) / math.sqrt(400)
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.08)
    assert RESAMPLES >= 2000


def test_worlds_are_resampled_with_all_of_their_manoeuvres() -> None:
    worlds = np.random.default_rng(2).normal(size=(1, 100, 1))
    together = interval(Grid((0,), np.repeat(worlds, 3, axis=-1)))
    alone = interval(Grid((0,), worlds))
    assert together.high - together.low == pytest.approx(alone.high - alone.low)  # three clips of a world are one draw


def test_seeds_that_differ_widen_the_interval() -> None:
    one = made_up_grid(1, 32, dice=3, spread=0.1)
    apart = np.concatenate((one.values, one.values + 4.0))
    wide, narrow = interval(Grid((0, 1), apart)), interval(one)
    assert wide.high - wide.low > 3.9
    assert narrow.high - narrow.low < 0.1


def test_draws_of_seeds_and_worlds_are_independent() -> None:
    """With as many seeds as worlds the same draws for both would make the diagonal count too often."""
    diagonal = np.repeat(np.eye(16)[..., None], 3, axis=-1)
    found = interval(Grid(tuple(range(16)), diagonal))
    assert found.low < 1 / 16 < found.high
    assert found.high < 0.125  # 0.125 and more if both are drawn alike: the mean of a count's square is 2


def test_clips_without_a_number_are_left_out_of_both_rows_of_a_difference() -> None:
    row, other = made_up_grid(2, 20, dice=4), made_up_grid(2, 20, dice=5)
    other.values[0, 3, 1] = math.nan
    row.values[1, 7, 2] = math.nan
    found = difference(row, other)
    both = row.values - other.values
    assert found is not None
    assert found.mean == pytest.approx(np.nanmean(both))
    assert found.count == 2 * 20 * 3 - 2
    nothing = interval(Grid((0,), np.full((1, 5, 3), math.nan)))
    assert math.isnan(nothing.mean)
    assert math.isnan(nothing.low)


def test_numbers_of_a_single_world_have_no_interval_and_no_verdict() -> None:
    values = np.full((2, 32, 3), math.nan)
    values[1, 4] = 5.0
    found = interval(Grid((0, 1), values))
    assert (found.mean, found.count) == (5.0, 3)
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert verdict(found) == "not separated"
    values[1, 5] = 7.0
    assert interval(Grid((0, 1), values)).low == 5.0


def test_a_difference_is_of_common_seeds_and_pairs_worlds() -> None:
    difficulty = np.random.default_rng(6).uniform(0, 100, (1, 32, 1))
    row = Grid((0, 1, 5), np.broadcast_to(difficulty + 0.5, (3, 32, 3)).copy())
    other = Grid((1, 5, 8), np.broadcast_to(difficulty, (3, 32, 3)).copy())
    row.values[0] += 1000.0  # seed 0, which the other does not have
    found = difference(row, other)
    assert found is not None
    assert (found.low, found.mean, found.high) == pytest.approx((0.5, 0.5, 0.5))
    assert found.count == 2 * 32 * 3
    assert difference(row, Grid((9,), other.values[:1])) is None


def line_of(text: str, row: str) -> str:
    return next(line for line in text.splitlines() if line.replace("*", "").startswith(f"| {row} |"))


def sweep_of(text: str) -> str:
    return text.partition("### Beyond the training scale")[2].partition("###")[0]


def test_tables_compare_with_merope_and_say_what_is_open(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_result(tmp_path, "merope", seed, 2.0, stretches=(1.0, 2.0))
        write_result(tmp_path, "gta", seed, 3.0)
        write_result(tmp_path, "ucpe", seed, 2.0)
        write_result(tmp_path, "transport", seed, 1.0)
        write_result(tmp_path, "my-own", seed, 2.5)
    write_result(tmp_path, "prope", 0, 3.0)
    write_result(tmp_path, "urope", 7, 3.0)
    write_result(tmp_path, "none", 0, 9.0, steps=50)
    write_result(tmp_path, "rerope", 0, 3.0, data={"fov_deg": [60.0, 150.0]})
    text = tables(read_rows(tmp_path))
    for row, cammc, others in (("gta", "higher", "lower"), ("transport", "lower", "higher")):
        *_, first, second, third, _ = line_of(text, row).split(" |")
        assert first.endswith(f": {cammc} than merope")
        assert second.endswith(f": {others} than merope")  # AUC
        assert third.endswith(f": {others} than merope")  # PSNR
    assert line_of(text, "ucpe").count(": not separated |") == 3
    assert "| 0.1500 |" in line_of(text, "gta")
    assert line_of(text, "prope").startswith("| prope | one | 3,000 |")
    assert line_of(text, "urope").endswith("| no common seed | no common seed | no common seed |")
    assert line_of(text, "none").endswith("| another test | another test | another test |")
    assert line_of(text, "rerope").endswith("| another test | another test | another test |")
    assert line_of(text, "merope").endswith("| 48/48 | 4/624 | – | – | – |")
    assert "### Other rows" in text
    assert line_of(text, "my-own")
    assert "Open: raynova, rayrope, cameractrl." in text
    assert "Open: mixed-lenses-gta, mixed-lenses-prope, mixed-lenses-ucpe, mixed-lenses-raynova, " in text
    assert "24 clips of 8 unseen worlds" in text
    assert "rot 0.125°" in text
    sweep = sweep_of(text)
    assert "| **merope** | ×1 | 2 | 8 |" in sweep
    assert "| **merope** | ×2 | 2 | 8 |" in sweep
    assert "gta" not in sweep
    assert tables(read_rows(tmp_path)) == text
    assert "CamMC − ucpe" in tables(read_rows(tmp_path), against="ucpe")


def test_clips_without_errors_are_counted_and_nothing_is_said_where_there_is_none(tmp_path: Path) -> None:
    write_result(tmp_path, "merope", 0, 2.0)
    result = write_result(tmp_path, "gta", 0, 3.0)
    for clip in list(result["clips"].values())[1:]:
        clip["cammc"] = None
    write_result(tmp_path, "gta", 0, 3.0, clips=result["clips"])
    for clip in result["clips"].values():
        clip["cammc"] = None
    write_result(tmp_path, "ucpe", 0, 3.0, clips=result["clips"])
    text = tables(read_rows(tmp_path))
    assert "| 1/24 |" in line_of(text, "gta")
    assert "| 0/24 |" in line_of(text, "ucpe")
    assert line_of(text, "ucpe").split(" | ")[-3] == "no common clip"


def test_a_sweep_compares_at_every_stretch_and_with_the_seeds_that_have_it(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_result(tmp_path, "merope", seed, 2.0, stretches=(1.0, 2.0, 4.0)[: 3 - seed])
        write_result(tmp_path, "gta", seed, 2.5, stretches=(1.0, 2.0, 8.0)[: 3 - seed])
    write_result(tmp_path, "ucpe", 0, 2.0, stretches=(1.0, 2.0), validation_loss=None)
    text = tables(read_rows(tmp_path))
    assert "| ucpe | one | 3,000 | – |" in text
    sweep = sweep_of(text)
    lines = {tuple(line.replace("*", "").split(" | ")[:3]): line for line in sweep.splitlines()}
    assert lines["| gta", "×2", "2"].count(": lower than merope") == 2
    assert lines["| gta", "×8", "1"].endswith("| another test | another test |")
    assert lines["| merope", "×4", "1"].endswith("| – | – |")
    assert lines["| ucpe", "×2", "1"].count("not separated") == 2
    part = write_result(tmp_path, "ucpe", 0, 2.0, stretches=(1.0, 2.0), worlds=5)["sweep"]
    write_result(tmp_path, "ucpe", 0, 2.0, sweep=part)  # its sweep is of fewer worlds
    sweep = sweep_of(tables(read_rows(tmp_path)))
    assert next(line for line in sweep.splitlines() if line.startswith("| ucpe | ×2")).count("another test") == 2
    write_result(tmp_path, "ucpe", 1, 2.0, stretches=(1.0, 2.0))
    with pytest.raises(ValueError, match="test ×2 of ucpe must be the same for all seeds"):
        read_rows(tmp_path)


def test_numbers_of_a_row_are_means_over_its_clips_and_seeds(tmp_path: Path) -> None:
    results = [write_result(tmp_path, "merope", seed, 2.0) for seed in (0, 1)]
    row = read_rows(tmp_path)["merope"]
    mean = np.mean([clip["cammc"] for result in results for clip in result["clips"].values()])
    assert interval(row.grid("cammc")).mean == pytest.approx(mean)
    assert row.lost() == "4/624"
    assert f" {mean:.2f} [" in line_of(tables({"merope": row}), "merope")


def test_mixed_lenses_get_a_table_by_lens(tmp_path: Path) -> None:
    result = write_result(tmp_path, "mixed-lenses-merope", 0, 2.0)
    for clip in result["clips"].values():
        clip["lens"] = "fisheye" if clip["world"] % 2 else "wide"
        clip["cammc"] = 7.0 if clip["world"] % 2 else 1.0
    text = tables({"mixed-lenses-merope": Row("mixed-lenses-merope", {0: result})})
    by_lens = text.split("### By lens")[1]
    assert "| mixed-lenses-merope | fisheye | 4 |" in by_lens
    assert "7.00 [7.00, 7.00]" in by_lens
    assert "1.00 [1.00, 1.00]" in by_lens


def test_seeds_of_a_row_must_be_of_one_test(tmp_path: Path) -> None:
    write_result(tmp_path, "gta", 0, 2.0)
    write_result(tmp_path, "gta", 1, 2.0, steps=50)
    with pytest.raises(ValueError, match="steps of gta must be the same for all seeds"):
        read_rows(tmp_path)
    with pytest.raises(ValueError, match="a folder with results of rows"):
        read_rows(tmp_path / "nothing")


def without(*keys: str) -> Callable[[dict[str, Any]], str]:
    def damaged(result: dict[str, Any]) -> str:
        place = result
        for key in keys[:-1]:
            place = place[key]
        del place[keys[-1]]
        return json.dumps(result)

    return damaged


@pytest.mark.parametrize(
    "damage",
    [
        lambda result: "",
        lambda result: "[1, 2]",
        lambda result: "[" * 100_000,
        lambda result: json.dumps(result)[:200],
        lambda result: json.dumps(result | {"sweep": 3}),
        lambda result: json.dumps(result | {"clips": {"a": {}}}),
        lambda result: json.dumps(result | {"validation_loss": "low"}),
        lambda result: json.dumps(result | {"trained_s": "long"}),
        *(without(key) for key in ("row", "seed", "steps", "data", "sweep", "test", "clips", "validation_loss")),
        without("test", "worlds"),
        without("rows", "floor"),
        without("clips", "world-3-left"),
    ],
)
def test_a_damaged_file_is_named(
    tmp_path: Path, damage: Callable[[dict[str, Any]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_result(tmp_path, "merope", 0, 2.0)
    text = damage(write_result(tmp_path, "gta", 0, 2.0, stretches=(1.0, 2.0)))
    (tmp_path / "gta-seed0.json").write_text(text)
    assert main(["bench", "table", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "gta-seed0.json must be results of merope bench world" in message
    assert "Error" in message


@pytest.mark.parametrize(("what", "of_old_files", "other"), [("vae", "", "another"), ("trainable", "all", "branch")])
def test_rows_of_another_vae_or_of_other_trained_weights_are_not_compared(
    tmp_path: Path, what: str, of_old_files: str, other: str
) -> None:
    for row, said in (("merope", {}), ("gta", {what: of_old_files}), ("ucpe", {what: other})):
        write_result(tmp_path, row, 0, 1.0, **said)
    rows = read_rows(tmp_path)
    assert rows["gta"].is_comparable(rows["merope"])
    assert not rows["ucpe"].is_comparable(rows["merope"])
    write_result(tmp_path, "ucpe", 1, 1.0)
    with pytest.raises(ValueError, match=f"{what} of ucpe must be the same for all seeds"):
        read_rows(tmp_path)


def test_rows_of_another_start_are_compared_among_themselves(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_result(tmp_path, "merope", seed, 2.0)
        write_result(tmp_path, "after-none-gta", seed, 3.0, pretrained=f"none-seed{seed}/trained")
    alone = tables(read_rows(tmp_path)).partition("### Added to a trained model")[2].partition("###")[0]
    assert "another test" in alone
    for seed in (0, 1):
        write_result(tmp_path, "after-none-merope", seed, 1.0, pretrained=f"none-seed{seed}/trained")
    together = tables(read_rows(tmp_path)).partition("### Added to a trained model")[2].partition("###")[0]
    assert "CamMC − after-none-merope" in together
    assert "| **after-none-merope** |" in together
    assert ": higher than after-none-merope" in together


@pytest.mark.parametrize(("benchmark", "others"), [("world", set()), ("miniature", {"base"})])
def test_the_list_of_rows_is_that_of_the_configs(benchmark: str, others: set[str]) -> None:
    listed = [row for rows in BENCHMARKS[benchmark].values() for row in rows]
    assert len(set(listed)) == len(listed)
    assert set(listed) == {file.stem for file in (ROOT / "configs" / benchmark).glob("*.toml")} - others


def test_what_colmap_says_has_columns_where_it_was_asked(tmp_path: Path) -> None:
    for name in ("merope", "gta"):
        result = write_result(tmp_path, name, 0, 1.0)
        for clip in result["clips"].values():
            if clip["world"] < FIRST_TEST_SEED + 2:
                clip |= {"colmap_percent": 75.0, "colmap_rot_deg": None, "colmap_tr_percent": None}
        result["rows"]["floor"]["all"] |= {"colmap_percent": 99.5}
        (tmp_path / f"{name}-seed0.json").write_text(json.dumps(result))
    text = tables(read_rows(tmp_path), groups=BENCHMARKS["miniature"])
    assert "COLMAP is given the clips of 2 worlds; of true frames it registers 99.5 %." in text
    assert "| COLMAP registers % | COLMAP rot ° | measured clips |" in text
    assert "| 75.00 [75.00, 75.00] | – |" in text
    write_result(tmp_path, "gta", 0, 1.0)
    assert "COLMAP registers % |" not in tables(read_rows(tmp_path)).partition("Mixed lenses")[0]


def test_the_command_prints_or_writes_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_result(tmp_path / "results", "merope", 0, 2.0)
    parser = argparse.ArgumentParser()
    add_bench(parser)
    options = parser.parse_args(["table", str(tmp_path / "results")])
    assert options.run(options) == 0
    assert "**merope**" in capsys.readouterr().out
    out = tmp_path / "page.md"
    options = parser.parse_args(["table", str(tmp_path / "results"), "--out", str(out)])
    assert options.run(options) == 0
    assert "**merope**" in out.read_text()


def test_a_row_to_compare_with_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_result(tmp_path, "gta", 0, 2.0)
    parser = argparse.ArgumentParser()
    add_bench(parser)
    options = parser.parse_args(["table", str(tmp_path), "--against", "raynvoa"])
    with pytest.raises(ValueError, match=r"--against must be a row .* got 'raynvoa'; it has gta"):
        options.run(options)
    options = parser.parse_args(["table", str(tmp_path)])  # no MeRoPE to compare with, and nobody asked for one
    assert options.run(options) == 0
    assert "gta" in capsys.readouterr().out

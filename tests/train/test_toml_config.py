"""Config files: every key known, every value of its type, refusals that name the key."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
from scenes import random_poses

from merope import Cameras, Pinhole, UnifiedCamera
from merope.adapters.branch_config import make_carved_encoding, make_encoding
from merope.adapters.told_ways import FEATURES, make_features
from merope.cli import main
from merope.datasets.cache import CachedData
from merope.train.build import world_clips
from merope.train.config import ModelSection, TrainConfig
from merope.train.toml_config import build, merged, read_config, read_table

CONFIGS = Path(__file__).parents[2] / "configs"
OF_VAES = ("miniature-vae.toml", "miniature-vae-judged.toml", "tiny-vae.toml")
OF_TRANSFORMERS = sorted(file for file in CONFIGS.rglob("*.toml") if file.name not in OF_VAES)


@dataclass(frozen=True)
class Inner:
    rate: float
    pair: tuple[int, int] = (1, 2)
    name: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Square:
    kind: Literal["square"]
    side: int


@dataclass(frozen=True)
class Disc:
    kind: Literal["disc"]
    radius: float


@dataclass(frozen=True)
class Outer:
    inner: Inner
    shape: Square | Disc
    places: Literal["all"] | list[int] | tuple[int, ...] = "all"
    file: Path | None = None


GOOD = {"inner": {"rate": 1}, "shape": {"kind": "disc", "radius": 2}}


def test_tables_become_dataclasses() -> None:
    config = build(Outer, GOOD | {"places": [3, 4], "file": "~/x", "inner": {"rate": 1, "pair": [5, 6]}})
    assert config == Outer(Inner(1.0, (5, 6)), Disc("disc", 2.0), [3, 4], Path("~/x").expanduser())
    assert isinstance(config.inner.rate, float)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inner": {"rate": 1, "pairs": [1, 2]}}, ["inner.pairs", "did you mean 'pair'"]),
        ({"inner": {"rate": "fast"}}, ["inner.rate", "float", "'fast'"]),
        ({"inner": {"rate": True}}, ["inner.rate", "bool"]),
        ({"inner": {}}, ["inner.rate", "none"]),
        ({"inner": {"rate": 1, "name": "c"}}, ["inner.name", "'a', 'b'"]),
        ({"inner": {"rate": 1, "pair": [1]}}, ["inner.pair", "2 values"]),
        ({"inner": {"rate": 1, "pair": [1, 2.5]}}, ["inner.pair[1]", "2.5"]),
        ({"shape": {"kind": "cube"}}, ["shape.kind", "square, disc"]),
        ({"shape": {"kind": "square", "side": 1.5}}, ["shape.side", "int"]),
        ({"places": "some"}, ["places", "'all'"]),
        ({"places": 3}, ["places", "3"]),
        ({"other": 1}, ["other"]),
    ],
)
def test_refusals_name_the_key(change: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError, match="config key") as error:
        build(Outer, GOOD | change)
    assert all(word in str(error.value) for word in words), error.value


def test_a_file_lies_over_its_base(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "base.toml").write_text("[inner]\nrate = 1\npair = [7, 8]\n[shape]\nkind = 'square'\nside = 3\n")
    (tmp_path / "deep" / "middle.toml").write_text("base = '../base.toml'\n[inner]\nrate = 2\n")
    (tmp_path / "top.toml").write_text("base = 'deep/middle.toml'\nplaces = [1]\n")
    config = read_config(Outer, tmp_path / "top.toml", ["inner.name=b", "shape.side=4"])
    assert config == Outer(Inner(2.0, (7, 8), "b"), Square("square", 4), [1])


def test_a_base_may_be_one_in_the_package(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("base = 'tiny'\n[run]\nsteps = 7\n")
    shipped, mine = read_table(Path("tiny")), read_table(tmp_path / "mine.toml")
    assert mine == shipped | {"run": shipped["run"] | {"steps": 7}}
    (tmp_path / "tiny").write_text("[run]\nsteps = 8\n")  # a file beside it comes first
    assert read_table(tmp_path / "mine.toml") == {"run": {"steps": 7}}
    (tmp_path / "wrong.toml").write_text("base = 'tinny'\n")
    with pytest.raises(ValueError, match=r"got tinny; did you mean .*tiny"):
        read_table(tmp_path / "wrong.toml")


def test_a_base_that_is_its_own_base_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("base = 'b.toml'")
    (tmp_path / "b.toml").write_text("base = 'a.toml'")
    with pytest.raises(ValueError, match=r"a\.toml → b\.toml → a\.toml"):
        read_table(tmp_path / "a.toml")


def test_a_table_of_another_kind_takes_nothing_from_its_base(tmp_path: Path) -> None:
    """Rows of the paper from a cache: a file over theirs, or changes in any order."""
    base = CONFIGS / "nuscenes" / "ucpe.toml"
    (tmp_path / "cached.toml").write_text(f"base = '{base}'\n[data]\nkind = 'cache'\nroot = 'a'\nclusters = 'b'\n")
    data = CachedData("cache", Path("a"), clusters=Path("b"))
    assert read_config(TrainConfig, tmp_path / "cached.toml").data == data
    assert read_config(TrainConfig, base, ["data.root=a", "data.kind=cache", "data.clusters=b"]).data == data
    assert read_config(TrainConfig, base, ["data.kind=mixture"]).data == read_config(TrainConfig, base).data


def test_merging_leaves_the_parts_alone() -> None:
    base = {"a": {"b": 1, "c": 2}}
    assert merged(base, {"a": {"c": 3}}) == {"a": {"b": 1, "c": 3}}
    assert base == {"a": {"b": 1, "c": 2}}


@pytest.mark.parametrize(
    "change",
    ["run.steps", "run.steps=", "= 3", "run.steps=" + "[" * 100_000],
    ids=["no value", "empty", "no key", "nested"],
)
def test_bad_changes_are_refused(change: str) -> None:
    with pytest.raises(ValueError, match=r"--set|config key"):
        read_config(TrainConfig, CONFIGS / "tiny.toml", [change])


def test_broken_and_missing_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("steps = = 3")
    (tmp_path / "nested.toml").write_text("steps = " + "[" * 100_000)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for name in ("broken.toml", "missing.toml", "nested.toml", "binary.toml"):
        with pytest.raises(ValueError, match=name):
            read_config(TrainConfig, tmp_path / name)


@pytest.mark.parametrize("file", OF_TRANSFORMERS, ids=lambda file: str(file.relative_to(CONFIGS)))
def test_every_shipped_config_is_valid(file: Path) -> None:
    config = read_config(TrainConfig, file)
    assert config.run.steps > 0


@pytest.mark.parametrize("file", OF_TRANSFORMERS, ids=lambda file: str(file.relative_to(CONFIGS)))
def test_every_shipped_config_takes_the_lenses_of_its_data(file: Path) -> None:
    config = read_config(TrainConfig, file)
    branch = config.branch
    if branch == "none":
        return
    pinhole = Pinhole(400, 400, 256, 144, 512, 288)  # also of what World Engine renders
    lenses = {"panshot": UnifiedCamera.from_fov(200.0, 2.3, 832, 480), "nuscenes": pinhole, "mixture": pinhole}
    world = world_clips(config).cameras([0]) if config.data.kind == "world" else None
    cameras = world or Cameras(random_poses(1, 3), lenses[config.data.kind])
    options, scale = branch.encoding_options, branch.translation_scale
    if branch.encoding in FEATURES:
        assert make_features(branch.encoding, options, scale).features(cameras, (2, 3)).isfinite().all()
        return
    make = make_carved_encoding if branch.integration == "rerope" else make_encoding
    channels = 96 if branch.integration == "rerope" else sum(options.get("partition", (128,)))
    encoding = make(branch.encoding, channels, options, scale)
    content = torch.zeros(1, 6 * cameras.count, encoding.content_channels) if encoding.content_channels else None
    plan = encoding.plan(cameras, (2, 3), content=content)
    assert plan.operator(0, plan.key_tokens - 1).isfinite().all()


def test_a_model_has_weights_or_sizes() -> None:
    with pytest.raises(ValueError, match="model must be pretrained or architecture, got neither"):
        ModelSection()


@pytest.mark.parametrize(
    "change",
    [
        "run.steps=0",
        "data.noise_draws=0",
        "run.micro_batch=3",
        "objective.text_dropout=1.5",
        "objective.shift=0.0",
        "optimiser.learning_rate=nan",
        "optimiser.ema_decay=1.0",
        "branch.compression=0",
        "branch.encoding=meropee",
        "parallel.context=0",
    ],
)
def test_values_that_cannot_train_are_refused(change: str) -> None:
    key = change.partition("=")[0].rpartition(".")[2]
    with pytest.raises(ValueError, match=key):
        read_config(TrainConfig, CONFIGS / "tiny.toml", [change])


def test_a_model_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    table = {"run": {"out": "~/out"}, "model": {"pretrained": "~/wan"}, "data": {"kind": "world"}, "branch": {}}
    config = build(TrainConfig, table)
    assert config.run.out == Path("/home/someone/out")
    assert config.model.pretrained == "/home/someone/wan"
    table["model"] = {"pretrained": "Wan-AI/Wan2.2-TI2V-5B-Diffusers"}
    assert build(TrainConfig, table).model.pretrained == "Wan-AI/Wan2.2-TI2V-5B-Diffusers"


OFF = ("false", "False", " False ")
NOT_OFF = ("no", "off", "0", '"false"', '"False"', "FALSE")


@pytest.mark.parametrize("key", ["branch.encoding_options.disparity", "branch.encoding_options.transform_values"])
def test_an_ablation_is_made_or_refused(key: str) -> None:
    """A string is true to Python: the component would stay on without a word."""
    option = key.split(".")[-1]
    for value in OFF:
        branch = read_config(TrainConfig, CONFIGS / "tiny.toml", [f"{key}={value}"]).branch
        assert branch != "none"
        assert branch.encoding_options[option] is False
    for value in NOT_OFF:
        with pytest.raises(ValueError, match=rf"encoding_options\.{option} must be bool, got .*; write true or false"):
            read_config(TrainConfig, CONFIGS / "tiny.toml", [f"{key}={value}"])


def test_booleans_of_a_config_are_spelled_in_two_ways_and_no_other() -> None:
    for value in OFF:
        assert not read_config(TrainConfig, CONFIGS / "tiny.toml", [f"model.compile={value}"]).model.compile
    for value in NOT_OFF:
        with pytest.raises(ValueError, match=r"model\.compile must be bool, got .*; write true or false"):
            read_config(TrainConfig, CONFIGS / "tiny.toml", [f"model.compile={value}"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("run.steps=True", ["run.steps must be int", "True (bool)"]),
        ("run.out=False", ["run.out must be Path", "False (bool)", "put it in quotes"]),
        ("optimiser.learning_rate=True", ["optimiser.learning_rate must be float", "True (bool)"]),
        ("branch.encoding_options.direction_scale=True", ["direction_scale must be float or none", "True (bool)"]),
        ("branch.encoding_options.frequencies=1.5", ["frequencies must be int or none", "1.5 (float)"]),
        ("branch.encoding_options.wavelengths_m=[1.0]", ["wavelengths_m must be tuple[float, float]", "[1.0] (list)"]),
        ("branch.encoding_options.fractions=[0, true]", ["fractions must be tuple[float, ...]"]),
        ("branch.encoding_options.anchor_frame=min", ["anchor_frame must be 'minrot' or 'transport', got 'min'"]),
    ],
)
def test_values_of_another_type_are_refused(change: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match="must be") as error:
        read_config(TrainConfig, CONFIGS / "tiny.toml", [change])
    assert [word for word in words if word not in str(error.value)] == []


def test_lists_and_whole_numbers_do_for_tuples_and_floats() -> None:
    options = "branch.encoding_options={wavelengths_m=[1, 20], fractions=[0, 0.5, 1], frequencies=2, native_base=100}"
    assert read_config(TrainConfig, CONFIGS / "tiny.toml", [options]).branch != "none"


@pytest.mark.parametrize("name", ["nuscenes/ucpe", "configs/nuscenes/ucpe.toml", "nuscenes/ucpe.toml"])
def test_configs_of_the_package_are_found_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    by_path = read_config(TrainConfig, CONFIGS / "nuscenes" / "ucpe.toml")
    monkeypatch.chdir(tmp_path)
    assert read_config(TrainConfig, Path(name)) == by_path
    assert main(["train", "nuscenes/ucp"]) == 2
    assert "did you mean nuscenes/ucpe" in capsys.readouterr().err
    assert main(["train", "--list"]) == 0
    assert "nuscenes/ucpe " in capsys.readouterr().out
    assert main(["train"]) == 2
    assert "`merope train --list` shows the names" in capsys.readouterr().err


def test_a_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(f"base = '{CONFIGS / 'tiny.toml'}'\n[run]\nsteps = 7\n")
    assert read_config(TrainConfig, Path("tiny.toml")).run.steps == 7
    assert read_config(TrainConfig, Path("tiny")).run.steps == 60


@pytest.mark.parametrize("base", ["5", "['a']", "true"])
def test_a_base_that_is_no_path_is_refused(tmp_path: Path, base: str) -> None:
    (tmp_path / "mine.toml").write_text(f"base = {base}\n")
    with pytest.raises(ValueError, match=r"base of .*mine\.toml must be the path of a TOML file, got .*in quotes"):
        read_table(tmp_path / "mine.toml")

"""Kinds of training data: each opens its own clips, a new one is a file and an entry, and missing files are named."""

import json
import pickle
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from merope.cli import main
from merope.datasets.data_kind import FrameData
from merope.datasets.kinds import DATA_KINDS
from merope.datasets.openscene import OpenSceneData
from merope.formats.video import write_image
from merope.train.config import TrainConfig
from merope.train.loop import train
from merope.train.toml_config import read_config
from tests.datasets.coloured_clips import ColouredData
from tests.datasets.test_panshot_openscene import infos
from tests.train.tiny_runs import TINY, tiny_config

SIZE = "frames = 4\nheight = 16\nwidth = 24\nworkers = 0\n"


def data_config(out: Path, data: str, *changes: str) -> TrainConfig:
    """The tiny run with another section [data]."""
    text = TINY.read_text()
    start, end = text.index("[data]"), text.index("[objective]")
    file = out / "config.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text[:start]}[data]\n{data}{SIZE}\n{text[end:]}")
    tiny = tiny_config(out)
    smaller = ["model.architecture.num_attention_heads=1", "model.architecture.attention_head_dim=48"]
    partition = "branch.encoding_options={partition=[12,12,12,12], native_split=[4,4,4], fractions=[0.0,1.0]}"
    run = [f"run.out={tiny.run.out}", "run.steps=2", "run.micro_batch=1", "run.validate_every=2"]
    return read_config(TrainConfig, file, [*smaller, "branch.compression=1", partition, *run, *changes])


def test_a_kind_that_does_not_open_its_clips_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match=r"training_clips.*validation_clips"):
        FrameData(kind="unfinished")  # type: ignore[abstract]


def test_a_new_data_set_is_one_file_and_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATA_KINDS, "coloured", ColouredData)
    data = 'kind = "coloured"\ncolours = [10, 90, 170]\nvalidation_colours = [40, 80, 120, 160]\n'
    train(data_config(tmp_path, data))
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert rows[1]["validation_loss"] > 0
    with pytest.raises(ValueError, match=r"data\.clusters must be a file or folder that exists, got nowhere"):
        train(data_config(tmp_path / "other", f'{data}clusters = "nowhere"\n'))
    with pytest.raises(
        ValueError, match=r'data\.kind with \[history\] must be "world" or "nuscenes" or "mixture", got \'coloured\''
    ):
        data_config(tmp_path, data, "branch.history=sa", "history.frames=2")


def test_a_kind_that_nobody_registered_is_refused(tmp_path: Path) -> None:
    for kind in ('"coloured"', "[1]", "3"):
        with pytest.raises(ValueError, match=r"data\.kind must be one of world, nuscenes, videos, panshot, openscene"):
            data_config(tmp_path, f"kind = {kind}\n")


@pytest.mark.parametrize("name", DATA_KINDS)
def test_kinds_are_registered_under_their_own_name(name: str) -> None:
    kind = DATA_KINDS[name]
    assert get_args(get_type_hints(kind)["kind"]) == (name,)
    assert fields(kind)[0].name == "kind"


def write_openscene(root: Path) -> None:
    for log in ("a", "b"):
        frames = infos(5, [])
        for frame in frames:
            frame["cams"]["CAM_F0"]["data_path"] = f"{log}/{frame['cams']['CAM_F0']['data_path']}"
        for index in range(5):
            image = torch.full((27, 48, 3), 40 * index, dtype=torch.uint8)
            write_image(image, root / f"{log}/CAM_F0/{index}.png")
        (root / "meta").mkdir(exist_ok=True)
        (root / "meta" / f"{log}.pkl").write_bytes(pickle.dumps(frames))


def test_openscene_is_trained_on_where_its_pickles_are_trusted(tmp_path: Path) -> None:
    write_openscene(tmp_path)
    data = f'kind = "openscene"\nroot = "{tmp_path}"\nmeta = "{tmp_path}/meta"\nvalidation_meta = "{tmp_path}/meta"\n'
    with pytest.raises(ValueError, match=r"data\.allow_pickle must be true"):
        train(data_config(tmp_path / "out", data, "run.validation_clips=0"))
    trusted = data_config(
        tmp_path / "out", f"{data}allow_pickle = true\n", "run.validation_clips=2", "run.batch_size=2"
    )
    train(trusted)
    assert "validation_loss" in (tmp_path / "out" / "log.jsonl").read_text()
    assert isinstance(trusted.data, OpenSceneData)
    clips = trusted.data.training_clips()
    assert [clips.name(index) for index in range(len(clips))] == ["a", "b"]
    frames = clips.clip(1).frames
    assert frames is not None
    assert frames[:, 0, 0, 0].tolist() == [0, 40, 80, 120]


def test_only_clips_with_frames_are_cached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "cache", str(TINY), "--out", str(tmp_path / "cache")]) == 2
    expected = 'data.kind must be "nuscenes" or "videos" or "panshot" or "openscene", got \'world\''
    assert expected in capsys.readouterr().err

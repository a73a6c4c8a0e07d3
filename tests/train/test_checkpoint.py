"""Checkpoints that were damaged, tampered with, written by an older version, or did not fit on the disk."""

import errno
import importlib
import json
import pickle
import random
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystem

from merope.cli import main
from merope.train import checkpoint, loop
from merope.train.checkpoint_files import Damaged, find_damage, read_metadata, write_checksums
from merope.train.config import TrainConfig
from merope.train.loop import export_checkpoint, train
from merope.train.toml_config import read_config
from tests.train.ranks import run_ranks
from tests.train.tiny_runs import SMALLER, TINY, losses, tiny_config

OLD = Path(__file__).parents[1] / "data" / "written-by-0.1.0" / "train"
WEIGHTS = "diffusion_pytorch_model.safetensors"


class Attack:
    """Something that creates a file when it is unpickled without care."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint of each, to be copied."""
    out = tmp_path_factory.mktemp("run")
    train(tiny_config(out, "run.steps=2", "run.checkpoint_every=1"))
    return out


@pytest.fixture
def newest(done: Path, tmp_path: Path) -> Path:
    """The newest checkpoint of a copy in tmp_path / "run"."""
    shutil.copytree(done, tmp_path / "run")
    return tmp_path / "run" / "checkpoints" / "step-00000002"


def flip(file: Path, place: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << bit
    file.write_bytes(content)


def old_config(out: Path, *changes: str) -> TrainConfig:
    """The run that wrote `OLD`."""
    smaller = [change for change in SMALLER if "encoding_options" not in change and "head_dim" not in change]
    branch = ("model.trainable=branch", "model.architecture.attention_head_dim=16", "branch.encoding=gta")
    own = ("run.steps=2", "optimiser.ema_decay=0.9", f"run.out={out}")
    return read_config(TrainConfig, TINY, [*smaller, *branch, *own, *changes])


@pytest.fixture
def old_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """Averages as the first version made them: the young ones forgot no faster."""
    update = loop.update_average
    monkeypatch.setattr(
        loop, "update_average", lambda average, model, decay, step: update(average, model, decay, 10**6)
    )


@pytest.mark.usefixtures("old_average")
def test_a_checkpoint_of_the_first_version_is_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(OLD, tmp_path / "old" / "checkpoints")
    train(old_config(tmp_path / "old", "run.steps=4"))
    assert "step-00000002 has no checksums" in capsys.readouterr().err
    train(old_config(tmp_path / "whole", "run.steps=4"))
    torch.testing.assert_close(losses(tmp_path / "old"), losses(tmp_path / "whole")[2:], rtol=1e-4, atol=0)
    old, whole = (load_file(tmp_path / name / "trained" / "branch" / WEIGHTS) for name in ("old", "whole"))
    torch.testing.assert_close(old, whole, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("old_average")
def test_a_checkpoint_of_the_first_version_is_exported(tmp_path: Path) -> None:
    folder = export_checkpoint(old_config(tmp_path), OLD / "step-00000002")
    train(old_config(tmp_path))
    exported, trained = (load_file(path / "branch" / WEIGHTS) for path in (folder, tmp_path / "trained"))
    torch.testing.assert_close(exported, trained, rtol=0, atol=1e-5)


def test_metadata_that_would_run_code_is_refused(
    newest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = tmp_path / "ran"
    (newest / ".metadata").write_bytes(pickle.dumps(Attack(ran)))
    write_checksums(newest, rank=0)  # as somebody would who means it
    capsys.readouterr()
    arguments = ["train", str(TINY), "--export", str(newest)]
    for change in (*SMALLER, f"run.out={tmp_path / 'run'}"):
        arguments += ["--set", change]
    assert main(arguments) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "is not safe: it asks for pathlib.Path.touch, which no checkpoint needs and which was not run" in said
    train(tiny_config(tmp_path / "run", "run.steps=3"))
    assert "the run goes on from step-00000001" in capsys.readouterr().err
    assert not ran.exists()
    pickle.loads(pickle.dumps(Attack(ran)))
    assert ran.exists(), "the attack itself works"


@pytest.mark.parametrize("entry", ["optimiser.param_groups.0.lr", "model.blocks.0.norm2.weight"])
def test_entries_that_would_run_code_are_refused(newest: Path, tmp_path: Path, entry: str) -> None:
    """Also the pickles inside the files of tensors: the optimiser's settings, and the tensors themselves."""
    shutil.rmtree(newest.with_name("step-00000001"))
    metadata, ran = read_metadata(newest), tmp_path / "ran"
    torch.save(Attack(ran), newest / "__0_1.distcp")
    (index,) = [index for index in metadata.storage_data if index.fqn == entry]
    length = (newest / "__0_1.distcp").stat().st_size
    metadata.storage_data[index] = replace(
        metadata.storage_data[index], relative_path="__0_1.distcp", offset=0, length=length
    )
    (newest / ".metadata").write_bytes(pickle.dumps(metadata))
    write_checksums(newest, rank=0)
    with pytest.raises(
        ValueError, match=r"can be read, got step-00000002: Weights only load failed.*; put a copy back"
    ):
        train(tiny_config(tmp_path / "run", "run.steps=3"))
    assert not ran.exists()


def test_metadata_that_leads_out_of_the_folder_is_refused(newest: Path) -> None:
    metadata = read_metadata(newest)
    index = next(iter(metadata.storage_data))
    metadata.storage_data[index] = replace(metadata.storage_data[index], relative_path="../step-00000001/__0_0.distcp")
    (newest / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(Damaged, match="does not list files of this folder"):
        read_metadata(newest)


def setting(module: str, name: str, made: bytes = b"") -> bytes:
    """A pickle that sets the attribute `glob` of something in a module, or of what opcodes make of it."""
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + made + b"N}X\x04\x00\x00\x00globK\x05s\x86b."


METADATA = "torch.distributed.checkpoint.metadata"
MEMBER = b"K\x00\x85R"  # called with 0


@pytest.mark.parametrize(
    ("module", "name", "made"),
    [
        ("pathlib", "PosixPath", b""),
        (METADATA, "MetadataIndex", b""),
        (METADATA, "_MEM_FORMAT_ENCODING", MEMBER),
        ("torch.serialization", "_get_layout", b""),
    ],
)
def test_metadata_that_would_change_the_process_is_refused(newest: Path, module: str, name: str, made: bytes) -> None:
    (newest / ".metadata").write_bytes(setting(module, name, made))
    target = getattr(importlib.import_module(module), name)
    before = dict(vars(target(0) if made else target))
    with pytest.raises(Damaged, match=r"is not safe: it sets attributes of .*which was not done"):
        read_metadata(newest)
    assert dict(vars(target(0) if made else target)) == before


def test_metadata_that_asks_for_all_memory_is_refused(newest: Path) -> None:
    (newest / ".metadata").write_bytes(b"\x80\x05\x96" + (10**9).to_bytes(8, "little") + b".")
    tracemalloc.start()
    try:
        with pytest.raises(Damaged, match="cannot be read"):
            read_metadata(newest)
        assert tracemalloc.get_traced_memory()[1] < 10**8
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "change",
    [{"step": "20"}, {"step": None}, {"step": 20.5}, {"step": -3}, {"step": True}, {"learnt": 3}, {"data": [1]}],
    ids=str,
)
def test_progress_of_other_types_is_damage(newest: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    """Without checksums, as the first version wrote it, nothing else would find it."""
    file = newest / "progress.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    (newest / "sha256-0.json").unlink()
    (name,) = change
    with pytest.raises(Damaged, match=rf"progress\.json cannot be read: {name} must be "):
        export_checkpoint(tiny_config(tmp_path / "run"), newest)


def test_an_export_names_the_checkpoint_that_is_whole(newest: Path, tmp_path: Path) -> None:
    config, older = tiny_config(tmp_path / "run"), newest.with_name("step-00000001")
    truncate_tensors(newest)
    with pytest.raises(Damaged, match=rf"step-00000002 cannot be read: .*; {older} is whole, name that one$"):
        export_checkpoint(config, newest)
    truncate_tensors(older)
    with pytest.raises(Damaged, match=r"name a step-… folder that is whole$"):
        export_checkpoint(config, newest)


def test_every_flipped_bit_is_found(newest: Path) -> None:
    assert find_damage(newest, 0, 1) == ""
    dice = random.Random(0)
    files = sorted(newest.iterdir())
    assert [file.name for file in files] == [".metadata", "__0_0.distcp", "progress.json", "sha256-0.json"]
    tensors = newest / "__0_0.distcp"
    for file in (*files * 10, *[tensors] * 60):
        place, bit = dice.randrange(file.stat().st_size), dice.randrange(8)
        flip(file, place, bit)
        assert find_damage(newest, 0, 1) != "", f"bit {bit} of byte {place} of {file.name}"
        flip(file, place, bit)
    assert find_damage(newest, 0, 1) == ""


def truncate_tensors(place: Path) -> None:
    file = place / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:1000])


def delete_tensors(place: Path) -> None:
    (place / "__0_0.distcp").unlink()


def empty_progress(place: Path) -> None:
    (place / "progress.json").write_text("")


def nest_progress(place: Path) -> None:
    (place / "progress.json").write_text("[" * 100_000)


def delete_metadata(place: Path) -> None:
    (place / ".metadata").unlink()


def flip_checksums(place: Path) -> None:
    flip(place / "sha256-0.json", 0)


@pytest.mark.parametrize("with_checksums", [True, False])
@pytest.mark.parametrize(
    "damage", [truncate_tensors, delete_tensors, empty_progress, nest_progress, delete_metadata, flip_checksums]
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    newest: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    with_checksums: bool,
) -> None:
    out = tmp_path / "run"
    first_losses = losses(out)
    damage(newest)
    if not with_checksums and damage is not flip_checksums:
        (newest / "sha256-0.json").unlink()
    train(tiny_config(out, "run.steps=2", "run.checkpoint_every=1"))
    said = capfd.readouterr().err
    assert said.count("step-00000002 is damaged (") == 1
    assert "it is now step-00000002.damaged, and the run goes on from step-00000001" in said
    assert "Traceback" not in said
    assert losses(out) == first_losses
    assert find_damage(newest, 0, 1) == ""


def test_a_run_of_which_no_checkpoint_can_be_read_does_not_begin_anew(newest: Path, tmp_path: Path) -> None:
    for place in checkpoint.complete(newest.parent):
        truncate_tensors(place)
    said = r"step-00000002: __0_0.distcp is not .*; step-00000001: .* put a copy back"
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            train(tiny_config(tmp_path / "run", "run.steps=3"))
    assert len(checkpoint.complete(newest.parent)) == 2


def train_two_steps(out: Path, *changes: str) -> None:
    train(tiny_config(out, "run.checkpoint_every=1", "run.steps=2", *changes))


def test_ranks_agree_on_a_checkpoint_that_one_of_them_finds_damaged(tmp_path: Path) -> None:
    run_ranks(2, train_two_steps, tmp_path)
    newest = tmp_path / "checkpoints" / "step-00000002"
    assert sorted(file.name for file in newest.glob("sha256-*")) == ["sha256-0.json", "sha256-1.json"]
    before = losses(tmp_path)
    flip(newest / "__1_0.distcp", 5000)
    assert find_damage(newest, 0, 2) + find_damage(newest, 1, 2) == find_damage(newest, 0, 1) != ""
    run_ranks(2, train_two_steps, tmp_path)
    assert (tmp_path / "checkpoints" / "step-00000002.damaged").exists()
    assert find_damage(newest, 0, 1) == ""
    torch.testing.assert_close(losses(tmp_path), before, rtol=1e-6, atol=0)


def test_a_full_disk_leaves_the_older_checkpoint_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    create_stream = FileSystem.create_stream

    def full(self: FileSystem, path: Path, mode: str) -> Any:
        if "step-00000002" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return create_stream(self, path, mode)

    arguments = ["train", str(TINY)]
    for change in (*SMALLER, f"run.out={tmp_path}", "run.steps=3", "run.checkpoint_every=1"):
        arguments += ["--set", change]
    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "create_stream", full)
        assert main(arguments) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "step-00000002 could not be written: [Errno 28] No space left on device; the newest whole" in said
    assert "step-00000001; make room for it and run the same command again" in said
    assert [place.name for place in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert main(arguments) == 0


def test_a_disk_that_torch_does_not_call_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writer of archives only finds that less was written than it asked for."""

    def short(*_: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:668] . unexpected pos 704 vs 598")

    full = shutil._ntuple_diskusage(total=3_000_000, used=2_996_000, free=4_000)
    monkeypatch.setattr(FileSystem, "create_stream", short)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: full)
    said = (
        rf"unexpected pos 704 vs 598 \(the disk of {tmp_path}/checkpoints may be full: 0\.0 MB are free\); there is no"
    )
    with pytest.raises(OSError, match=said):
        train(tiny_config(tmp_path, "run.steps=1"))


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("merope.train.loop.TrainingLog.step", OSError(errno.ENOSPC, "No space left on device")),
        ("merope.train.loop.export", SafetensorError("I/O error: No space left on device (os error 28)")),
    ],
    ids=["log", "export"],
)
def test_other_files_that_do_not_fit_are_one_line_too(
    newest: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
    error: Exception,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    out = newest.parents[1]
    arguments = ["train", str(TINY)]
    for change in (*SMALLER, f"run.out={out}", "run.steps=3"):
        arguments += ["--set", change]
    monkeypatch.setattr(place, full)
    assert main(arguments) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"merope: no space is left to write {out}: checkpoints stay as they are; make room")
    assert find_damage(newest, 0, 1) == ""

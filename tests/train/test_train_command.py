"""`merope train`: from a config to trained folders, and one line with a status for everything that goes wrong."""

import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
import warnings
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file

from merope.adapters.attachment import attach, detach, load_branch
from merope.cli import command_parser, main
from merope.commands.models import _driving_command
from merope.datasets.loader import Batch
from merope.draw.progress import OVERWRITE
from merope.formats.video import read_video
from merope.train import checkpoint
from merope.train.clip_streams import FrameEncoder
from merope.train.config import TrainConfig
from merope.train.log import TrainingLog
from merope.train.loop import train
from merope.train.streams import Examples
from merope.train.toml_config import read_config
from tests.adapters.wan_models import WAN21_1_3B, WAN22_5B, meta_wan
from tests.train.ranks import run_ranks
from tests.train.tiny_files import file_config

WEIGHTS = "diffusion_pytorch_model.safetensors"


def command(root: Path, out: Path, *changes: str) -> list[str]:
    """Arguments of `merope train` for the files of a folder."""
    sets = [part for change in (f"run.out={out}", *changes) for part in ("--set", change)]
    return ["train", str(root / "tiny.toml"), *sets]


def steps_done(out: Path) -> list[int]:
    return [checkpoint.read_progress(place).step for place in checkpoint.complete(out / "checkpoints")]


def test_from_a_config_to_a_trained_branch(
    tiny_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ("run.steps=3", "run.validate_every=1", "run.sample_every=3", "run.sample_steps=2", "data.workers=1")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert main(command(tiny_files, tmp_path, *changes)) == 0
    assert [str(warning.message) for warning in seen if "single process" in str(warning.message)] == []
    said = capsys.readouterr()
    drive = f"merope generate --model {tiny_files}/wan --branch {tmp_path}/trained/branch --trajectory POSES"
    assert said.out == f"wrote {tmp_path}\ndrive it: {drive} --prompt TEXT --out clip.mp4\n"
    assert "4,728 of 71,576 parameters are trained; 0 of 3 steps are done" in said.err
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert len({row["validation_loss"] for row in rows}) == 3
    transformer = WanTransformer3DModel.from_pretrained(tiny_files / "wan", subfolder="transformer")
    assert load_branch(transformer, tmp_path / "trained" / "branch").config.encoding == "merope"
    assert not (tmp_path / "trained" / "transformer").exists()
    assert read_video(tmp_path / "samples" / "step-00000003.mp4", [0, 4], 256, 2 * 512 + 256).float().std() > 10


def test_the_command_to_run_next_can_be_pasted_whatever_the_folders_are_called(tmp_path: Path) -> None:
    trained = tmp_path / "my run" / "trained"
    (trained / "transformer").mkdir(parents=True)
    config = read_config(TrainConfig, Path("tiny"), ["model.pretrained=my models/wan"])
    options = command_parser().parse_args(shlex.split(_driving_command(config, trained))[1:])
    assert (options.command, options.model) == ("generate", "my models/wan")
    assert (options.branch, options.transformer) == (f"{trained}/branch", f"{trained}/transformer")
    (trained / "model_index.json").touch()
    assert shlex.split(_driving_command(config, trained)) == ["merope", "demo", "--model", str(trained)]
    causal = replace(config, objective=replace(config.objective, causal_block_frames=3))
    options = command_parser().parse_args(shlex.split(_driving_command(causal, trained))[1:])
    assert (options.command, options.model, options.keys) == ("drive", str(trained), "w*40 a*20 w*40")


def test_a_checkpoint_is_exported_by_name(tiny_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(tiny_files, tmp_path, "optimiser.ema_decay=0.5", "run.checkpoint_every=1")
    assert main(arguments) == 0
    assert main([*arguments, "--export", str(tmp_path / "checkpoints" / "step-00000002")]) == 0
    assert f"wrote {tmp_path / 'trained-00000002'}\n" in capsys.readouterr().out
    trained, exported = (load_file(tmp_path / name / "branch" / WEIGHTS) for name in ("trained", "trained-00000002"))
    assert trained.keys() == exported.keys()
    assert all(torch.equal(trained[name], exported[name]) for name in trained)
    assert main([*arguments, "--export", str(tmp_path / "nowhere")]) == 2
    assert "name a step-… folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("encoding", "integration", "changes"),
    [
        ("plucker", "additive", ()),
        ("extrinsics", "recammaster", ()),
        ("extrinsics", "motionctrl", ()),
        ("plucker", "modulation", ()),
        ("camco", "epipolar", ()),
        ("raype", "raype", ()),
        ("plucker", "roce", ()),
        ("gta", "rerope", ("model.trainable=all", "branch.carve=[4,2,2]")),
    ],
)
def test_every_integration_is_exported_and_loads(
    tiny_files: Path, tmp_path: Path, encoding: str, integration: str, changes: tuple[str, ...]
) -> None:
    lines = (tiny_files / "tiny.toml").read_text().splitlines(keepends=True)
    (tmp_path / "tiny.toml").write_text("".join(line for line in lines if not line.startswith("encoding_options")))
    choice = (f"branch.encoding={encoding}", f"branch.integration={integration}")
    assert main(command(tmp_path, tmp_path / "out", *choice, *changes, "run.steps=1")) == 0
    transformer = WanTransformer3DModel.from_pretrained(tiny_files / "wan", subfolder="transformer")
    assert load_branch(transformer, tmp_path / "out" / "trained" / "branch").config.integration == integration
    assert (tmp_path / "out" / "trained" / "transformer").exists() == (integration == "rerope")


def test_worlds_are_fed_to_a_model_with_a_vae_as_latents(tiny_files: Path, tmp_path: Path) -> None:
    """Their pixels are not taken for latents: these have another number of channels."""
    text = (tiny_files / "tiny.toml").read_text()
    start, end = text.index("[data]"), text.index("[objective]")
    data = '[data]\nkind = "world"\nframes = 5\nheight = 32\nwidth = 64\n\n'
    (tmp_path / "world.toml").write_text(text[:start] + data + text[end:])
    assert main(["train", str(tmp_path / "world.toml"), "--set", f"run.out={tmp_path / 'out'}"]) == 0
    assert (tmp_path / "out" / "trained" / "branch").is_dir()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["run.stepz=3"], ["run.stepz", "did you mean 'steps'"]),
        (["run.steps=many"], ["run.steps", "int"]),
        (["model.pretrained=/nowhere"], ["model.pretrained", "/nowhere"]),
        (["data.root=/nowhere"], ["/nowhere"]),
        (["data.height=40"], ["height", "multiple of 32"]),
        (["data.kind=film"], ["data.kind", "nuscenes"]),
        (["branch.integration=rerope"], ["model.trainable", "rerope"]),
        (["branch.encoding_options.wavelength=3"], ["encoding_options", "'wavelength'", "wavelengths_m"]),
        (["parallel.shard=2"], ["parallel", "1 ranks"]),
    ],
    ids=lambda value: value[0],
)
def test_bad_configs_end_with_one_line(
    tiny_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: list[str], words: list[str]
) -> None:
    assert main(command(tiny_files, tmp_path / "out", *changes)) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("merope: ")]
    assert len(said) == 1
    assert [word for word in words if word not in said[0]] == []
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_not_finite_ends_the_run_with_names(
    tiny_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    encode, seen = FrameEncoder.examples, []

    def poisoned(self: FrameEncoder, batch: Batch, places: tuple[int, ...], step: int) -> Examples:
        seen.append(batch.names[0])
        examples = encode(self, batch, places, step)
        return replace(examples, clean=examples.clean * torch.nan) if len(seen) == 4 else examples

    monkeypatch.setattr(FrameEncoder, "examples", poisoned)
    changes = ("run.steps=5", "run.checkpoint_every=1", "run.validation_clips=0")
    assert main(command(tiny_files, tmp_path, *changes)) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(f"merope: step 2: the loss of {seen[3]} is not finite; the last good checkpoint is")
    assert steps_done(tmp_path) == [1]
    assert main(command(tiny_files, tmp_path, *changes)) == 0  # goes on from there
    assert steps_done(tmp_path) == [4, 5]


def test_data_that_are_not_there_are_named_before_the_model_is_read(
    tiny_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("merope.train.loop.build_model", None)  # calling it would be a TypeError
    for key in ("data.clusters", "data.root", "data.split_file"):
        assert main(command(tiny_files, tmp_path, f"{key}=nowhere/x")) == 2
        assert f"merope: {key} must be a file or folder that exists, got nowhere/x; check it" in capsys.readouterr().err


def test_what_does_not_change_the_result_may_change_when_a_run_goes_on(
    tiny_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tiny_files, tmp_path, "run.steps=1")) == 0
    freely = ("data.workers=1", "model.gradient_checkpointing=true", "run.log_every=1", "run.micro_batch=2")
    assert main(command(tiny_files, tmp_path, "run.steps=2", *freely)) == 0
    assert main(command(tiny_files, tmp_path, "run.steps=3", "objective.shift=3.0")) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "got objective.shift: 5.0 before, 3.0 now; use" in message  # that key and no other
    assert "another run.out" in message
    assert steps_done(tmp_path) == [1, 2]


def test_data_of_which_nothing_can_be_read_is_one_line_and_no_traceback(
    tiny_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"id": name, "video": f"{name}.mp4", "poses": f"{name}.json"} for name in ("a", "b")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = (tiny_files / "tiny.toml").read_text()
    start, end = text.index("[data]"), text.index("[objective]")
    size = f'root = "{tmp_path}"\nframes = 5\nheight = 32\nwidth = 64\nworkers = 0\n'
    file = tmp_path / "videos.toml"
    file.write_text(f'{text[:start]}[data]\nkind = "videos"\nmanifest = "{tmp_path}/rows.jsonl"\n{size}{text[end:]}')
    assert main(["train", str(file), "--set", f"run.out={tmp_path / 'out'}", "--set", "run.validation_clips=0"]) == 2
    assert "merope: none of 2 clips could be read, the last:" in capsys.readouterr().err


def run_in_a_group(arguments: list[str], said: Path) -> None:
    """The command in a process group of its own, as a shell starts it."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stderr = said.open("w", buffering=1)
    sys.exit(main(arguments))


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C in a terminal", "torchrun's SIGTERM"])
def test_a_stop_reaches_the_workers_too_and_loses_nothing(
    tiny_files: Path, tmp_path: Path, stop: signal.Signals
) -> None:
    """Both signal the whole group: workers that die of it must not take the run's checkpoint with them."""
    arguments = command(tiny_files, tmp_path, "run.steps=100000", "data.workers=1", "run.validation_clips=0")
    process = get_context("fork").Process(target=run_in_a_group, args=(arguments, tmp_path / "said"))
    process.start()
    log, deadline = tmp_path / "log.jsonl", time.monotonic() + 60
    while not (log.exists() and log.read_text().count("\n") > 2) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.pid is not None
    os.killpg(process.pid, stop)
    process.join(timeout=60)
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 130, said
    (done,) = steps_done(tmp_path)
    assert f"stopped after step {done}; the same command goes on from there" in said
    assert done == len(log.read_text().splitlines())


def learn(root: Path, out: Path, *changes: str) -> None:
    train(file_config(root, out, *changes))


def test_sharded_ranks_in_bf16_validate_and_sample(tiny_files: Path, tmp_path: Path) -> None:
    changes = ("model.precision=bf16", "run.sample_every=1", "run.sample_steps=1")
    run_ranks(2, learn, tiny_files, tmp_path / "two", *changes)
    learn(tiny_files, tmp_path / "one", *changes)
    assert len(list((tmp_path / "two" / "samples").glob("*.mp4"))) == 2  # after a training step, and after validation
    rows = [json.loads((tmp_path / name / "log.jsonl").read_text().splitlines()[-1]) for name in ("one", "two")]
    for number in ("loss", "validation_loss"):
        assert rows[1][number] == pytest.approx(rows[0][number], rel=5e-3)


def test_a_kill_while_an_old_checkpoint_is_deleted_leaves_whole_ones(
    tiny_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(folder: Path) -> None:
        (folder / "progress.json").unlink()
        raise KeyboardInterrupt

    changes = ("run.steps=3", "run.checkpoint_every=1", "run.keep_checkpoints=1", "run.validation_clips=0")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            train(file_config(tiny_files, tmp_path, *changes))
    assert steps_done(tmp_path) == [2]
    train(file_config(tiny_files, tmp_path, *changes))
    assert [place.name for place in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


def test_every_row_of_the_paper_fits_its_model_and_is_in_the_documentation() -> None:
    """The branch of every config is made for the real architecture, without weights."""
    repository = Path(__file__).parents[2]
    page = (repository / "docs" / "training.md").read_text()
    for folder, main_file, architecture in (
        ("nuscenes", "nuscenes-wan22-5b.toml", WAN22_5B),
        ("panshot", "panshot-wan21-1.3b.toml", WAN21_1_3B),
    ):
        transformer = meta_wan(architecture)
        for file in (repository / "configs" / main_file, *sorted((repository / "configs" / folder).glob("*.toml"))):
            config = read_config(TrainConfig, file)
            assert f"{file.name}`" in page, file.name
            assert config.run.out.name in (file.stem, "merope", "b-merope")
            if config.branch != "none":
                with torch.device("meta"):
                    attach(transformer, config.branch)
                detach(transformer)


@pytest.mark.parametrize(
    ("is_terminal", "expected"),
    [(False, "begun\n{2}\n"), (True, OVERWRITE + "begun\n" + OVERWRITE + "{1}" + OVERWRITE + "{2}\n")],
    ids=["file", "terminal"],
)
def test_progress_moves_on_a_terminal_and_is_a_few_lines_in_a_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_terminal: bool,
    expected: str,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    log = TrainingLog(tmp_path, 2, 0, 1, enabled=True)
    log.say("begun")
    for step in (1, 2):
        log.step(step, {"loss": 1.0}, show=step == 2)
    log.close()
    line = r"step \1/2  loss 1  clips_per_s [^ ]+  \d+ s left"
    pattern = re.sub(r"\\{(\d)\\}", lambda match: line.replace(r"\1", match[1]), re.escape(expected))
    assert re.fullmatch(pattern, capsys.readouterr().err)


def test_a_log_that_a_crash_cut_off_is_gone_on_with(tmp_path: Path) -> None:
    rows = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2, 3)]
    (tmp_path / "log.jsonl").write_text("\n".join(rows)[:-7])
    TrainingLog(tmp_path, 5, 2, 1, enabled=True).close()
    assert (tmp_path / "log.jsonl").read_text().splitlines() == rows[:2]
    TrainingLog(tmp_path, 5, 1, 1, enabled=True).close()
    assert (tmp_path / "log.jsonl").read_text().splitlines() == rows[:1]

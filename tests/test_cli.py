"""The command line itself: what its help says, and that what is missing is said at once."""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from merope.cli import command_parser, main
from merope.commands.evaluation import _methods


def leaves(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every parser below this one, by its words."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield f"{name} {word}".strip(), below
                yield from leaves(below, f"{name} {word}".strip())


PARSERS = dict(leaves(command_parser()))


def shown(default: object) -> str:
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


@pytest.mark.parametrize("name", PARSERS)
def test_help_names_the_default_of_every_option_in_parentheses(name: str) -> None:
    for action in PARSERS[name]._actions:
        default = PARSERS[name].get_default(action.dest)
        # The default of --check depends on the estimator, and its help says so in words.
        if not action.option_strings or default in (None, False, [], argparse.SUPPRESS, "default"):
            continue
        text = (action.help or "") % {"default": default}
        assert f"({shown(default)}" in text, (name, action.option_strings, default, text)


@pytest.mark.parametrize("name", [name for name in PARSERS if name != "data"])
def test_help_ends_with_an_example_on_one_line_that_parses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    example = PARSERS[name].format_help().strip().splitlines()[-1]
    assert example.startswith(f"e.g. merope {name} ")
    command_parser().parse_args(example.removeprefix("e.g. merope ").split())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("generate --model m --branch b --out c.mp4 --trajectory gone.json", "--trajectory must be a file or folder"),
        ("drive --model m --branch b --out d --trajectory gone.json", "--trajectory must be a file or folder"),
        ("analyse --model m --branch b --out a --trajectory gone.json", "--trajectory must be a file or folder"),
        ("demo --trajectory gone.json", "--trajectory must be a file or folder"),
        ("curate --poses gone.txt", "--poses must be a file or folder"),
        ("path convert gone.txt out.json", "path must be a file or folder"),
        ("train gone.toml", "config must be a TOML file"),
        ("data cache gone.toml --out c", "config must be a TOML file"),
        ("bench world gone.toml", "config must be a TOML file"),
    ],
)
def test_a_missing_file_is_named_by_its_option(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", PARSERS)
def test_every_path_is_read_with_the_home_of_the_user(name: str) -> None:
    """The shell leaves the ~ of --out=~/run alone: the type of paths is user_path."""
    assert [action.dest for action in PARSERS[name]._actions if action.type is Path] == []


def test_outputs_and_inputs_are_in_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    assert main(["path", "straight", "~/a.json"]) == 0
    assert main(["path", "convert", "~/a.json", "~/b.txt"]) == 0
    assert sorted(file.name for file in (tmp_path / "home").iterdir()) == ["a.json", "b.txt"]
    assert list((tmp_path / "here").iterdir()) == []
    methods = command_parser().parse_args(["evaluate", "--commanded", "c", "--method", "a=~/videos"])
    assert _methods(methods) == {"a": tmp_path / "home" / "videos"}


@pytest.mark.parametrize("name", [name for name in PARSERS if "--seed" in PARSERS[name].format_help()])
def test_seeds_beyond_what_generators_take_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        PARSERS[name].parse_args(["--seed", str(2**63)])
    assert f"argument --seed: {2**63} is not below {2**62} in size" in capsys.readouterr().err


def test_output_that_nobody_reads_ends_the_command_quietly() -> None:
    """As in `merope train --list | head -1`."""
    program = "import sys; from merope.cli import main; sys.exit(main(['train', '--list']))"
    for unbuffered in ("", "1"):  # the pipe breaks when the buffer is written, or at a print
        read, written = os.pipe()
        os.close(read)
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        ended = subprocess.run(
            [sys.executable, "-c", program], stdout=written, stderr=subprocess.PIPE, env=environment, check=False
        )
        os.close(written)
        assert (ended.returncode, ended.stderr) == (141, b"")


def test_missing_files_are_found_before_slow_imports() -> None:
    program = """
import sys
from merope.cli import main
generate = "generate --model m --branch b --out c.mp4 --trajectory gone.json"
drive = "drive --model m --branch b --out d --trajectory gone.json"
files = "demo --trajectory gone.json", "curate --poses gone.txt", "path convert gone.txt out.json"
configs = "train gone.toml", "data cache gone.toml --out c", "bench world gone.toml"
for command in (generate, drive, *files, *configs):
    assert main(command.split()) == 2
assert not {"diffusers", "scipy", "cv2", "matplotlib"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)

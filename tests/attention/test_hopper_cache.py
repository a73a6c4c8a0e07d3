"""Compiled Hopper kernels are kept for later processes: found again, never mixed up, never needed."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from merope.attention.kernels import hopper_module


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[bytes]]:
    """Sources that were compiled, by a stand-in for NVRTC, with a cache folder of the test's own."""
    sources: list[bytes] = []

    def compile_source(source: bytes) -> bytes:
        sources.append(source)
        return b"code of " + source[:40]

    monkeypatch.setattr(hopper_module, "_compiled", compile_source)
    monkeypatch.setattr(hopper_module, "_nvrtc_version", lambda: (13, 0))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hopper_module.cubin.cache_clear()
    yield sources
    hopper_module.cubin.cache_clear()


def in_a_new_process(phases: bool) -> bytes:
    hopper_module.cubin.cache_clear()
    return hopper_module.cubin(phases, False)


def test_a_later_process_compiles_nothing(compiled: list[bytes], tmp_path: Path) -> None:
    made = in_a_new_process(False)
    assert in_a_new_process(False) == made
    assert len(compiled) == 1
    (file,) = (tmp_path / "cache" / "merope").iterdir()
    assert file.read_bytes() == made


def test_every_build_and_compiler_has_a_file_of_its_own(compiled: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_new_process(False)
    in_a_new_process(True)
    assert len(set(compiled)) == 2
    monkeypatch.setattr(hopper_module, "_nvrtc_version", lambda: (13, 1))
    in_a_new_process(False)
    monkeypatch.setattr(hopper_module, "OPTIONS", (*hopper_module.OPTIONS, b"--device-debug"))
    in_a_new_process(False)
    assert len(compiled) == 4


def test_a_folder_that_cannot_be_made_costs_the_time_alone(compiled: list[bytes], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder is wanted")
    assert in_a_new_process(False) == in_a_new_process(False)
    assert len(compiled) == 2


def test_a_user_without_a_home_keeps_nothing(compiled: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert in_a_new_process(False) == in_a_new_process(False)
    assert len(compiled) == 2


def test_what_could_not_be_written_whole_leaves_nothing(
    compiled: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    in_a_new_process(False)
    assert not list((tmp_path / "cache" / "merope").iterdir())


def test_the_file_is_the_user_s_own(compiled: list[bytes], tmp_path: Path) -> None:
    in_a_new_process(False)
    (file,) = (tmp_path / "cache" / "merope").iterdir()
    assert not stat.S_IMODE(file.stat().st_mode) & (stat.S_IWGRP | stat.S_IWOTH)

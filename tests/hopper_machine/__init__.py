"""The Hopper kernels on the CPU: their own sources, compiled by g++, on a multiprocessor in C++ (machine.h)."""

import ctypes
import shutil
import subprocess
import tempfile
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from merope.attention import dispatch, fused
from merope.attention.kernels import hopper, hopper_module

HERE = Path(__file__).parent
KERNELS = Path(hopper_module.__file__).parent
INSTRUCTIONS = "hopper_instructions.cuh"
"""The one source that is not compiled: kernels.cpp has what it has, in C++."""
MULTIPROCESSORS = 4
"""So many it is said to have: tiles of keys are then cut in most tests."""
COMPILE = ("g++", "-std=c++17", "-march=native", "-fno-strict-aliasing", "-fPIC", "-w", "-O2")


@lru_cache
def why_not() -> str | None:
    """Why the kernels cannot run here; None when they can."""
    if shutil.which("g++") is None:
        return "needs g++"
    check = ("g++", "-x", "c++", "-fsyntax-only", "-")
    if subprocess.run(check, input=b"_Float16 x;", capture_output=True, check=False).returncode:
        return "needs a g++ with half precision (_Float16: GCC 12 or newer)"
    return None


@lru_cache
def folder() -> Path:
    """For what is compiled, as long as this process lives."""
    made = tempfile.TemporaryDirectory()
    folder.made = made  # type: ignore[attr-defined]
    return Path(made.name)


@lru_cache
def machine() -> list[str]:
    """Its object files."""
    made = [str(folder() / f"{name}.o") for name in ("machine", "products")]
    for file in made:
        subprocess.run([*COMPILE, "-c", str(HERE / Path(file).with_suffix(".cpp").name), "-o", file], check=True)
    return made


def sources(phases: bool, visible: bool) -> str:
    left_out = hopper_module.FOR_ALL_KEYS if visible else ()
    text = hopper_module.kernel_source(phases, visible).replace((KERNELS / INSTRUCTIONS).read_text(), "")
    return text if left_out else f"#define HAS_WIDE_TILES\n{text}"


def compiled(text: str) -> Path:
    """A library of kernels of these sources."""
    own = Path(tempfile.mkdtemp(dir=folder()))
    (own / "sources.inc").write_text(text)
    command = [*COMPILE, "-shared", f"-I{own}", str(HERE / "kernels.cpp"), *machine()]
    subprocess.run([*command, "-o", str(own / "kernels.so")], check=True)
    return own / "kernels.so"


class CpuKernels:
    """In place of `hopper_module.Module`. Every launch has another order of threads: the seed is one more each time."""

    def __init__(self, library: Path, seed: int = 0) -> None:
        self._launch = ctypes.CDLL(str(library)).launch_kernel
        self._launch.restype = ctypes.c_char_p
        self.seed = seed

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        params: ctypes.Structure,
        early: bool = False,
    ) -> None:
        wrong = self._launch(name.encode(), ctypes.byref(params), *grid, threads, shared, self.seed)
        assert not wrong, f"{name}: {wrong.decode()}"
        self.seed += 1


@lru_cache
def module(_device_index: int | None, phases: bool, visible: bool) -> CpuKernels:
    return CpuKernels(compiled(sources(phases, visible)))


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that fit take these kernels, on the CPU."""
    _register()
    monkeypatch.setattr(hopper, "module", module)
    monkeypatch.setattr(hopper, "multiprocessors", lambda _device: MULTIPROCESSORS)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    monkeypatch.setattr(fused, "_is_hopper", lambda q: True)
    monkeypatch.setattr(fused, "_can_build", lambda phases, visible: True)
    monkeypatch.setattr(dispatch, "why_not_fused", lambda q, plan: None)


@lru_cache
def _register() -> None:
    hopper._attend.register_kernel("cpu")(hopper._forward)
    hopper._attend_backward.register_kernel("cpu")(hopper._backward)

"""Shared set-up: hypothesis runs are repeatable and have no time limit per example; `--strangers-cpu` is an option."""

import ctypes
import gc
import os
from pathlib import Path

# Some virtual machines announce AMX and do not grant it: oneDNN's bf16 kernels then die of an illegal instruction.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import hypothesis
import numpy as np
import pytest
import torch
from strangers_cpu import strangers_cpu

from merope.geometry.poses import rigid
from merope.geometry.quaternions import matrix_from_quaternion

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=25)
hypothesis.settings.load_profile("repeatable")
torch.set_num_threads(1)


def keep_freed_memory() -> None:
    """glibc hands large tensors back to the system, which clears their memory anew: a quarter of a VAE's time."""
    trim_threshold, mmap_max = -1, -4  # of malloc.h
    ctypes.CDLL(None).mallopt(mmap_max, 0)
    ctypes.CDLL(None).mallopt(trim_threshold, 2**31 - 1)


keep_freed_memory()

SLOW_FIRST = ("tests", "bench", "train", "demo", "paper", "studio")
"""Folders whose tests take longest: begun first, so that no process waits for another at the end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "add up products in an order that depends on their shapes (tests/strangers_cpu.py)"
    parser.addoption("--strangers-cpu", action="store_true", help=help)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "usual_sums(why): not for --strangers-cpu")
    if config.getoption("strangers_cpu"):
        replaced = strangers_cpu()
        replaced.__enter__()
        config.add_cleanup(lambda: replaced.__exit__(None, None, None))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent.name not in SLOW_FIRST)
    for item in items if config.getoption("strangers_cpu") else ():
        if mark := item.get_closest_marker("usual_sums"):
            item.add_marker(pytest.mark.skip(mark.args[0]))


def pytest_collection_finish() -> None:
    """What was imported stays: no search for garbage goes through it. Old objects are searched ten times less often."""
    gc.freeze()
    gc.set_threshold(700, 10, 100)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def highway() -> torch.Tensor:  # [6, 4, 4] float64
    """Six real highway poses, a second apart, in Earth-centred coordinates of 6.4e6 m (tests/data/README.md)."""
    folder = Path(__file__).parent / "data" / "comma2k19"
    positions = torch.from_numpy(np.load(folder / "frame_positions.npy"))[:120:20]
    orientations = torch.from_numpy(np.load(folder / "frame_orientations.npy"))[:120:20]
    forward_right_down = matrix_from_quaternion(torch.nn.functional.normalize(orientations, dim=-1))
    return rigid(forward_right_down[..., [1, 2, 0]], positions)

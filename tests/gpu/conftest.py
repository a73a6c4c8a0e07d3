"""Tests of what only runs on a GPU: `make test-gpu`.

Without one, tests of the Hopper kernels run on a multiprocessor in C++ (tests/hopper_machine), but for those that are
marked `gpu`. The other files of this folder are skipped; with TRITON_INTERPRET=1 they run on the CPU, slowly.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # for modules of tests/ that import each other by their names

from tests import hopper_machine

HAS_GPU = torch.cuda.is_available()
NO_GPU = "tests/gpu needs a CUDA GPU (torch.cuda.is_available() is False)"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class SkippedModule(pytest.Module):
    """A file of tests that is not even imported."""

    def collect(self) -> list[Any]:
        pytest.skip(NO_GPU, allow_module_level=True)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU's time or driver, not its kernels alone")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    runs = HAS_GPU or INTERPRETED or (on_the_machine(module_path) and not needs_triton(module_path))
    return None if runs else SkippedModule.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [] if HAS_GPU else [item for item in items if item.get_closest_marker("gpu")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def on_the_machine(module_path: Path) -> bool:
    return module_path.name.startswith("test_gpu_hopper") and hopper_machine.why_not() is None


def needs_triton(module_path: Path) -> bool:
    """Tokens without a camera are turned by Triton's kernels."""
    return module_path.name == "test_gpu_hopper_parts.py"


@pytest.fixture(autouse=True)
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_GPU and on_the_machine(request.path):
        hopper_machine.use(monkeypatch)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is NaN: what a kernel leaves unwritten shows."""

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def fresh(*arguments: Any, **options: Any) -> Tensor:
            x = make(*arguments, **options)
            if x.is_floating_point():
                x.detach().fill_(torch.nan)
            return x

        return fresh

    monkeypatch.setattr(Tensor, "new_empty", poisoned(Tensor.new_empty))
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))

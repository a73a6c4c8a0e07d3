"""Tests of what only runs on a GPU: `make test-gpu`. Without one, the files of this folder are skipped.

With TRITON_INTERPRET=1 they run on the CPU, slowly, but for those of the Hopper kernels.
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

NO_GPU = "tests/gpu needs a CUDA GPU (torch.cuda.is_available() is False)"


class SkippedModule(pytest.Module):
    """A file of tests that is not even imported."""

    def collect(self) -> list[Any]:
        pytest.skip(NO_GPU, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    runs = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
    return None if runs else SkippedModule.from_parent(parent, path=module_path)


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

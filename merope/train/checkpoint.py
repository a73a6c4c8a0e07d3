"""Checkpoints that are either whole or absent, written by any number of ranks and read by any other.

    checkpoints/step-00000500/        torch.distributed.checkpoint: weights that are trained, optimiser, moving average
    checkpoints/step-00000500/progress.json     step, place in the data, and what the run learns

A checkpoint is written beside its place and renamed into it when all ranks are done, and renamed again before it is
deleted, so that no moment of a crash leaves one that cannot be read.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from merope.errors import invalid

PART, OLD = ".part", ".old"
"""Endings of folders that are being written or deleted."""

TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True, strict=False)


@dataclass(frozen=True)
class Progress:
    """Where a run stands: everything that is not a tensor."""

    step: int  # steps that are done
    data: dict[str, Any]  # of the stream of clips
    learnt: dict[str, Any]  # what decides the result, see TrainConfig.learnt


def save(
    folder: Path,
    progress: Progress,
    model: nn.Module,
    optimiser: Optimizer,
    average: dict[str, Tensor],
    keep: int,
) -> Path:
    """Write a checkpoint; all ranks call it. Older ones than the newest `keep` are removed afterwards."""
    place = folder / f"step-{progress.step:08d}"
    part = place.with_name(place.name + PART)
    if _is_first():
        for left_over in (*folder.glob(f"step-*{PART}"), *folder.glob(f"step-*{OLD}")):
            shutil.rmtree(left_over)
    _wait()
    with _one_process_is_meant():
        tensors = _tensors(model, optimiser, average)
        state_dict_saver.save(tensors, checkpoint_id=part, no_dist=not dist.is_initialized())
    _wait()
    if _is_first():
        _write(part / "progress.json", json.dumps(vars(progress), default=str, indent=1))
        _flush(part)
        os.replace(part, place)
        _flush(folder)
        for old in complete(folder)[:-keep]:
            shutil.rmtree(old.rename(old.with_name(old.name + OLD)))
    _wait()
    return place


def load(place: Path, model: nn.Module, optimiser: Optimizer, average: dict[str, Tensor]) -> Progress:
    """Fill model, optimiser and average in place, whatever ranks wrote them."""
    tensors = _tensors(model, optimiser, average)
    with _one_process_is_meant():
        state_dict_loader.load(tensors, checkpoint_id=place, no_dist=not dist.is_initialized())
    set_model_state_dict(model, tensors["model"], options=TRAINED_ONLY)
    set_optimizer_state_dict(model, optimiser, tensors["optimiser"])
    return read_progress(place)


def load_weights(place: Path, model: nn.Module, averaged: bool) -> None:
    """Fill the trained weights of a model alone, for export and inference."""
    name = "average" if averaged else "model"
    tensors = {name: get_model_state_dict(model, options=TRAINED_ONLY)}
    with _one_process_is_meant():
        state_dict_loader.load(tensors, checkpoint_id=place, no_dist=not dist.is_initialized())
    set_model_state_dict(model, tensors[name], options=TRAINED_ONLY)


def read_progress(place: Path) -> Progress:
    try:
        return Progress(**json.loads((place / "progress.json").read_text()))
    except FileNotFoundError:
        raise invalid("checkpoint", "a folder with progress.json", str(place), "name a step-… folder") from None


def complete(folder: Path) -> list[Path]:
    """All whole checkpoints, the newest last."""
    return sorted(place for place in folder.glob("step-*") if place.suffix not in (PART, OLD))


def _tensors(model: nn.Module, optimiser: Optimizer, average: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model, options=TRAINED_ONLY),
        "optimiser": get_optimizer_state_dict(model, optimiser),
        "average": average,
    }


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Without ranks torch warns that it assumes one process; that is what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process")
        yield


def _write(file: Path, text: str) -> None:
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _flush(folder: Path) -> None:
    """What a folder lists must reach the disk, too: new files and the rename itself."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()

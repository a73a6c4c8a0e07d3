"""Checkpoints that are either whole or absent, written by any number of ranks and read by any other.

    checkpoints/step-00000500/        torch.distributed.checkpoint: weights that are trained, optimiser, moving average
    checkpoints/step-00000500/progress.json     step, place in the data, and what the run learns

A checkpoint is written beside its place and renamed into it when all ranks are done, so that no moment of a crash
leaves one that cannot be read.
"""

import json
import os
import shutil
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

PART = ".part"
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
    if _is_first() and part.exists():
        shutil.rmtree(part)
    _wait()
    state_dict_saver.save(_tensors(model, optimiser, average), checkpoint_id=part, no_dist=not dist.is_initialized())
    _wait()
    if _is_first():
        _write(part / "progress.json", json.dumps(vars(progress), default=str, indent=1))
        if place.exists():  # the same step again, after a resume from an older one
            shutil.rmtree(place)
        os.replace(part, place)
        _flush(folder)
        for old in complete(folder)[:-keep]:
            shutil.rmtree(old)
    _wait()
    return place


def load(place: Path, model: nn.Module, optimiser: Optimizer, average: dict[str, Tensor]) -> Progress:
    """Fill model, optimiser and average in place, whatever ranks wrote them."""
    tensors = _tensors(model, optimiser, average)
    state_dict_loader.load(tensors, checkpoint_id=place, no_dist=not dist.is_initialized())
    set_model_state_dict(model, tensors["model"], options=TRAINED_ONLY)
    set_optimizer_state_dict(model, optimiser, tensors["optimiser"])
    return read_progress(place)


def load_weights(place: Path, model: nn.Module, averaged: bool) -> None:
    """Fill the trained weights of a model alone, for export and inference."""
    name = "average" if averaged else "model"
    tensors = {name: get_model_state_dict(model, options=TRAINED_ONLY)}
    state_dict_loader.load(tensors, checkpoint_id=place, no_dist=not dist.is_initialized())
    set_model_state_dict(model, tensors[name], options=TRAINED_ONLY)


def read_progress(place: Path) -> Progress:
    try:
        return Progress(**json.loads((place / "progress.json").read_text()))
    except FileNotFoundError:
        raise invalid("checkpoint", "a folder with progress.json", str(place), "name a step-… folder") from None


def complete(folder: Path) -> list[Path]:
    """All whole checkpoints, the newest last."""
    return sorted(place for place in folder.glob("step-*") if place.suffix != PART)


def _tensors(model: nn.Module, optimiser: Optimizer, average: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model, options=TRAINED_ONLY),
        "optimiser": get_optimizer_state_dict(model, optimiser),
        "average": average,
    }


def _write(file: Path, text: str) -> None:
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _flush(folder: Path) -> None:
    """The rename itself must reach the disk."""
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

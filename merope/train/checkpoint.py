"""Checkpoints that are either whole or absent, written by any number of ranks and read by any other.

    checkpoints/step-00000500/                  torch.distributed.checkpoint: trained weights, optimiser, moving average
    checkpoints/step-00000500/progress.json     step, place in the data, and what the run learns
    checkpoints/step-00000500/sha256-0.json     checksums of the files that rank 0 wrote

A checkpoint is written beside its place. It is renamed into it when all ranks are done, and renamed again before it is
deleted. So no moment of a crash leaves one that cannot be read.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from merope.draw.progress import show_line
from merope.errors import invalid
from merope.train.checkpoint_files import (
    Damaged,
    SafePlanner,
    SafeReader,
    find_damage,
    has_checksums,
    write_checksums,
)

PART, OLD, DAMAGED = ".part", ".old", ".damaged"
"""Endings of folders that are being written, being deleted, or set aside because they cannot be read."""

SCANT_BYTES = 64_000_000
"""A disk with less room is named when a checkpoint cannot be written: torch does not say that it is full."""

TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True, strict=False)


@dataclass(frozen=True)
class Progress:
    """Where a run stands: everything that is not a tensor."""

    step: int  # steps that are done
    data: dict[str, Any]  # of the stream of clips
    learnt: dict[str, Any]  # what decides the result, see TrainConfig.learnt

    def __post_init__(self) -> None:
        if type(self.step) is not int or self.step < 0:
            raise invalid("step", "an int ≥ 0", repr(self.step), "take a file that nobody edited")
        for name, value in (("data", self.data), ("learnt", self.learnt)):
            if not isinstance(value, dict):
                raise invalid(name, "a table", repr(value)[:40], "take a file that nobody edited")


def save(
    folder: Path,
    progress: Progress,
    model: nn.Module,
    optimisers: Sequence[Optimizer],
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
    try:
        with _one_process_is_meant():
            tensors = _tensors(model, optimisers, average)
            state_dict_saver.save(tensors, checkpoint_id=part, no_dist=not dist.is_initialized())
        if _is_first():
            (part / "progress.json").write_text(json.dumps(vars(progress), default=str, indent=1))
            _flush(part / "progress.json")
        _flush(write_checksums(part, _rank()))
    except (CheckpointException, OSError) as error:
        raise _not_written(part, error) from None
    _wait()
    if _is_first():
        _flush(part)
        os.replace(part, place)
        _flush(folder)
        for old in complete(folder)[:-keep]:
            shutil.rmtree(old.rename(old.with_name(old.name + OLD)))
    _wait()
    return place


def resume(
    folder: Path,
    check: Callable[[Progress], None],  # raises if the run must not go on
    model: nn.Module,
    optimisers: Sequence[Optimizer],
    average: dict[str, Tensor],
) -> Progress | None:
    """Load the newest checkpoint that can be read; None if there are none. Damaged ones make way for new ones."""
    damaged: list[Damaged] = []
    for place in reversed(complete(folder)):
        try:
            progress = read_progress(place)
            check(progress)
            load(place, model, optimisers, average)
        except Damaged as error:
            damaged.append(error)
            continue
        if _is_first():
            _set_aside(damaged, place)
        _wait()
        return progress
    if damaged:
        got = "; ".join(f"{error.place.name}: {error.reason}" for error in damaged)
        fix = "put a copy back, or delete them to begin anew"
        raise invalid(str(folder), "a folder with a checkpoint that can be read", got, fix)
    return None


def load(place: Path, model: nn.Module, optimisers: Sequence[Optimizer], average: dict[str, Tensor]) -> None:
    """Fill model, optimisers and average in place, whatever ranks wrote them."""
    tensors = _tensors(model, optimisers, average)
    _fill(tensors, place)
    set_model_state_dict(model, tensors["model"], options=TRAINED_ONLY)
    set_optimizer_state_dict(model, optimisers, tensors["optimiser"])


def load_weights(place: Path, model: nn.Module, averaged: bool) -> None:
    """Fill the trained weights of a model alone, for export and inference."""
    name = "average" if averaged else "model"
    tensors = {name: get_model_state_dict(model, options=TRAINED_ONLY)}
    _fill(tensors, place)
    set_model_state_dict(model, tensors[name], options=TRAINED_ONLY)


def read_progress(place: Path) -> Progress:
    """Where the run of a checkpoint stood. All ranks call it; all raise `Damaged` if any file is not as written."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    found = [find_damage(place, _rank(), ranks)] * ranks
    if ranks > 1:
        dist.all_gather_object(found, found[0])
    if any(found):
        raise Damaged(place, next(filter(None, found)))
    if not has_checksums(place) and _is_first():
        show_line(f"{place} has no checksums, as version 0.1.0 wrote it: damage in it would not be seen", keep=True)
    try:
        return Progress(**json.loads((place / "progress.json").read_text()))
    except (ValueError, TypeError, RecursionError, OSError) as error:
        raise Damaged(place, f"progress.json cannot be read: {error}") from None


@contextmanager
def naming_a_whole_one() -> Iterator[None]:
    """Where one checkpoint was asked for and is damaged, the error names the newest other one that can be read."""
    try:
        yield
    except Damaged as error:
        for place in reversed(complete(error.place.parent)):
            if place.name != error.place.name and _can_be_read(place):
                raise Damaged(error.place, error.reason, place) from None
        raise


def complete(folder: Path) -> list[Path]:
    """All checkpoints that were written to the end, the newest last."""
    return sorted(place for place in folder.glob("step-*") if not place.suffix)


def _can_be_read(place: Path) -> bool:
    try:
        read_progress(place)
        return True
    except Damaged:
        return False


def _set_aside(damaged: list[Damaged], instead: Path) -> None:
    for error in damaged:
        aside = error.place.with_name(error.place.name + DAMAGED)
        shutil.rmtree(aside, ignore_errors=True)
        error.place.rename(aside)
        kept = f"it is now {aside.name}, and the run goes on from {instead.name}"
        show_line(f"{error.place.name} is damaged ({error.reason}); {kept}", keep=True)


def _tensors(model: nn.Module, optimisers: Sequence[Optimizer], average: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model, options=TRAINED_ONLY),
        "optimiser": get_optimizer_state_dict(model, optimisers),
        "average": average,
    }


def _fill(tensors: dict[str, Any], place: Path) -> None:
    try:
        with _one_process_is_meant():
            alone = not dist.is_initialized()
            state_dict_loader.load(tensors, storage_reader=SafeReader(place), planner=SafePlanner(), no_dist=alone)
    except CheckpointException as error:
        raise Damaged(place, _cause(error)) from None


def _not_written(part: Path, error: BaseException) -> OSError:
    """What to tell the user. What was written of the checkpoint is removed: the disk may be full."""
    problem = _cause(error) + _lack_of_room(part.parent)
    if _is_first():
        shutil.rmtree(part, ignore_errors=True)
    older = complete(part.parent)
    kept = f"the newest whole checkpoint is {older[-1]}" if older else "there is no older checkpoint"
    fix = "make room for it and run the same command again"
    return OSError(f"{part.with_suffix('')} could not be written: {problem}; {kept}; {fix}")


def _lack_of_room(folder: Path) -> str:  # "" if there is room
    try:
        free = shutil.disk_usage(folder).free
    except OSError:  # the folder itself is gone
        return ""
    return f" (the disk of {folder} may be full: {free / 1e6:.1f} MB are free)" if free < SCANT_BYTES else ""


def _cause(error: BaseException) -> str:
    """The first line of what went wrong, on the first rank where it did."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return next(iter(str(error).splitlines()), type(error).__name__)


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Without ranks torch warns that it assumes one process; that is what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process")
        yield


def _flush(path: Path) -> None:
    """Have a file, or what a folder lists, reach the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _is_first() -> bool:
    return _rank() == 0


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()

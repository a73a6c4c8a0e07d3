"""Files of tensors that carry their own checksum: a byte that changed on the disk is found where they are read.

The checksum stands in the head of the file. Several processes may write one file at once: whoever was last left a file
that agrees with itself.
"""

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from merope.errors import invalid
from merope.formats.stores import exists, fetched, is_remote
from merope.formats.writing import replace_tensors

SHA256 = "sha256"


def write_checked(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file in one step. Tensors are contiguous and on the CPU."""
    replace_tensors(file, tensors, {SHA256: _digest(tensors)})


def read_checked(file: Path) -> dict[str, Tensor]:
    """What was written, or a ValueError. Files of older versions have no checksum and are taken as they are."""
    with fetched(file) as local, safe_open(local, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, it is no dict
        expected = (opened.metadata() or {}).get(SHA256)
    if expected is not None and expected != _digest(tensors):
        fix = "run the same `merope data cache` again"
        raise invalid(str(file), "what was written", "other numbers: its checksum differs", fix)
    return tensors


def is_whole(file: Path) -> bool:
    """Whether a file is there as it was written. Stores hold whole files only, and reading all would fetch them all."""
    if is_remote(file):
        return exists(file)
    try:
        read_checked(file)
        return True
    except (OSError, ValueError, SafetensorError):
        return False


def _digest(tensors: dict[str, Tensor]) -> str:
    """Of names, types, shapes and numbers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()

"""Numbers that the public code of a method computed (tests/data/README.md), and ours for the same input."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from merope import Cameras, Lens, Pinhole, attend
from merope.encodings.protocol import Encoding

FOLDER = Path(__file__).parent / "data" / "golden"


class Golden:
    """One file of numbers: q, k, v, cameras, grid, and the outputs of the public code."""

    def __init__(self, file: str) -> None:
        self.numbers = np.load(FOLDER / file)
        self.head_dim: int = self["q"].shape[-1]

    def __contains__(self, name: str) -> bool:
        return name in self.numbers

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self.numbers[name])

    @property
    def pinhole(self) -> Pinhole:
        """The lens of its intrinsics, for files that have them."""
        return Pinhole(*self["intrinsics"].unbind(-1), *self.numbers["image_size"].tolist())

    def attended(self, encoding: Encoding, lens: Lens, backend: str, **options: Tensor) -> Tensor:  # [B, H, N, d]
        """Our attention of its q, k and v; options are those of `Encoding.plan`."""
        rows, columns = self.numbers["grid"].tolist()
        plan = encoding.plan(Cameras(self["world_from_camera"], lens), (rows, columns), **options)
        return attend(self["q"], self["k"], self["v"], plan, backend=backend)  # type: ignore[arg-type]

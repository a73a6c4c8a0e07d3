"""Several data sets as one table of clips, with the chance that each of them has in a draw."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from merope.curation.curate import Curation, read_manifest
from merope.datasets.data_kind import FileData
from merope.datasets.loader import ClipSource, curation_of
from merope.errors import invalid
from merope.formats.trajectory import Trajectory


@dataclass(frozen=True, eq=False)
class Sourced:
    """What was loaded, and the number of the source that it is from."""

    source: int
    clip: Any


@dataclass(frozen=True)
class MixedSource(ClipSource[Sourced]):
    """The clips of all sources, one source after the other. Names begin with that of their source."""

    names: tuple[str, ...]
    parts: tuple[ClipSource[Any], ...]

    def __post_init__(self) -> None:
        for name, part in zip(self.names, self.parts, strict=True):
            if len(part) == 0:
                raise invalid(f"source {name!r} of the mixture", "at least one clip", "none", "check it, or remove it")

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    @cached_property
    def starts(self) -> list[int]:
        """The first clip of every source."""
        return list(accumulate((len(part) for part in self.parts[:-1]), initial=0))

    def place(self, index: int) -> tuple[int, int]:  # number of the source, number of the clip in it
        source = bisect_right(self.starts, index) - 1
        return source, index - self.starts[source]

    def name(self, index: int) -> str:
        source, own = self.place(index)
        return f"{self.names[source]}/{self.parts[source].name(own)}"

    def clip(self, index: int) -> Sourced:
        source, own = self.place(index)
        return Sourced(source, self.parts[source].clip(own))

    def trajectory(self, index: int) -> Trajectory:
        source, own = self.place(index)
        return replace(self.parts[source].trajectory(own), name=self.name(index))

    def doubts(self) -> list[str]:
        return [
            f"{name}: {doubt}" for name, part in zip(self.names, self.parts, strict=True) for doubt in part.doubts()
        ]


@dataclass(frozen=True)
class EvenlyMixed(ClipSource[Sourced]):
    """As many clips of every source, spread over all that it has: what a mixture validates on."""

    names: tuple[str, ...]
    parts: tuple[ClipSource[Any], ...]
    numbers: tuple[int, ...]  # of the sources among those that are trained on

    def __len__(self) -> int:
        return len(self.parts) * min((len(part) for part in self.parts), default=0)

    def _place(self, index: int) -> tuple[int, int]:
        each = len(self) // len(self.parts)
        part, place = divmod(index, each)
        return part, place * len(self.parts[part]) // each

    def name(self, index: int) -> str:
        part, own = self._place(index)
        return f"{self.names[part]}/{self.parts[part].name(own)}"

    def clip(self, index: int) -> Sourced:
        part, own = self._place(index)
        return Sourced(self.numbers[part], self.parts[part].clip(own))


def source_curation(source: ClipSource[Any], data: FileData) -> Curation:
    """The clusters that a section names, all clips in one where it names none. A clip that is drawn is a prototype."""
    own = torch.arange(len(source))
    curation = Curation(torch.zeros(len(source), dtype=torch.long), own)
    if data.clusters is not None:
        curation = curation_of(source, read_manifest(data.clusters), str(data.clusters))
    return curation if data.prototypes_only else Curation(curation.cluster, own)


def joined(
    curations: Sequence[Curation],
    weights: Sequence[float],
) -> tuple[Curation, Tensor]:  # of all clips; [clusters] chances that add up to 1
    """Curations of several sources as one. A source has its share of the draws, and its clusters share that evenly."""
    clusters, prototypes, chances = [], [], []
    first_cluster = first_clip = 0
    for curation, weight in zip(curations, weights, strict=True):
        drawn = curation.cluster[curation.kept].unique()
        of_clusters = torch.zeros(int(curation.cluster.max()) + 1, dtype=torch.float64)
        of_clusters[drawn] = weight / sum(weights) / len(drawn)
        clusters.append(curation.cluster + first_cluster)
        prototypes.append(curation.prototype + first_clip)
        chances.append(of_clusters)
        first_cluster, first_clip = first_cluster + len(of_clusters), first_clip + len(curation.cluster)
    return Curation(torch.cat(clusters), torch.cat(prototypes)), torch.cat(chances)

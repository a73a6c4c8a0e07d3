"""The kinds of training data by the name that `[data] kind` has in a config, and the mixture of several."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from merope.datasets.cache import CachedData
from merope.datasets.data_kind import Data, FileData
from merope.datasets.loader import ClipSource
from merope.datasets.mixture import EvenlyMixed, MixedSource
from merope.datasets.nuscenes_clips import NuScenesData
from merope.datasets.openscene import OpenSceneData
from merope.datasets.panshot_clips import PanShotData
from merope.datasets.videos import VideoData
from merope.datasets.world_data import WorldData
from merope.errors import invalid

DATA_KINDS: dict[str, type[Data]] = {
    "world": WorldData,
    "nuscenes": NuScenesData,
    "videos": VideoData,
    "panshot": PanShotData,
    "openscene": OpenSceneData,
    "cache": CachedData,
}

Opened = tuple[ClipSource[Any], ClipSource[Any] | None]
"""Clips to train on, and to validate on."""

SIZES = ("frames", "height", "width")
PLAIN = {"noise_draws": 1, "keep_renders": None, "workers": 8}
"""Keys of sources that a mixture has no use for, with their defaults."""


@dataclass(frozen=True)
class MixtureData(FileData):
    """Several data sets, drawn by one sampler: by the weights of the sources, or over one set of clusters of all."""

    kind: Literal["mixture"]
    sources: tuple[Data, ...] = field(metadata={"kinds": DATA_KINDS})
    may_differ: tuple[Literal["frame_rate", "scale"], ...] = ()  # what need not be the same in all sources
    knows_places: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.sources:
            raise invalid("data.sources", "at least one", "none", "add [[data.sources]] with a kind")
        shared = [name for name, count in Counter(self.source_names).items() if count > 1]
        if shared:
            raise invalid("names of data.sources", "different", f"{shared[0]!r} twice", 'give each a name = "…"')
        for name, source in zip(self.source_names, self.sources, strict=True):
            _check_source(f"source {name!r} of the mixture", name, source)
        self._check_sizes()
        if self.clusters is not None:
            self._check_joint_clusters()

    @property
    def source_names(self) -> tuple[str, ...]:
        """What the sources are called: their name, or their kind."""
        return tuple(source.name or source.kind for source in self.sources)

    @property
    def views(self) -> int:
        return max(source.views for source in self.sources)

    @property
    def is_encoded(self) -> bool:
        return all(source.is_encoded for source in self.sources)

    def source(self, name: str) -> Data:
        """One of the sources."""
        if name not in self.source_names:
            raise invalid("source", f"one of {', '.join(self.source_names)}", repr(name), "name one of data.sources")
        return self.sources[self.source_names.index(name)]

    def check_files(self, where: str = "data") -> None:
        super().check_files(where)
        for number, source in enumerate(self.sources):
            source.check_files(f"{where}.sources[{number}]")

    def opened(self, open_source: Callable[[Data], Opened]) -> tuple[MixedSource, EvenlyMixed | None]:
        """The clips of all sources to train on, and of those that have any to validate on."""
        pairs = [open_source(source) for source in self.sources]
        tables = MixedSource(self.source_names, tuple(training for training, _ in pairs))
        held_out = [
            (name, clips, number)
            for number, (name, (_, clips)) in enumerate(zip(self.source_names, pairs, strict=True))
            if clips is not None
        ]
        return tables, EvenlyMixed(*zip(*held_out, strict=True)) if held_out else None

    def training_clips(self) -> MixedSource:
        """Those of files; worlds have none."""
        return self.opened(_files)[0]

    def validation_clips(self) -> EvenlyMixed | None:
        return self.opened(_files)[1]

    def _named(self) -> list[tuple[str, Data]]:
        return list(zip(self.source_names, self.sources, strict=True))

    def _check_sizes(self) -> None:
        """Frames of one length and size. Those of a cache are known when it is read."""
        sizes = {
            name: tuple(getattr(source, key) for key in SIZES)
            for name, source in self._named()
            if all(hasattr(source, key) for key in SIZES)
        }
        if len(set(sizes.values())) > 1:
            got = ", ".join(f"{name} with {'×'.join(map(str, size))}" for name, size in sizes.items())
            raise invalid("data.sources", "of one frames × height × width", got, "give all of them the same three")

    def _check_joint_clusters(self) -> None:
        for name, source in self._named():
            if not isinstance(source, FileData):
                fix = "leave it out, or use weights"
                raise invalid("data.sources with data.clusters", "clips that a manifest can name", f"{name!r}", fix)
            if source.clusters is not None or source.prototypes_only or source.weight != 1.0:
                fix = "leave these to [data], or give every source its own clusters and a weight"
                raise invalid(f"source {name!r} of the mixture", "without clusters and weight of its own", "some", fix)


def _files(source: Data) -> Opened:
    if not isinstance(source, FileData):
        raise invalid(
            f"source {source.name or source.kind!r}", "one with files", repr(source.kind), "leave it out here"
        )
    return source.training_clips(), source.validation_clips()


def _check_source(where: str, name: str, source: Data) -> None:
    if isinstance(source, MixtureData):
        raise invalid(where, "no mixture itself", "another one", "list all sources in one [data]")
    if "/" in name:
        raise invalid(f"name of {where}", "without /", repr(name), "names of clips begin with it and a /")
    if not 0 < source.weight < math.inf:
        raise invalid(f"weight of {where}", "positive and finite", source.weight, "leave the source out instead of 0")
    for key in fields(source):
        if key.name in PLAIN and getattr(source, key.name) != PLAIN[key.name]:
            fix = "leave it out" + (", set it in [data]" if key.name == "workers" else "")
            raise invalid(f"{key.name} of {where}", "not given", getattr(source, key.name), fix)


DATA_KINDS["mixture"] = MixtureData

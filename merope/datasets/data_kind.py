"""What every kind of training data is: the section [data] of a config, which opens its own clips.

A new data set is one file with a subclass of `FrameData`, and one entry in `merope.datasets.kinds.DATA_KINDS`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from merope.datasets.loader import ClipSource
from merope.errors import invalid
from merope.formats.stores import exists


@dataclass(frozen=True)
class Data:
    """A section [data]. Subclasses declare `kind` as a Literal: TOML files tell them apart by it."""

    kind: str
    name: str = field(default="", kw_only=True)  # of a source of a mixture, in logs and manifests; its kind by default
    weight: float = field(default=1.0, kw_only=True)  # of a source of a mixture: its share of the draws
    knows_places: ClassVar[bool] = False  # whether frames of the same place can be retrieved for its clips

    @property
    def source_names(self) -> tuple[str, ...]:
        """What a mixture calls its sources; nothing else has any."""
        return ()

    @property
    def views(self) -> int:
        """Cameras of every moment, where the section tells: more than one are a rig."""
        return 1

    @property
    def is_encoded(self) -> bool:
        """Whether all clips come as latents and text, so that no text encoder is needed."""
        return False

    def check_files(self, where: str = "data") -> None:
        """Refuse data that are not there. This is called before a model is read, which takes minutes."""


@dataclass(frozen=True, kw_only=True)
class FileData(Data, ABC):
    """Clips that are read from files by workers."""

    clusters: Path | None = None  # manifest of `merope curate`, for class-balanced sampling
    workers: int = 8  # processes that read clips; no more than there are cores are used
    prototypes_only: bool = False  # draw only the clips that the manifest marks as prototypes

    def check_files(self, where: str = "data") -> None:
        for key in fields(self):
            path = getattr(self, key.name)
            if isinstance(path, Path) and not exists(path):
                fix = f"check it; a relative path starts from {Path.cwd()}, where the command runs"
                raise invalid(f"{where}.{key.name}", "a file or folder that exists", str(path), fix)

    @abstractmethod
    def training_clips(self) -> ClipSource[Any]:
        """The clips to train on."""

    @abstractmethod
    def validation_clips(self) -> ClipSource[Any] | None:
        """The clips to validate on, if the section names any."""


class PlacedClips(ABC):
    """How kinds open their clips that have a key for where those to train on are, and one for those to validate on."""

    places: ClassVar[tuple[str, str]]  # the two keys

    @abstractmethod
    def clips_of(self, place: Any) -> ClipSource[Any]:
        """The clips that a value of one of the keys names."""

    def training_clips(self) -> ClipSource[Any]:
        return self.clips_of(getattr(self, self.places[0]))

    def validation_clips(self) -> ClipSource[Any] | None:
        place = getattr(self, self.places[1])
        return None if place is None else self.clips_of(place)


@dataclass(frozen=True, kw_only=True)
class FrameData(FileData):
    """Clips as frames, which the model's VAE encodes. All have one length and size."""

    frames: int = 49
    height: int = 288
    width: int = 512

    def clips_with_history(
        self,
        count: int,  # references asked for
        latent_stride: int,  # RGB frames per latent frame
    ) -> tuple[ClipSource[Any], ClipSource[Any] | None]:  # to train on, to validate on
        """The same clips, each with frames that other drives took of its place. Kinds that know places have them."""
        raise invalid("data.kind", "one whose clips know their place", repr(self.kind), "leave out [history]")

"""The kinds of training data by the name that `[data] kind` has in a config."""

from merope.datasets.cache import CachedData
from merope.datasets.data_kind import Data
from merope.datasets.nuscenes_clips import NuScenesData
from merope.datasets.openscene import OpenSceneData
from merope.datasets.panshot_clips import PanShotData
from merope.datasets.videos import VideoData
from merope.datasets.world_data import WorldData

DATA_KINDS: dict[str, type[Data]] = {
    "world": WorldData,
    "nuscenes": NuScenesData,
    "videos": VideoData,
    "panshot": PanShotData,
    "openscene": OpenSceneData,
    "cache": CachedData,
}

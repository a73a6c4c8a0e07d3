"""Drive a video model with a camera path in metres."""

from merope.attention.dispatch import attend
from merope.attention.plan import AttentionPlan
from merope.encodings import encoding
from merope.encodings.gta import GTA
from merope.encodings.merope import MeRoPE
from merope.geometry.cameras import Cameras
from merope.geometry.distorted_lenses import BrownConrady, KannalaBrandt
from merope.geometry.lenses import DoubleSphere, Equirectangular, ExtendedUnified, Lens, Pinhole, UnifiedCamera

__version__ = "0.1.0"

__all__ = [
    "GTA",
    "AttentionPlan",
    "BrownConrady",
    "Cameras",
    "DoubleSphere",
    "Equirectangular",
    "ExtendedUnified",
    "KannalaBrandt",
    "Lens",
    "MeRoPE",
    "Pinhole",
    "UnifiedCamera",
    "attend",
    "encoding",
]

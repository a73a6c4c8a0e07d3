"""Drive a video model with a camera path in metres."""

from merope.attention.dispatch import attend
from merope.attention.plan import AttentionPlan
from merope.encodings import encoding
from merope.encodings.additive import AdditiveCamera, LatitudeUp, RayFeatures
from merope.encodings.depth_head import DepthHead
from merope.encodings.gta import GTA
from merope.encodings.merope import MeRoPE
from merope.encodings.scale import translation_scale
from merope.geometry.cameras import Cameras
from merope.geometry.distorted_lenses import BrownConrady, KannalaBrandt
from merope.geometry.lenses import DoubleSphere, Equirectangular, ExtendedUnified, Lens, Pinhole, UnifiedCamera

__version__ = "0.1.0"

__all__ = [
    "GTA",
    "AdditiveCamera",
    "AttentionPlan",
    "BrownConrady",
    "Cameras",
    "DepthHead",
    "DoubleSphere",
    "Equirectangular",
    "ExtendedUnified",
    "KannalaBrandt",
    "LatitudeUp",
    "Lens",
    "MeRoPE",
    "Pinhole",
    "RayFeatures",
    "UnifiedCamera",
    "attend",
    "encoding",
    "translation_scale",
]

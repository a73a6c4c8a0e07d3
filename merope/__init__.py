"""Drive a video model with a camera path in metres."""

from typing import TYPE_CHECKING, Any

from merope.attention.dispatch import attend
from merope.attention.plan import AttentionPlan
from merope.attention.visible_cameras import Visibility
from merope.encodings import encoding
from merope.encodings.additive import AdditiveCamera, LatitudeUp, RayFeatures
from merope.encodings.depth_head import DepthHead
from merope.encodings.gta import GTA
from merope.encodings.merope import MeRoPE
from merope.encodings.scale import translation_scale
from merope.evaluate.auc import pose_auc
from merope.evaluate.metrics import pose_metrics
from merope.geometry.cameras import Cameras
from merope.geometry.distorted_lenses import BrownConrady, KannalaBrandt
from merope.geometry.lenses import DoubleSphere, Equirectangular, ExtendedUnified, Lens, Pinhole, UnifiedCamera
from merope.geometry.rigs import Rig

if TYPE_CHECKING:
    from merope.adapters.attachment import attach, attached_branch, cameras, detach, load_branch
    from merope.adapters.branch_config import CameraBranchConfig
    from merope.adapters.camera_branch import CameraBranch
    from merope.adapters.causal_wan import attach_causal, detach_causal
    from merope.adapters.history import HistoryReferences
    from merope.generate.camera_video import CameraVideoPipeline
    from merope.generate.history_frames import HistoryFrames

__version__ = "0.1.0"

_NEEDS_DIFFUSERS = {
    "CameraBranch": "merope.adapters.camera_branch",
    "CameraBranchConfig": "merope.adapters.branch_config",
    "CameraVideoPipeline": "merope.generate.camera_video",
    "HistoryFrames": "merope.generate.history_frames",
    "HistoryReferences": "merope.adapters.history",
    "attach": "merope.adapters.attachment",
    "attach_causal": "merope.adapters.causal_wan",
    "attached_branch": "merope.adapters.attachment",
    "cameras": "merope.adapters.attachment",
    "detach": "merope.adapters.attachment",
    "detach_causal": "merope.adapters.causal_wan",
    "load_branch": "merope.adapters.attachment",
}
"""Imported at first use: importing merope alone does not import diffusers."""

__all__ = [
    "GTA",
    "AdditiveCamera",
    "AttentionPlan",
    "BrownConrady",
    "CameraBranch",
    "CameraBranchConfig",
    "CameraVideoPipeline",
    "Cameras",
    "DepthHead",
    "DoubleSphere",
    "Equirectangular",
    "ExtendedUnified",
    "HistoryFrames",
    "HistoryReferences",
    "KannalaBrandt",
    "LatitudeUp",
    "Lens",
    "MeRoPE",
    "Pinhole",
    "RayFeatures",
    "Rig",
    "UnifiedCamera",
    "Visibility",
    "attach",
    "attach_causal",
    "attached_branch",
    "attend",
    "cameras",
    "detach",
    "detach_causal",
    "encoding",
    "load_branch",
    "pose_auc",
    "pose_metrics",
    "translation_scale",
]


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_DIFFUSERS:
        raise AttributeError(f"module 'merope' has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(_NEEDS_DIFFUSERS[name]), name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        message = f"merope.{name} needs {package}, which is not installed: pip install 'merope[wan]'"
        raise ModuleNotFoundError(message, name=error.name) from error

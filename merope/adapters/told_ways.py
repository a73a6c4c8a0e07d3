"""All ways of telling a block numbers of its cameras, and which numbers each of them takes."""

from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from merope.adapters.additive_wan import AdditiveAttention
from merope.adapters.batching import clips_of_batch
from merope.adapters.camera_attention import plan_dtype
from merope.adapters.conditioning import CameraCondition
from merope.adapters.modulation_wan import ModulatedAttention
from merope.adapters.motionctrl_wan import MotionCtrlAttention
from merope.adapters.recammaster_wan import ReCamMasterAttention
from merope.adapters.told_processor import ToldProcessor
from merope.encodings.additive import AdditiveFeatures, LatitudeUp, RayFeatures
from merope.encodings.extrinsics import Extrinsics
from merope.errors import invalid

TOLD_PROCESSORS: dict[str, type[ToldProcessor]] = {
    "additive": AdditiveAttention,
    "recammaster": ReCamMasterAttention,
    "motionctrl": MotionCtrlAttention,
    "modulation": ModulatedAttention,
}
"""By integration."""

FEATURES: dict[str, type[RayFeatures] | type[LatitudeUp] | type[Extrinsics]] = {
    "plucker": RayFeatures,
    "origin_direction": RayFeatures,
    "latitude_up": LatitudeUp,
    "extrinsics": Extrinsics,
}
"""What `encoding` may be for them."""


def told(
    located: CameraCondition,
    features: AdditiveFeatures,
    latents: Tensor,  # [B, channels, T, H, W]
) -> CameraCondition:
    """The condition with the features of all tokens; every sample has those of its own view of a rig."""
    numbers, views = features.features(located.cameras, located.grid), located.cameras.views
    if views > 1:
        numbers = numbers.expand(clips_of_batch(located.cameras, len(latents)), -1, -1)
        numbers = numbers.unflatten(1, (views, -1)).flatten(0, 1)
    return replace(located, features=numbers.to(plan_dtype(latents)))


def make_features(name: str, options: dict[str, Any], translation_scale: float) -> AdditiveFeatures:
    """The numbers per token of that name."""
    kind, known = FEATURES[name], {field.name for field in fields(FEATURES[name])}
    if translation_scale != 1 and "translation_scale" not in known:
        raise invalid("translation_scale", f"1 for {name}", translation_scale, "it has no translations")
    decided: dict[str, Any] = {"kind": name, "translation_scale": translation_scale}
    return kind(**{key: value for key, value in decided.items() if key in known}, **options)

"""All ways of telling a block numbers of its cameras, and which numbers each of them takes."""

from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from merope.adapters.additive_wan import AdditiveAttention
from merope.adapters.batching import clips_of_batch
from merope.adapters.camera_attention import plan_dtype
from merope.adapters.conditioning import CameraCondition
from merope.adapters.epipolar_wan import EpipolarAttention
from merope.adapters.raype_wan import RayPEAttention
from merope.adapters.roce_wan import RoCEAttention
from merope.adapters.told_inputs import ModulatedAttention, MotionCtrlAttention, ReCamMasterAttention
from merope.adapters.told_processor import ToldProcessor
from merope.encodings.additive import AdditiveFeatures, LatitudeUp, RayFeatures
from merope.encodings.epipolar_rays import EpipolarRays
from merope.encodings.extrinsics import Extrinsics
from merope.encodings.raype import RayCoordinates
from merope.errors import invalid

TOLD_PROCESSORS: dict[str, type[ToldProcessor]] = {
    "additive": AdditiveAttention,
    "recammaster": ReCamMasterAttention,
    "motionctrl": MotionCtrlAttention,
    "modulation": ModulatedAttention,
    "epipolar": EpipolarAttention,
    "raype": RayPEAttention,
    "roce": RoCEAttention,
}
"""By integration."""

FEATURES: dict[str, type[RayFeatures] | type[LatitudeUp] | type[Extrinsics] | type[RayCoordinates]] = {
    "plucker": RayFeatures,
    "origin_direction": RayFeatures,
    "latitude_up": LatitudeUp,
    "extrinsics": Extrinsics,
    "camco": EpipolarRays,
    "raype": RayCoordinates,
}
"""What `encoding` may be for them."""

OWN_FEATURES = {"epipolar": "camco", "raype": "raype"}
"""Of ways that take no others, and that share them with no other."""


def features_for(integration: str) -> list[str]:
    """Names of the features that a way takes."""
    own = OWN_FEATURES.get(integration)
    return [own] if own else sorted(set(FEATURES) - set(OWN_FEATURES.values()))


def told(
    located: CameraCondition,
    features: AdditiveFeatures,
    latents: Tensor,  # [B, channels, T, H, W]
) -> CameraCondition:
    """The condition with the features of all tokens, and the mask where they have one.

    Every sample has the features of its own view of a rig.
    """
    numbers, views = features.features(located.cameras, located.grid), located.cameras.views
    if views > 1:
        numbers = numbers.expand(clips_of_batch(located.cameras, len(latents)), -1, -1)
        numbers = numbers.unflatten(1, (views, -1)).flatten(0, 1)
    mask = features.mask(located.cameras, located.grid) if isinstance(features, EpipolarRays) else None
    return replace(located, features=numbers.to(plan_dtype(latents)), mask=mask)


def make_features(name: str, options: dict[str, Any], translation_scale: float) -> AdditiveFeatures:
    """The numbers per token of that name."""
    kind, known = FEATURES[name], {field.name for field in fields(FEATURES[name])}
    if translation_scale != 1 and "translation_scale" not in known:
        raise invalid("translation_scale", f"1 for {name}", translation_scale, "it has no translations")
    decided: dict[str, Any] = {"translation_scale": translation_scale} | ({"kind": name} if kind is RayFeatures else {})
    return kind(**{key: value for key, value in decided.items() if key in known}, **options)

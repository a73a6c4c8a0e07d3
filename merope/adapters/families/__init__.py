"""The base models that a camera branch fits, one file of facts each."""

from collections.abc import Mapping
from typing import Any

from diffusers.models.modeling_utils import ModelMixin

from merope.adapters.families.cogvideox import COGVIDEOX
from merope.adapters.families.cosmos import COSMOS
from merope.adapters.families.facts import Family
from merope.adapters.families.hunyuan_video import HUNYUAN_VIDEO, HUNYUAN_VIDEO_15
from merope.adapters.families.kandinsky5 import KANDINSKY5
from merope.adapters.families.ltx2 import LTX2
from merope.adapters.families.ltx_video import LTX_VIDEO
from merope.adapters.families.skyreels import SKYREELS
from merope.adapters.families.wan_family import WAN, WAN_ANIMATE, WAN_VACE
from merope.errors import invalid

FAMILIES: dict[str, Family] = {
    family.transformer: family
    for family in (
        *(WAN, WAN_VACE, WAN_ANIMATE, SKYREELS, LTX_VIDEO, LTX2, HUNYUAN_VIDEO, HUNYUAN_VIDEO_15),
        *(COGVIDEOX, COSMOS, KANDINSKY5),
    )
}
"""By the name of the transformer's class."""

PAGE = "docs/bases.md"


def family_of(transformer: object) -> Family:
    """The family of a transformer, or an error that lists those that are known."""
    for kind in type(transformer).__mro__:
        if kind.__name__ in FAMILIES:
            return FAMILIES[kind.__name__]
    fix = "pass the transformer itself, before torch.compile, PEFT or FSDP wrap it"
    if hasattr(transformer, "transformer"):
        fix = "pass pipe.transformer"
    elif isinstance(transformer, ModelMixin):
        fix = f'see "Add a base model" in {PAGE}'
    known = ", ".join(f"{name} ({family.models})" for name, family in FAMILIES.items())
    raise invalid("transformer", f"one of {known}", type(transformer).__name__, fix)


def family_of_base(base: Mapping[str, Any]) -> Family:
    """The family that a saved branch was made for. Version 0.1.0 knew Wan only, and wrote no name."""
    return family_named(base.get("transformer", WAN.transformer), "the branch's base model")


def family_named(name: str, what: str = "transformer") -> Family:
    """The family of a class of transformers."""
    if name not in FAMILIES:
        fix = f'see "Add a base model" in {PAGE}'
        raise invalid(what, f"one of {', '.join(FAMILIES)}", name, fix)
    return FAMILIES[name]

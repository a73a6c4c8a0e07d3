"""Camera encodings by name."""

from dataclasses import fields
from typing import Any

from merope.encodings.cape import CaPE
from merope.encodings.crepe import CRePE
from merope.encodings.gta import GTA
from merope.encodings.merope import MeRoPE, MeRoPEPhases
from merope.encodings.none import NoEncoding
from merope.encodings.prope import PRoPE
from merope.encodings.protocol import Encoding
from merope.encodings.raynova import RayNova
from merope.encodings.rayrope import RayRoPE
from merope.encodings.ucpe import UCPE
from merope.encodings.ucpe_clamped import UCPEClamped
from merope.encodings.urope import URoPE
from merope.encodings.viewrope import ViewRope
from merope.errors import did_you_mean, invalid

ENCODINGS: dict[str, type[Encoding]] = {
    "merope": MeRoPE,
    "merope_phases": MeRoPEPhases,
    "cape": CaPE,
    "gta": GTA,
    "prope": PRoPE,
    "ucpe": UCPE,
    "ucpe_clamped": UCPEClamped,
    "raynova": RayNova,
    "viewrope": ViewRope,
    "urope": URoPE,
    "rayrope": RayRoPE,
    "crepe": CRePE,
    "none": NoEncoding,
}


def encoding(name: str, **options: Any) -> Encoding:
    """The encoding of that name; options (head_dim and the method's own) are the fields of its class."""
    if name not in ENCODINGS:
        fix = did_you_mean(name, ENCODINGS, "check the spelling")
        if name.lower() in ENCODINGS:
            fix = f"it is spelt {name.lower()!r}"
        raise invalid("name", f"one of {sorted(ENCODINGS)}", repr(name), fix)
    known = [f.name for f in fields(ENCODINGS[name])]
    for option in options:
        if option not in known:
            raise invalid(f"options of {name}", f"among {known}", repr(option), "see docs/encodings.md")
    return ENCODINGS[name](**options)

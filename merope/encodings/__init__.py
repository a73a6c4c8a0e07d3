"""Camera encodings by name."""

from typing import Any

from merope.encodings.gta import GTA
from merope.encodings.merope import MeRoPE
from merope.encodings.none import NoEncoding
from merope.encodings.protocol import Encoding
from merope.errors import invalid

ENCODINGS: dict[str, type[Encoding]] = {"merope": MeRoPE, "gta": GTA, "none": NoEncoding}


def encoding(name: str, **options: Any) -> Encoding:
    """The encoding of that name; options (head_dim and the method's own) are the fields of its class."""
    if name not in ENCODINGS:
        raise invalid("name", f"one of {sorted(ENCODINGS)}", repr(name), "check the spelling")
    return ENCODINGS[name](**options)

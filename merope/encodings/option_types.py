"""Options of encodings have the types that their classes declare: "False" in place of False would switch a block on."""

import types
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from merope.errors import invalid


def check_types(kind: type, options: Mapping[str, object], where: str = "") -> None:
    """Refuse options that are not what the fields of a class say. `where` stands before their names in messages."""
    hints = get_type_hints(kind)
    for name, value in options.items():
        if not has_type(value, hints[name]):
            expected, got = type_name(hints[name]), repr(value)
            if not (isinstance(value, str) and get_origin(hints[name]) is Literal):
                got += f" ({type(value).__name__})"
            fix = "write true or false, without quotes" if expected == "bool" else f"see the fields of {kind.__name__}"
            raise invalid(f"{where}{name}", expected, got, fix)


def has_type(value: object, hint: Any) -> bool:
    """Whether a value is what an annotation says. A list may stand for a tuple, a whole number for a float."""
    if get_origin(hint) in (Union, types.UnionType):
        return any(has_type(value, option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if get_origin(hint) in (tuple, list) and isinstance(value, list | tuple):
        items = get_args(hint)
        items = items[:1] * len(value) if get_origin(hint) is list or items[-1] is ... else items
        return len(items) == len(value) and all(map(has_type, value, items))
    if hint in (int, float):  # a bool is a number to Python
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return isinstance(value, get_origin(hint) or hint)


def type_name(hint: Any) -> str:
    """An annotation as a person reads it: bool, 'rope' or 'so2', tuple[int, int]."""
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join("none" if option is type(None) else type_name(option) for option in get_args(hint))
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)

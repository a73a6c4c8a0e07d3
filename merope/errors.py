"""How the library refuses bad input."""

import difflib
from collections.abc import Iterable


def invalid(name: str, expected: str, got: object, fix: str) -> ValueError:
    """The error for an argument: its name, what was expected, what came, and how to fix it."""
    return ValueError(f"{name} must be {expected}, got {got}; {fix}")


def did_you_mean(name: str, names: Iterable[str], otherwise: str) -> str:
    """The fix for a name that is not among some: the nearest of them, if one is near."""
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise

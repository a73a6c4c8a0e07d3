"""How the library refuses bad input."""


def invalid(name: str, expected: str, got: object, fix: str) -> ValueError:
    """The error for an argument: its name, what was expected, what came, and how to fix it."""
    return ValueError(f"{name} must be {expected}, got {got}; {fix}")

"""docs/training.md lists every key of a config with its default."""

import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from merope.adapters.branch_config import CameraBranchConfig
from merope.datasets.kinds import DATA_KINDS
from merope.train.config import TrainConfig

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def as_toml(field: "Field[Any]") -> str:
    """The default of a key as a config would have it."""
    if field.default is MISSING and field.default_factory is MISSING:
        return "needed"
    value = field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(list(value) if isinstance(value, tuple) else value)


def defaults() -> dict[str, str]:
    """Dotted keys with their defaults; keys of [data] also with the kinds of data that have them."""
    hints, found = get_type_hints(TrainConfig), {}
    for section, kind in hints.items():
        if section != "data":
            (kind,) = [option for option in (kind, *get_args(kind)) if hasattr(option, "__dataclass_fields__")]
            found |= {f"{section}.{field.name}": as_toml(field) for field in fields(kind)}
    assert {f"branch.{field.name}" for field in fields(CameraBranchConfig)} <= found.keys()
    of_data: dict[str, dict[str, list[str]]] = {}
    for name, kind in DATA_KINDS.items():
        for field in fields(kind):
            if field.name != "kind":
                of_data.setdefault(f"data.{field.name}", {}).setdefault(as_toml(field), []).append(name)
    for key, kinds_of in of_data.items():
        found[key] = "; ".join(f"{default} ({', '.join(kinds)})" for default, kinds in kinds_of.items())
    return found


def test_every_key_is_documented_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+\.\w+)` \| (.*?) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    documented = {key: default for key, default, _ in rows}
    assert len(documented) == len(rows)
    assert documented == defaults()

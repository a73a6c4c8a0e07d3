"""TOML files as frozen dataclasses: every key is known, every value has the declared type, or the file is refused.

A file may name another one as its `base`: it then only says what differs, so that a baseline or an ablation is a few
lines. Command lines add `--set section.key=value`, the value written as in TOML; there, words need no quotes, and True
and False may be written as in Python.
"""

import difflib
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from merope.encodings.option_types import has_type, type_name
from merope.errors import invalid

SHIPPED = Path(__file__).parents[1] / "configs"
"""The configs of the package; in a checkout a link to configs/."""

Config = TypeVar("Config")
Table = dict[str, Any]


def shipped_configs() -> dict[str, str]:
    """Names of the configs in the package, each with the first line of its comment."""
    files = {file.relative_to(SHIPPED).with_suffix("").as_posix(): file for file in SHIPPED.rglob("*.toml")}
    return {name: files[name].read_text().splitlines()[0].removeprefix("# ") for name in sorted(files)}


def find_config(file: Path) -> Path:
    """A file that exists, or the one in the package that is meant by `tiny` or `configs/tiny.toml`."""
    if file.is_file():
        return file
    name = file.as_posix().removeprefix("configs/").removesuffix(".toml")
    if name in shipped_configs():
        return SHIPPED / f"{name}.toml"
    near = difflib.get_close_matches(name, shipped_configs(), n=3)
    guess = f"did you mean {' or '.join(near)}? " if near else ""
    fix = f"{guess}`merope train --list` shows the names"
    raise invalid("config", "a TOML file, or the name of one in the package", str(file), fix)


def read_config(kind: type[Config], file: Path, changes: Sequence[str] = ()) -> Config:
    """The config of a file with `key=value` changes on top."""
    on_top: Table = {}
    for change in changes:
        on_top = merged(on_top, _parsed_change(change))
    return build(kind, merged(read_table(file), on_top))


def read_table(file: Path, above: tuple[Path, ...] = ()) -> Table:
    """The table of what `find_config` finds, laid over that of its `base`: a path relative to the file, or the name of
    one in the package."""
    file = find_config(Path(file)).resolve()
    if file in above:
        raise invalid("base", "a chain of files that ends", " → ".join(path.name for path in (*above, file)), "cut it")
    try:
        table = tomllib.loads(file.read_text())
    except (ValueError, RecursionError) as error:  # no TOML, no text, or brackets without end
        raise ValueError(f"{file} is not TOML: {error}") from None
    base = table.pop("base", None)
    if base is None:
        return table
    if not isinstance(base, str):
        raise invalid(f"base of {file}", "the path of a TOML file", repr(base), "put it in quotes")
    beside = file.parent / base
    return merged(read_table(beside if beside.is_file() else Path(base), (*above, file)), table)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Table:
    """Tables are merged key by key; anything else is replaced, also a table of another `kind`: it has other keys."""
    if "kind" in base and over.get("kind", base["kind"]) != base["kind"]:
        return dict(over)
    result = dict(base)
    for key, value in over.items():
        both_tables = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both_tables else value
    return result


def _parsed_change(change: str) -> Table:
    key, equals, value = change.partition("=")
    if not equals:
        raise invalid("--set", "key=value", repr(change), "for example --set run.steps=100")
    value = {"True": "true", "False": "false"}.get(value.strip(), value)
    try:
        parsed = tomllib.loads(f"{key.strip()} = {value}")
    except RecursionError:
        raise invalid("--set", "key=value", f"{change[:40]} …, nested too deeply", "check the brackets") from None
    except tomllib.TOMLDecodeError:  # a bare word is a string: nobody wants to quote quotes in a shell
        try:
            parsed = tomllib.loads(f"{key.strip()} = '''{value}'''")
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"--set {change!r} is not key=value: {error}") from None
    return parsed


def build(kind: type[Config], table: Mapping[str, Any], where: str = "") -> Config:
    """A dataclass from a table. `where` is the dotted path of the table in messages."""
    hints = get_type_hints(kind)
    known = {field.name: field for field in fields(kind) if field.init}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            fix = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise invalid(f"config key {where}{key}", "a known key", repr(key), fix)
    values = {}
    for name in (name for name in known if name in table):
        kinds = known[name].metadata.get("kinds")  # of tables that a dict registers, by their `kind`
        to_value = partial(_converted, hints[name]) if kinds is None else partial(_of_kind, kinds)
        values[name] = to_value(table[name], f"{where}{name}")
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise invalid(f"config key {where}{name}", "a value", "none", f"add it to [{where.rstrip('.') or 'top'}]")
    return kind(**values)


def _converted(hint: Any, value: Any, where: str) -> Any:
    """The value as the declared type says, or a refusal that names the key."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _converted_union(get_args(hint), value, where)
    if origin is Literal:
        if value not in get_args(hint):
            raise invalid(
                f"config key {where}", f"one of {', '.join(map(repr, get_args(hint)))}", repr(value), "pick one"
            )
        return value
    if is_dataclass(hint) and isinstance(value, dict):
        return build(hint, value, f"{where}.")  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, list):
        return _converted_tuple(get_args(hint), value, where)
    if origin is list and isinstance(value, list):
        return [_converted(get_args(hint)[0], item, f"{where}[{index}]") for index, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return value
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value).expanduser()
    if isinstance(hint, type) and type(value) is hint:
        return value
    raise _wrong_type(where, _described(hint), value)


def _of_kind(kinds: Mapping[str, Any], value: Any, where: str) -> Any:
    """The dataclass whose name is the table's `kind`; of an array of tables, those of all."""
    if isinstance(value, list):
        return tuple(_of_kind(kinds, item, f"{where}[{index}]") for index, item in enumerate(value))
    kind = value.get("kind") if isinstance(value, dict) else value
    if not isinstance(value, dict) or not isinstance(kind, str) or kind not in kinds:
        raise invalid(f"config key {where}.kind", f"one of {', '.join(kinds)}", repr(kind), "pick one")
    return build(kinds[kind], value, f"{where}.")


def _converted_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    """The option that fits: for tables the dataclass whose `kind` is the table's."""
    tables = [option for option in options if is_dataclass(option)]
    if isinstance(value, dict) and len(tables) > 1:
        kinds = {get_args(get_type_hints(option)["kind"])[0]: option for option in tables}
        return _of_kind(kinds, value, where)
    for option in options:
        if option is not type(None) and _fits(option, value):
            return _converted(option, value, where)
    raise _wrong_type(where, " or ".join(_described(option) for option in options if option is not type(None)), value)


def _fits(option: Any, value: Any) -> bool:
    """Whether a value is meant as this option of several."""
    return isinstance(value, dict) if is_dataclass(option) else has_type(value, str if option is Path else option)


def _converted_tuple(hints: tuple[Any, ...], value: list[Any], where: str) -> tuple[Any, ...]:
    if len(hints) == 2 and hints[1] is Ellipsis:
        return tuple(_converted(hints[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if len(value) != len(hints):
        raise invalid(f"config key {where}", f"{len(hints)} values", f"{len(value)}", "write it as in configs/")
    return tuple(
        _converted(hint, item, f"{where}[{index}]") for index, (hint, item) in enumerate(zip(hints, value, strict=True))
    )


def _described(hint: Any) -> str:
    return "a table" if is_dataclass(hint) or get_origin(hint) is dict else type_name(hint)


def _wrong_type(where: str, expected: str, value: Any) -> ValueError:
    fix = "write it as in configs/"
    if expected == "bool":
        fix = "write true or false, without quotes"
    elif isinstance(value, bool) and expected in ("str", "Path"):
        fix = f"put it in quotes: '\"{value}\"'"
    return invalid(f"config key {where}", expected, f"{value!r} ({type(value).__name__})", fix)

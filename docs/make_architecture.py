"""Write docs/architecture.md: the rooms of the package, lowest first, and what each imports."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "merope"
PAGE = Path(__file__).with_name("architecture.md")
HEAD = """# Architecture

Data flows one way: files → clips → cameras → plan → attention → latents → video → metrics → report.
Imports follow it. A room imports only rooms that stand above it in this table.
`python docs/make_architecture.py` writes this page, and a test keeps it true.

| room | what is in it | imports |
|---|---|---|
"""


def rooms() -> list[str]:
    """Every package and module at the root of the package but `__init__`."""
    found = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    return sorted(found - {"__init__"})


def imported_rooms(path: Path) -> set[str]:
    """The rooms that a file imports from, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names |= {alias.name for alias in node.names} if module == "merope" else {_room(module)}
        elif isinstance(node, ast.Import):
            names |= {_room(alias.name) for alias in node.names}
    return names - {""}


def _room(module: str) -> str:
    return module.split(".")[1] if module.startswith("merope.") else ""


def graph() -> dict[str, set[str]]:
    """Every room and the other rooms that it imports, lowest first. A circle of imports is an error."""
    edges = {room: set[str]() for room in rooms()}
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room in edges:
            edges[room] |= imported_rooms(path) - {room}
    ordered: dict[str, set[str]] = {}
    while len(ordered) < len(edges):
        ready = sorted(room for room in edges if room not in ordered and edges[room] <= ordered.keys())
        assert ready, f"imports in a circle among {sorted(edges.keys() - ordered.keys())}"
        ordered |= {room: edges[room] for room in ready}
    return ordered


def described(room: str) -> str:
    """The first sentence of a room's docstring."""
    path = PACKAGE / room / "__init__.py"
    text = ast.get_docstring(ast.parse((path if path.exists() else PACKAGE / f"{room}.py").read_text()))
    assert text, f"{room} has no docstring"
    return text.split("\n")[0]


def page() -> str:
    """The text of docs/architecture.md."""
    order = graph()
    places = list(order)
    lines = [
        f"| `{room}` | {described(room)} | {', '.join(sorted(below, key=places.index)) or '–'} |"
        for room, below in order.items()
    ]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())

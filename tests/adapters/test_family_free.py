"""What differs between base models stands in the files of their families, and nowhere else."""

import ast
from pathlib import Path

import merope
from merope.adapters.families import FAMILIES

ROOT = Path(merope.__file__).parent
OF_WAN_ALONE = {"adapters/causal_wan.py", "generate/camera_video.py"}
"""These say at their door that they take a WanTransformer3DModel; docs/bases.md says so, too."""


def asks_for_a_family(node: ast.AST) -> bool:
    """A comparison with a family or its name, or `isinstance` of a family's transformer."""
    if isinstance(node, ast.Compare):
        asked = [node.left, *node.comparators]
    elif (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass")
    ):
        asked = node.args[1:]
    elif isinstance(node, ast.Match):
        asked = [node.subject]
    else:
        return False
    inside = [part for side in asked for part in ast.walk(side)]
    names = {part.id for part in inside if isinstance(part, ast.Name)}
    names |= {str(part.value) for part in inside if isinstance(part, ast.Constant)}
    fields = {part.attr for part in inside if isinstance(part, ast.Attribute) and "family" in ast.unparse(part.value)}
    constants = {name for name in names if name.isupper() and name in family_constants()}
    return bool(names & set(FAMILIES) or constants or fields & {"transformer", "models"})


def family_constants() -> set[str]:
    """WAN, LTX_VIDEO, …"""
    tree = ast.parse((ROOT / "adapters" / "families" / "__init__.py").read_text())
    return {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_no_family_is_asked_for_by_name_outside_of_the_families() -> None:
    found = []
    for file in sorted(ROOT.rglob("*.py")):
        place = file.relative_to(ROOT).as_posix()
        if place.startswith("adapters/families/") or place in OF_WAN_ALONE:
            continue
        found += [f"{place}:{node.lineno}" for node in ast.walk(ast.parse(file.read_text())) if asks_for_a_family(node)]
    assert found == []


def test_the_search_would_find_them() -> None:
    for line in (
        "family == WAN",
        "isinstance(transformer, WanTransformer3DModel)",
        "index['transformer'][1] != WAN.transformer",
        "family.transformer == name",
        "type(transformer).__name__ == 'LTXVideoTransformer3DModel'",
    ):
        assert any(asks_for_a_family(node) for node in ast.walk(ast.parse(line))), line

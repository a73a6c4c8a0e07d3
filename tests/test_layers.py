"""Imports go one way: geometry ← attention ← encodings ← adapters ← generate ← train ← {bench, demo} ← cli."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "merope"
LAYERS = {
    "errors": "",
    "geometry": "errors",
    "attention": "errors geometry",
    "encodings": "errors geometry attention",
    "formats": "errors geometry",
    "draw": "errors geometry",
    "curation": "draw errors formats geometry",
    "world": "curation errors formats geometry",
    "datasets": "curation draw errors formats geometry world",
    "evaluate": "draw errors formats geometry world",
    "adapters": "attention encodings errors geometry",
    "generate": "adapters curation draw errors formats geometry",
    "paper": "adapters attention draw encodings errors formats generate geometry",
    "train": "adapters attention curation datasets draw encodings errors formats generate geometry world",
    "bench": "adapters draw errors evaluate formats generate geometry train world",
    "demo": "adapters draw errors evaluate formats generate geometry world",
    "commands": "bench curation datasets demo draw errors evaluate formats generate geometry paper train",
    "cli": "commands",
}


def imported_layers(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "merope":  # a room, never a public name: those are imported from where they are defined
                assert {alias.name for alias in node.names} <= LAYERS.keys(), path
                names |= {alias.name for alias in node.names}
            names |= {node.module.split(".")[1]} if (node.module or "").startswith("merope.") else set()
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("merope.")}
    return names


def test_every_module_imports_only_what_lies_below() -> None:
    for path in PACKAGE.rglob("*.py"):
        layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if layer != "__init__":
            assert imported_layers(path) <= {*LAYERS[layer].split(), layer}, path

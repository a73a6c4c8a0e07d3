"""Imports go one way: geometry ← attention ← encodings ← adapters ← {train, generate} ← cli."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "merope"
LAYERS = {
    "errors": set(),
    "geometry": {"errors"},
    "attention": {"errors", "geometry"},
    "encodings": {"errors", "geometry", "attention"},
    "growth": {"errors", "geometry", "attention", "encodings"},
    "taxonomy": {"errors", "geometry", "attention", "encodings"},
    "trilemma": {"errors", "geometry", "attention", "encodings"},
    "data": {"errors", "geometry"},
    "birdseye": {"errors", "geometry"},
    "evaluate": {"birdseye", "data", "errors", "geometry"},
    "adapters": {"errors", "geometry", "attention", "encodings"},
    "pipeline": {"adapters", "data", "errors", "geometry"},
    "generate_inputs": {"data", "errors", "geometry", "pipeline"},
    "generate": {"adapters", "birdseye", "data", "errors", "generate_inputs", "geometry", "pipeline"},
    "analysis": {"adapters", "attention", "data", "errors", "geometry", "pipeline"},
    "train": {"adapters", "attention", "birdseye", "data", "encodings", "errors", "geometry", "pipeline"},
    "bench": {"adapters", "birdseye", "data", "errors", "evaluate", "geometry", "pipeline", "train"},
    "demo_paths": {"bench", "data", "errors", "evaluate", "generate_inputs", "geometry"},
    "demo_pictures": {"birdseye"},
    "demo": {"adapters", "bench", "data", "demo_paths", "demo_pictures", "errors", "evaluate", "pipeline"},
    "commands": {
        *("analysis", "bench", "data", "demo", "errors", "evaluate"),
        *("generate", "generate_inputs", "geometry", "growth", "train"),
    },
    "cli": {"commands", "errors", "taxonomy"},
}


def imported_layers(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module != "merope", f"{path}: import from the module that defines it"
            names |= {node.module.split(".")[1]} if (node.module or "").startswith("merope.") else set()
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("merope.")}
    return names


def test_every_module_imports_only_what_lies_below() -> None:
    for path in PACKAGE.rglob("*.py"):
        layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if layer != "__init__":
            assert imported_layers(path) <= LAYERS[layer] | {layer}, path

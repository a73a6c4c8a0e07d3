"""Scripts outside of the package still find what they import from it, though few of them run in the suite."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "docs").glob("*.py")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_what_a_script_imports_is_there(script: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if (node.module or "").split(".")[0] == "merope"]
    for node in ours:
        for name in node.names:
            found = hasattr(import_module(str(node.module)), name.name)
            assert found or import_module(f"{node.module}.{name.name}"), f"{node.module} has no {name.name}"


def test_all_scripts_are_looked_at() -> None:
    assert {"attention.py", "world_attention.py", "make_studio_pictures.py"} <= {script.name for script in SCRIPTS}

"""The house keeps its order: imports go one way, a file's name says which one is meant, and nothing grows too long."""

import ast
import re
import runpy
import statistics
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "merope").rglob("*.py"))
architecture = runpy.run_path(str(ROOT / "docs" / "make_architecture.py"))
graph = cache(architecture["graph"])

ALLOWED = {
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
    "bench": "adapters draw errors evaluate formats generate geometry paper train world",
    "demo": "adapters draw errors evaluate formats generate geometry world",
    "studio": "adapters demo errors evaluate formats generate geometry world",
    "commands": "bench curation datasets demo draw errors evaluate formats generate geometry paper studio train",
    "cli": "commands",
}
"""What each room may import. Of these only adapters, generate, train and paper know diffusers."""


@pytest.mark.parametrize("room", architecture["rooms"]())
def test_every_room_imports_only_what_lies_below(room: str) -> None:
    assert graph()[room] <= set(ALLOWED[room].split())


def test_few_rooms_know_diffusers() -> None:
    for path in SOURCES:
        room = path.relative_to(ROOT / "merope").parts[0]
        if room not in ("adapters", "generate", "train", "paper"):
            for node in ast.walk(ast.parse(path.read_text())):
                named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                assert not any(name.split(".")[0] == "diffusers" for name in named), path


def test_the_page_on_the_architecture_is_true() -> None:
    assert architecture["PAGE"].read_text() == architecture["page"](), "run python docs/make_architecture.py"


def test_no_two_modules_share_a_name() -> None:
    names = Counter(path.stem for path in SOURCES if path.stem != "__init__")
    rooms = set(architecture["rooms"]())
    shared = {name for name, count in names.items() if count > 1 or (name in rooms and name not in ("cli", "errors"))}
    assert shared <= {"merope", "bench"}  # the encoding that gives the package its name; the command of a room


def test_cores_are_counted_in_one_place() -> None:
    counting = [path.name for path in SOURCES if re.search("cpu_count|sched_getaffinity", path.read_text())]
    assert counting == ["parts.py"]


def test_files_and_functions_stay_short() -> None:
    files = [len(path.read_text().splitlines()) for path in SOURCES if path.stat().st_size]
    functions = [
        node.end_lineno - node.lineno + 1
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    ]
    assert max(files) <= 351
    assert statistics.median(files) <= 126
    assert max(functions) <= 74
    assert statistics.median(functions) <= 7

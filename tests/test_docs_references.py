"""What the pages name exists: files, functions in them, dotted names, imports, commands with their options."""

import importlib
import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from merope.cli import main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [path for folder in ("merope", "benchmarks", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
FILES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("merope", "tests", "benchmarks", "configs", "docs")
    for path in (ROOT / folder).rglob("*.*")
]
ROOMS = r"(?:merope|tests|benchmarks|configs|docs)/"
each_page = pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])


def exists(name: str) -> bool:
    """Is there a file of that name, or with that end: `encodings/gta.py` is merope/encodings/gta.py."""
    pattern = re.sub(r"<\w+>", "*", name)
    return any(fnmatch(file, pattern) or fnmatch(file, f"*/{pattern}") for file in FILES)


@each_page
def test_files_exist(page: Path) -> None:
    names = re.findall(r"(?<![\w./<>*-])[\w<*][\w./<>*-]*\.(?:py|toml|cuh?)\b", page.read_text())
    assert [name for name in names if not exists(name)] == []


@pytest.mark.parametrize("folder", ["merope", "benchmarks", "tests"])
def test_files_that_the_code_names_exist(folder: str) -> None:
    missing = [
        f"{source.relative_to(ROOT)}: {name}"
        for source in SOURCES
        if source.is_relative_to(ROOT / folder)
        for name in re.findall(rf"(?<![\w./-]){ROOMS}[\w./<>*-]+\.(?:py|md|toml|cuh?)\b", source.read_text())
        if not exists(name)
    ]
    assert missing == []


@each_page
def test_links_lead_to_headings(page: Path) -> None:
    links = re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", page.read_text())
    assert [
        f"{file}#{heading}" for file, heading in links if heading not in headings(page.parent / (file or page.name))
    ] == []


@cache
def headings(page: Path) -> set[str]:
    """Headings of a page as GitHub spells them in links."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return {
        re.sub(r"[^\w\s-]", "", title).strip().lower().replace(" ", "-") for title in re.findall("^#+ (.*)", text, re.M)
    }


@each_page
def test_functions_are_in_the_files_that_are_named_with_them(page: Path) -> None:
    for name, function in re.findall(r"`([\w/]+\.py): (\w+)`", page.read_text()):
        files = [file for file in FILES if f"/{file}".endswith(f"/{name}")]
        assert any(re.search(rf"^\s*(def|class) {function}\b", (ROOT / file).read_text(), re.M) for file in files), name


@each_page
def test_dotted_names_exist(page: Path) -> None:
    for name in re.findall(r"(?<![\w./-])merope(?:\.[A-Za-z_]\w*)+(?![\w/-])", page.read_text()):
        if not name.endswith((".py", ".toml")):
            find(name)


def find(dotted: str) -> object:
    """The module or attribute of that name; an error if there is none."""
    parts = dotted.split(".")
    found: object = importlib.import_module(parts[0])
    for length in range(1, len(parts)):
        name = ".".join(parts[: length + 1])
        if not hasattr(found, parts[length]):
            importlib.import_module(name)
        found = getattr(found, parts[length])
    return found


@each_page
def test_imports_work(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        for line in re.findall(r"^(?:from merope\S* )?import .*merope.*|^from merope.*", block, re.MULTILINE):
            exec(line, {})


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command line on a page, in blocks and inside sentences."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"```(?:\w*)\n(.*?)```", text, re.DOTALL)
    inline = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for line in [line for block in blocks for line in block.splitlines()] + inline:
        if re.match(r"(\.venv/bin/)?(merope|python3?|pytest|make) ", line):
            words = shlex.split(line, comments=True)
            yield [words[0].removeprefix(".venv/bin/"), *words[1:]]


@each_page
def test_make_has_the_targets(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for words in commands(page):
        assert words[0] != "make" or re.search(rf"^{words[1]}:", makefile, re.MULTILINE), words


@cache
def help_of(command: tuple[str, ...], printed: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0, command
    return printed.readouterr().out


@each_page
def test_commands_have_the_options_that_are_passed(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands(page):
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        if words[0] == "merope" and not words[1].startswith("-"):
            command = tuple(words[1 : 3 if words[1] in ("bench", "data", "path") else 2])
            known = set(re.findall(r"--[\w-]+", help_of(command, capsys)))
        elif len(words) > 1 and words[1].startswith("benchmarks/"):
            known = set(re.findall(r'"(--[\w-]+)"', (ROOT / words[1]).read_text()))
        else:
            continue
        assert options <= known, shlex.join(words)


@each_page
def test_tests_are_found_by_the_words_they_are_selected_with(page: Path) -> None:
    for words in commands(page):
        if "pytest" not in words:
            continue
        places = [word for word in words if word.startswith("tests/")]
        assert all((ROOT / place).exists() for place in places), shlex.join(words)
        if "-k" in words:
            files = [file for file in FILES if file.endswith(".py") and file.startswith(tuple(places))]
            names = " ".join(file + " ".join(re.findall(r"def test_\w+", (ROOT / file).read_text())) for file in files)
            for word in set(re.findall(r"\w+", words[words.index("-k") + 1])) - {"or", "and", "not"}:
                assert word in names, shlex.join(words)

"""What is installed: a wheel has all that the commands read, and an editable install is found by type checkers."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from merope.train.toml_config import shipped_configs
from tests.train.tiny_runs import SMALLER

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged: building writes into the tree."""
    root = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, root / name)
    weights = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(REPOSITORY / "configs", root / "configs")
    shutil.copytree(REPOSITORY / "merope", root / "merope", symlinks=True, ignore=weights)
    return root


def built(tree: Path, kind: str, folder: Path) -> zipfile.ZipFile:
    """A wheel, as pip has setuptools make it."""
    folder.mkdir()
    script = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder)!r})"
    subprocess.run([sys.executable, "-c", script], cwd=tree, check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file)


def test_a_wheel_trains_by_name_where_there_is_no_checkout(tree: Path, tmp_path: Path) -> None:
    built(tree, "wheel", tmp_path / "wheel").extractall(tmp_path / "site")
    assert not (tmp_path / "site" / "merope" / "configs").is_symlink()
    here = tmp_path / "elsewhere"
    here.mkdir()

    def merope(*arguments: str) -> subprocess.CompletedProcess[str]:
        run = (
            "import sys, merope; from merope.cli import main; print(merope.__file__);"
            "main(['train', '--list']); sys.exit(main())"
        )
        command = [sys.executable, "-c", run, *arguments]
        surroundings = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, cwd=here, env=surroundings, capture_output=True, text=True, check=False)

    changes = [word for change in (*SMALLER, "run.steps=1") for word in ("--set", change)]
    done = merope("train", "tiny", *changes)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "site"))
    assert done.stdout.endswith("wrote outputs/tiny\ndrive it: merope demo --model outputs/tiny/trained\n")
    assert (here / "outputs" / "tiny" / "trained" / "branch").is_dir()
    listed = done.stdout.splitlines()[1:-2]
    assert [line.split()[0] for line in listed] == list(shipped_configs())


def test_an_editable_install_is_a_plain_path(tree: Path, tmp_path: Path) -> None:
    """Type checkers follow paths; they do not run the import hooks that setuptools installs otherwise."""
    with built(tree, "editable", tmp_path / "wheel") as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".pth")]
        assert wheel.read(name).decode().split() == [str(tree)]
    assert (tree / "merope" / "py.typed").exists()

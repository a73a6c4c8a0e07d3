"""Files that several tests train from; tests that break some copy them first."""

from pathlib import Path

import pytest

from tests.train.tiny_files import write_tiny_files


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tiny-files")
    write_tiny_files(root)
    return root

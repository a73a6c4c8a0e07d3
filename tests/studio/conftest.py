"""One tiny model and one server of it for all tests of a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from studio.studio_server import Served, served, write_studio_model

from merope.studio.load_models import load_model
from merope.studio.studio_model import ModelChoice, StudioModel


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("studio-model")
    write_studio_model(folder)
    return folder


@pytest.fixture(scope="package")
def model(folder: Path) -> StudioModel:
    return load_model(ModelChoice(folder, device="cpu"))


@pytest.fixture(scope="module")
def server(model: StudioModel) -> Iterator[Served]:
    with served(model) as here:
        yield here

"""One tiny model and one browser for all tests, one server of the model for all tests of a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import opened_browser
from selenium import webdriver
from studio.studio_browser import Person
from studio.studio_server import Page, Served, served, write_studio_model

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


@pytest.fixture(scope="package")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the browser saves files."""
    return tmp_path_factory.mktemp("saves")


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory, saves: Path) -> Iterator[webdriver.Chrome]:
    driver = opened_browser(tmp_path_factory.mktemp("profile"), 1400, 1000)
    driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(saves)})
    yield driver
    driver.quit()


@pytest.fixture
def person(browser: webdriver.Chrome, server: Served) -> Iterator[Person]:
    """Somebody before a page that is ready. Whatever the browser complains of is an error."""
    person = Person(browser, server.url)
    person.until_ready()
    yield person
    severe = [line for line in browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    browser.get("about:blank")
    server.wait_for_quiet()
    assert severe == []


@pytest.fixture
def page(server: Served) -> Iterator[Page]:
    page = server.page()
    yield page
    page.close()
    server.wait_for_quiet()

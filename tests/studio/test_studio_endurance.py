"""Pages that come and go, a server that is killed: nothing hangs, nothing is left."""

import gc
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from studio.studio_browser import Person
from studio.studio_server import AHEAD, BEGIN, RELEASED, Page, Served

from merope.studio.page_session import PageSession
from merope.studio.server_folder import LOCK, ServerFolder, remove_abandoned
from merope.studio.street_drive import StreetDrive

SECONDS = float(os.environ.get("MEROPE_STUDIO_SECONDS", "5"))
"""How long pages come and go. Before a release it is a minute."""

PAGES, FIRST, BLOCK = 20, 9, 12
COMMAND = "import sys; from merope.cli import main; sys.exit(main())"


def alive(kind: type) -> int:
    gc.collect()
    return sum(type(one) is kind for one in gc.get_objects())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def come_and_go(server: Served, dice: random.Random, seconds: float) -> int:
    """Up to twenty pages at a time that drive, stop, undo, draw, or are gone in the middle of it; how many came."""
    pages: list[Page] = []
    count, end = 0, time.monotonic() + seconds
    take = {**BEGIN, "do": "take", "points": [[0, 10, 8], [0, 14, 8]]}
    while time.monotonic() < end:
        if pages and dice.random() < len(pages) / PAGES:
            page = pages.pop(dice.randrange(len(pages)))
            if dice.random() < 0.5:
                page.close()
            else:
                page.socket.shutdown()  # without a word
        else:
            page = server.page()
            count += 1
            page.send(BEGIN, dice.choice([AHEAD, RELEASED, {"do": "undo"}, {"do": "stop"}, take, {"do": "nonsense"}]))
            pages.append(page)
        time.sleep(dice.random() * 0.1)
    last = server.page()
    last.begin()  # it is served whoever else is there
    for page in (last, *pages):
        page.close()
    return count + 1


def test_twenty_pages_that_come_and_go_leave_nothing(server: Served) -> None:
    dice, found = random.Random(0), []
    for share in (0.3, 0.7):  # what is kept for the next requests is there after the first part
        assert come_and_go(server, dice, share * SECONDS) >= 5
        server.wait_for_quiet()
        found.append((threading.active_count(), open_files()))
        assert (alive(PageSession), alive(StreetDrive)) == (0, 0)
    (threads, files), (threads_after, files_after) = found
    assert threads_after <= threads + 4
    assert files_after <= files + 4


@contextmanager
def started(folder: Path, port: int, temporary: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command itself, and the address that it prints."""
    options = ["studio", "--model", str(folder), "--port", str(port), "--device", "cpu"]
    environment = os.environ | {"TMPDIR": str(temporary)}
    server = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *options], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert server.stdout is not None
        yield server, next(found[1] for line in server.stdout if (found := re.search(r"open (\S+)", line)))
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
        assert server.stdout is not None
        server.stdout.close()


def saves_of_take(person: Person) -> list[bool]:
    """Which of a take's links lead anywhere."""
    links = person.find("take-1").find_elements(By.CSS_SELECTOR, ".links a")
    return [link.get_attribute("href") is not None for link in links]


def test_a_server_that_is_killed_and_started_again_is_noticed(
    browser: webdriver.Chrome, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(folder, 0, tmp_path) as (server, url):
        person = Person(browser, url)
        person.until_ready()
        person.driver.find_element(By.CSS_SELECTOR, '[data-key="up"]').click()
        person.until(lambda: person.frames == FIRST + BLOCK)
        person.click("to-draw")
        person.click_street((0, 40), (0, -20))
        person.until(person.find("generate").is_enabled)
        person.click("generate")
        person.until(lambda: person.driver.find_elements(By.ID, "take-1"))
        assert saves_of_take(person) == [True] * 4
        person.click("to-drive")
        server.kill()
        person.until(lambda: person.state == "lost")
    assert person.read("state") == "The connection is lost; trying again …"
    (left,) = tmp_path.iterdir()
    os.utime(left, (0, 0))  # as if it had been killed long ago
    with started(folder, int(re.findall(r":(\d+)/", url)[0]), tmp_path):
        person.until(lambda: "Connected again" in person.read("notice"))
        assert not left.exists()
        assert person.frames == FIRST + BLOCK  # what was made can still be watched
        assert person.find("save-video").get_attribute("aria-disabled") == "true"
        assert saves_of_take(person) == [False] * 4
        person.click("restart")
        person.until(lambda: person.frames == FIRST)
        person.until_ready()
        browser.get("about:blank")
    assert list(tmp_path.iterdir()) == []
    browser.get_log("browser")  # the lost connection is named there


def test_folders_of_servers_that_live_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    here = ServerFolder()
    dead, strange = tmp_path / "merope-studio-dead", tmp_path / "merope-studio-strange"
    for folder in (dead, strange):
        folder.mkdir()
    (dead / LOCK).touch()
    linked = tmp_path / "merope-studio-linked"
    linked.symlink_to(tmp_path)
    for folder in (here.path, dead, strange):
        os.utime(folder, (0, 0))
    remove_abandoned(tmp_path)
    assert not dead.exists()
    assert strange.exists()  # without a lock it is not ours
    assert linked.exists()
    assert here.pages.exists()
    here.remove()
    assert not here.path.exists()

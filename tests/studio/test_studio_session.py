"""A person's whole session in a real browser, with the model of the package and its command."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from studio.studio_browser import Person
from studio.studio_server import Served, served

from merope import formats
from merope.formats.video import read_first_frames
from merope.studio.load_models import load_model
from merope.studio.studio_model import ModelChoice

FIRST, BLOCK = 9, 12
CLICKS = (0, 75), (0, 54), (-6, 34)  # on the map: a path of a second, which is one block
CARD = r"rot\n([\d.]+)°\nmetric tr\n([\d.]+) %\noff here\n.+\nleft the path\n(never|at [\d.]+ s)"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """One step a block: its pictures are blurred, and it takes seconds instead of a minute."""
    with served(load_model(ModelChoice(steps=1, device="cpu"))) as here:
        yield here


def test_somebody_drives_draws_and_saves_with_the_package_s_model(person: Person, saves: Path) -> None:
    see_what_is_said_at_first(person)
    drive_and_turn(person)
    undo_and_save(person, saves)
    draw_and_generate(person, saves)
    drop_a_pose_file(person)
    begin_with_a_fisheye(person)


def see_what_is_said_at_first(person: Person) -> None:
    assert person.read("state") == "Ready: hold ↑ to drive"
    assert "the package's model" in person.read("facts")
    assert person.find("no-prompt").is_displayed()
    person.until(lambda: person.read("made-caption") == f"given, frame {FIRST} of {FIRST}")


def drive_and_turn(person: Person) -> None:
    began_s = time.monotonic()
    person.hold(Keys.ARROW_UP)
    person.until(lambda: person.frames > FIRST)
    person.until(lambda: time.monotonic() > began_s + 3.0)
    person.hold(Keys.ARROW_LEFT)
    person.until(lambda: person.read("yaw") == "-15 °/s")
    person.release(Keys.ARROW_LEFT, Keys.ARROW_UP)
    person.until_ready()
    person.until(lambda: person.read("made-caption") == f"generated, frame {person.frames} of {person.frames}")
    assert (person.frames - FIRST) % BLOCK == 0
    assert float(person.read("speed")) > 4.0
    assert float(person.read("driven").split()[0]) > 5.0
    assert re.fullmatch(r"\d+\.\d s", person.read("seconds"))
    person.until(lambda: re.fullmatch(r"\d\.\d\d m", person.read("off")))  # a real model can be measured
    for id in ("made", "true", "map"):
        assert person.colours(id) > 500
    words = person.find("map").get_attribute("aria-label") or ""
    assert re.search(r"\d m ahead of the start, [\d.]+ m to the left, heading -\d+°; \d+ poses recovered", words)


def undo_and_save(person: Person, saves: Path) -> None:
    driven = person.frames
    person.click("undo")
    person.until(lambda: person.frames == driven - BLOCK)
    assert not person.find("undo").is_enabled()
    assert person.read("made-caption") == f"generated, frame {driven - BLOCK} of {driven - BLOCK}"
    frames, count = read_first_frames(person.save("save-video", saves / "drive.mp4"), 1000)
    assert (count, frames.shape[1:]) == (driven - BLOCK, (144, 256, 3))
    assert float(frames[-1].float().std()) > 20.0  # a street, not a grey picture
    assert formats.read(person.save("save-path", saves / "drive.json")).count == driven - BLOCK
    assert formats.detect(person.save("save-tum", saves / "drive.tum")) == "tum"
    report = person.save("save-report", saves / "drive.html").read_text()
    assert "Camera control report" in report
    assert "merope studio" in report


def draw_and_generate(person: Person, saves: Path) -> None:
    person.click("to-draw")
    person.click_street(*CLICKS)
    assert len(person.driver.find_elements(By.CSS_SELECTOR, "#points tr")) == len(CLICKS)
    person.until(lambda: re.match(r"[\d.]+ m in [\d.]+ s", person.read("traced")))
    person.click("generate")
    person.until(lambda: person.driver.find_elements(By.ID, "take-1"))
    card = person.find("take-1")
    person.until(lambda: "measuring" not in card.text)
    found = re.search(CARD, card.text)
    assert found is not None, card.text
    assert float(found[1]) < 20.0
    assert card.find_element(By.LINK_TEXT, "report").is_displayed()


def drop_a_pose_file(person: Person) -> None:
    lines = [f"{k / 16} 0 0 {0.5 * k} 0 0 0 1" for k in range(33)]
    person.drop("drive.tum", "\n".join(lines))
    person.until(lambda: person.read("traced") == "drive.tum: 16.0 m in 2.00 s.")
    assert person.driver.find_elements(By.CSS_SELECTOR, "#points tr") == []
    assert person.find("generate").is_enabled()


def begin_with_a_fisheye(person: Person) -> None:
    person.click("to-drive")
    before = person.find("preview").get_attribute("src")
    person.choose("lens", "fisheye")
    assert (person.read("fov-out"), person.find("fov").get_property("max")) == ("140°", "200")
    person.until(lambda: person.find("preview").get_attribute("src") != before)
    person.click("apply")
    person.until(lambda: "a 140° fisheye (xi = 1); the model has seen a 70° pinhole only" in person.read("notice"))
    person.until(lambda: person.read("made-caption") == f"given, frame {FIRST} of {FIRST}")

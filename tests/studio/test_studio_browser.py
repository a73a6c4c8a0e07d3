"""A person's session in a real browser, against a real server with a tiny model."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import opened_browser
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from studio.studio_browser import Person
from studio.studio_server import Served, served

from merope import formats
from merope.formats.video import read_first_frames
from merope.studio.studio_model import StudioModel

FIRST, BLOCK = 9, 12


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saves")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory, saves: Path) -> Iterator[webdriver.Chrome]:
    driver = opened_browser(tmp_path_factory.mktemp("profile"), 1400, 1000)
    driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(saves)})
    yield driver
    driver.quit()


@pytest.fixture
def person(browser: webdriver.Chrome, server: Served) -> Iterator[Person]:
    person = Person(browser, server.url)
    person.until_ready()
    yield person
    severe = [line for line in browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]
    browser.get("about:blank")
    server.wait_for_quiet()
    assert severe == []


def saved(person: Person, saves: Path, id: str, name: str) -> Path:
    file = saves / name
    file.unlink(missing_ok=True)
    person.click(id)
    person.until(file.exists)
    return file


def test_somebody_drives_turns_stops_undoes_and_saves(person: Person, saves: Path) -> None:
    assert person.read("state") == "Ready: hold ↑ to drive"
    assert "not trained to stream" in person.read("facts")
    person.until(lambda: person.read("made-caption") == f"given, frame {FIRST} of {FIRST}")
    person.hold(Keys.ARROW_UP)
    person.until(lambda: person.frames >= FIRST + 2 * BLOCK)
    person.hold(Keys.ARROW_LEFT)
    person.until(lambda: person.read("yaw") == "-15 °/s")
    person.release(Keys.ARROW_LEFT, Keys.ARROW_UP)
    person.until_ready()
    person.until(lambda: person.read("made-caption") == f"generated, frame {person.frames} of {person.frames}")
    assert float(person.read("speed")) == 8.0
    assert float(person.read("driven").split()[0]) > 5.0
    assert re.fullmatch(r"\d+\.\d s", person.read("seconds"))
    person.until(lambda: person.read("off") != "–")
    for id in ("made", "true", "map"):
        assert person.colours(id) > 50
    words = person.find("map").get_attribute("aria-label") or ""
    assert re.search(r"\d m ahead of the start, [\d.]+ m to the left, heading -\d+°; \d+ poses recovered", words)

    driven = person.frames
    person.click("undo")
    person.until(lambda: person.frames == driven - BLOCK)
    assert not person.find("undo").is_enabled()
    assert person.read("made-caption") == f"generated, frame {driven - BLOCK} of {driven - BLOCK}"
    assert len(read_first_frames(saved(person, saves, "save-video", "drive.mp4"), 1000)[0]) == driven - BLOCK
    assert formats.read(saved(person, saves, "save-path", "drive.json")).count == driven - BLOCK
    assert formats.detect(saved(person, saves, "save-tum", "drive.tum")) == "tum"

    person.click("restart")
    person.until(lambda: person.frames == FIRST)


def test_letters_and_the_pad_drive_too_and_space_pauses(person: Person) -> None:
    person.hold("w")
    person.until(lambda: person.frames > FIRST)
    person.driver.find_element(By.TAG_NAME, "body").send_keys(" ")
    person.until(lambda: person.state == "paused")
    assert person.find("pause").get_attribute("aria-pressed") == "true"
    person.release("w")
    before = person.frames
    forward = person.driver.find_element(By.CSS_SELECTOR, '[data-key="up"]')
    forward.click()
    person.until(lambda: person.frames == before + BLOCK)
    person.until_ready()
    assert "held" not in (forward.get_attribute("class") or "")


def test_the_cursor_goes_through_frames_and_all_follows(person: Person) -> None:
    person.driver.find_element(By.CSS_SELECTOR, '[data-key="right"]').click()
    person.until(lambda: person.frames == FIRST + BLOCK)
    person.until_ready()
    person.set("cursor", "4")
    assert person.read("made-caption") == f"given, frame 5 of {FIRST + BLOCK}"
    assert (person.read("time"), person.read("driven")) == ("0.25 s", "0.0 m")
    assert person.find("live").get_attribute("aria-pressed") == "false"
    person.driver.find_element(By.TAG_NAME, "body").send_keys(".")
    assert person.read("time") == "0.31 s"
    person.click("live")
    person.until(lambda: person.read("made-caption") == f"generated, frame {FIRST + BLOCK} of {FIRST + BLOCK}")
    assert float(person.read("yaw").split()[0]) == 15.0


def test_a_fisheye_is_previewed_and_begins_anew(person: Person) -> None:
    before = person.find("preview").get_attribute("src")
    person.choose("lens", "fisheye")
    assert (person.read("fov-out"), person.find("fov").get_property("max")) == ("140°", "200")
    person.until(lambda: person.find("preview").get_attribute("src") != before)
    loaded = "const one = document.getElementById('preview'); return one.complete && one.naturalWidth"
    person.until(lambda: person.driver.execute_script(loaded) == 64)
    person.click("apply")
    person.until(lambda: "a 140° fisheye (xi = 1); the model has seen a 70° pinhole only" in person.read("notice"))


DROP = """
    const file = new File([arguments[0]], "drive.tum"), carried = new DataTransfer();
    carried.items.add(file);
    document.body.dispatchEvent(new DragEvent("drop", { bubbles: true, dataTransfer: carried }));
"""


def test_somebody_draws_a_path_generates_it_reads_the_errors_and_drops_a_file(person: Person) -> None:
    person.click("to-draw")
    assert not person.find("made").is_displayed()
    canvas = person.find("map")
    for right, up in ((0, 60), (0, 20), (-20, -20), (-40, -60), (-80, -90)):
        ActionChains(person.driver).move_to_element_with_offset(canvas, right, up).click().perform()
    rows = person.driver.find_elements(By.CSS_SELECTOR, "#points tr")
    assert len(rows) == 5
    person.until(lambda: re.fullmatch(r"[\d.]+ m in 1.25 s; the path lasts [\d.]+ s.*", person.read("traced")))
    speed = rows[1].find_elements(By.TAG_NAME, "input")[2]
    assert speed.get_attribute("aria-label") == "Point 2, metres per second"
    before = person.read("traced")
    speed.clear()
    speed.send_keys("3", Keys.TAB)
    person.until(lambda: person.read("traced") != before)

    for reel in (1, 2):
        person.click("generate")
        person.until(lambda: person.driver.find_elements(By.ID, f"take-{reel}"))  # noqa: B023
        card = person.find(f"take-{reel}")
        person.until(lambda: "measuring" not in card.text)  # noqa: B023
        assert re.search(r"rot\n\S+\nmetric tr\n.+\noff here\n.+\nleft the path\n(never|at [\d.]+ s)", card.text)
        person.choose("lens", "fisheye")
    assert "140° fisheye" in person.find("take-2").text
    person.until(lambda: person.read("time") == "1.25 s")
    person.set("cursor", "4")
    assert person.read("time") == "0.25 s"
    assert re.search(r"off here\n(no pose|[\d.]+ m)\n", person.find("take-1").text)

    lines = [f"{k / 16} 0 0 {0.5 * k} 0 0 0 1" for k in range(40)]
    person.driver.execute_script(DROP, "\n".join(lines))
    person.until(lambda: person.read("traced").startswith("drive.tum: 10.0 m in 1.25 s"))
    assert person.driver.find_elements(By.CSS_SELECTOR, "#points tr") == []
    person.click("generate")
    person.until(lambda: person.driver.find_elements(By.ID, "take-3"))
    person.driver.execute_script(DROP, "not a pose file")
    person.until(lambda: not person.find("generate").is_enabled())
    person.click("to-drive")
    assert person.find("made").is_displayed()
    person.driver.get_log("browser")  # the refused file is named there


def test_two_pages_drive_at_once(person: Person, server: Served) -> None:
    first = person.driver.current_window_handle
    person.driver.switch_to.new_window("tab")
    other = Person(person.driver, server.url)
    other.until_ready()
    for handle in (person.driver.current_window_handle, first):
        person.driver.switch_to.window(handle)
        person.driver.find_element(By.CSS_SELECTOR, '[data-key="up"]').click()
        person.until(lambda: person.frames == FIRST + BLOCK)
    person.driver.switch_to.window(next(one for one in person.driver.window_handles if one != first))
    person.driver.close()
    person.driver.switch_to.window(first)


def test_a_phone_has_all_of_it_without_scrolling_sideways(person: Person) -> None:
    size = {"width": 360, "height": 780, "deviceScaleFactor": 2, "mobile": True}
    person.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    assert person.driver.execute_script("return document.documentElement.scrollWidth") == 360
    for button in person.driver.find_elements(By.CSS_SELECTOR, ".pad button"):
        assert min(button.size["width"], button.size["height"]) >= 44
    person.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_everything_has_a_name_for_screen_readers(person: Person) -> None:
    tree = person.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    wanted = ("button", "slider", "spinbutton", "combobox", "link", "image", "img", "status")
    nodes = [node for node in tree if node.get("role", {}).get("value") in wanted and not node.get("ignored")]
    assert len(nodes) > 20
    assert [node for node in nodes if node["role"]["value"] != "status" and not node["name"]["value"]] == []


def test_a_server_that_ends_and_comes_back_is_noticed(browser: webdriver.Chrome, model: StudioModel) -> None:
    with served(model) as here:
        person = Person(browser, here.url)
        person.until_ready()
        person.driver.find_element(By.CSS_SELECTOR, '[data-key="up"]').click()
        person.until(lambda: person.frames == FIRST + BLOCK)
    person.until(lambda: person.state == "lost")
    assert person.read("state") == "The connection is lost; trying again …"
    with served(model, port=here.port):
        person.until(lambda: "Connected again" in person.read("notice"))
        assert person.frames == FIRST + BLOCK  # what was made can still be watched
        assert person.find("save-video").get_attribute("aria-disabled") == "true"
        person.click("restart")
        person.until(lambda: person.frames == FIRST)
        person.until_ready()
        browser.get("about:blank")
    browser.get_log("browser")  # the lost connection is named there

"""The page in a real browser, against a real server with a tiny model."""

import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from studio.studio_browser import Person
from studio.studio_server import CLIPS, Served, served, write_studio_model

from merope.formats.video import write_video
from merope.studio.given_video import read_given
from merope.studio.load_models import load_model
from merope.studio.studio_model import ModelChoice, StudioModel

FIRST, BLOCK = 9, 12


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


def test_somebody_draws_a_path_generates_it_reads_the_errors_and_drops_a_file(person: Person) -> None:
    person.click("to-draw")
    assert not person.find("made").is_displayed()
    person.click_street((0, 60), (0, 20), (-20, -20), (-40, -60), (-80, -90))
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
    person.drop("drive.tum", "\n".join(lines))
    person.until(lambda: person.read("traced").startswith("drive.tum: 10.0 m in 1.25 s"))
    assert person.driver.find_elements(By.CSS_SELECTOR, "#points tr") == []
    person.click("generate")
    person.until(lambda: person.driver.find_elements(By.ID, "take-3"))
    person.drop("drive.tum", "not a pose file")
    person.until(lambda: not person.find("generate").is_enabled())
    person.click("to-drive")
    assert person.find("made").is_displayed()
    person.driver.get_log("browser")  # the refused file is named there


def test_two_pages_drive_at_once(person: Person, server: Served) -> None:
    first = person.driver.current_window_handle
    person.driver.switch_to.new_window("tab")
    other = Person(person.driver, server.url)
    other.until_ready()
    both = (person.driver.current_window_handle, first)
    for handle in both:
        person.driver.switch_to.window(handle)
        person.driver.find_element(By.CSS_SELECTOR, '[data-key="up"]').click()
    for handle in both:
        person.driver.switch_to.window(handle)
        person.until(lambda: person.frames == FIRST + BLOCK)
        person.until(lambda: person.state == "ready")
    person.driver.switch_to.window(next(one for one in person.driver.window_handles if one != first))
    person.driver.close()
    person.driver.switch_to.window(first)


def test_a_video_of_one_s_own_hides_what_nobody_knows(person: Person, tmp_path: Path) -> None:
    write_video(torch.randint(256, (12, 32, 64, 3), dtype=torch.uint8), tmp_path / "mine.mp4", 16.0)
    person.choose("source", "video")
    assert person.find("video-speed").is_displayed()
    assert not person.find("world").is_displayed()
    person.find("video-file").send_keys(str(tmp_path / "mine.mp4"))
    person.until(lambda: person.read("video-notes") == "mine.mp4: its first 9 frames begin the drive, 0.5 s.")
    person.until(lambda: "video.jpg" in (person.find("preview").get_attribute("src") or ""))
    person.click("apply")
    person.until(lambda: "cameras of the video: straight ahead at 8 m/s" in person.read("notice"))
    person.until_ready()
    hidden = ("true", "off", "save-report")
    assert [person.find(id).is_displayed() for id in hidden] == [False] * 3
    assert person.read("no-truth").startswith("Your own video has no true street")
    person.driver.find_element(By.CSS_SELECTOR, '[data-key="up"]').click()
    person.until(lambda: person.frames == FIRST + BLOCK)
    person.until_ready()
    assert person.colours("made") > 50

    person.click("to-draw")
    person.click_street((0, 40), (0, -20))
    person.until(person.find("generate").is_enabled)
    person.click("generate")
    person.until(lambda: person.driver.find_elements(By.ID, "take-1"))
    card = person.find("take-1")
    assert "Take 1: your video, 70° pinhole" in card.text
    assert len(card.find_elements(By.TAG_NAME, "canvas")) == 1
    assert "rot" not in card.text
    person.choose("source", "world")
    assert person.find("world").is_displayed()
    assert not person.find("no-truth").is_displayed()


def test_files_that_are_dropped_go_where_they_belong(person: Person, tmp_path: Path) -> None:
    write_video(torch.randint(256, (12, 32, 64, 3), dtype=torch.uint8), tmp_path / "mine.mp4", 16.0)
    person.drop("mine.mp4", (tmp_path / "mine.mp4").read_bytes(), "video/mp4")
    person.until(lambda: person.read("video-notes").startswith("mine.mp4: its first 9 frames"))
    assert person.find("source").get_property("value") == "video"
    assert person.find("made").is_displayed()
    person.drop("keys.txt", "w*40")
    person.until(lambda: person.read("traced").startswith("keys.txt: "))
    assert not person.find("made").is_displayed()


def test_a_file_that_is_no_video_is_refused_on_the_page(person: Person, tmp_path: Path) -> None:
    (tmp_path / "list.mp4").write_text("#EXTM3U")
    person.choose("source", "video")
    person.find("video-file").send_keys(str(tmp_path / "list.mp4"))
    person.until(lambda: "a file of kind mp4, mov, webm, mkv or avi" in person.read("video-notes"))
    person.click("apply")
    person.until(lambda: person.read("notice").startswith("list.mp4: video must be a file of kind"))
    person.driver.get_log("browser")  # the refused file is named there


@pytest.fixture
def videos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """mine.mp4, and large.mp4, which is larger than the server takes."""
    write_video(torch.zeros(12, 32, 64, 3, dtype=torch.uint8), tmp_path / "mine.mp4", 16.0)
    (tmp_path / "large.mp4").write_bytes(bytes(1 << 20))
    monkeypatch.setattr("merope.studio.open_pages.MOST_VIDEO", (1 << 20) - 1)
    return tmp_path


def test_a_video_that_is_not_sent_leaves_no_other_in_force(person: Person, server: Served, videos: Path) -> None:
    page = Person(person.driver, server.url)
    page.until_ready()
    page.choose("source", "video")
    page.click("apply")
    assert page.read("notice") == "Choose a video, or drop one on the page."
    page.find("video-file").send_keys(str(videos / "mine.mp4"))
    page.until(lambda: page.read("video-notes").startswith("mine.mp4: its first 9 frames"))
    page.find("video-file").send_keys(str(videos / "large.mp4"))
    page.until(lambda: page.read("video-notes").startswith("large.mp4: it is larger than"))
    page.click("apply")
    assert page.read("notice") == page.read("video-notes")
    assert page.find("true").is_displayed()  # the drive of the street is still there
    page.click("to-draw")
    page.click_street((0, 40), (0, -20))
    page.until(lambda: page.read("traced") == page.read("video-notes"))
    assert not page.find("generate").is_enabled()


def test_a_file_that_is_chosen_while_another_is_sent_counts(
    person: Person, server: Served, videos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, read = threading.Event(), read_given
    monkeypatch.setattr("merope.studio.page_uploads.read_given", lambda *given: (free.wait(60), read(*given))[1])
    page = Person(person.driver, server.url)
    page.until_ready()
    page.choose("source", "video")
    page.find("video-file").send_keys(str(videos / "mine.mp4"))
    page.find("video-file").send_keys(str(videos / "large.mp4"))
    page.until(lambda: page.read("video-notes").startswith("large.mp4: it is larger than"))
    free.set()
    answered = "return performance.getEntriesByType('resource').filter(({ name }) => name.includes('/video?')).length"
    page.until(lambda: page.driver.execute_script(answered) == 1)
    page.click("apply")
    assert page.read("notice").startswith("large.mp4: it is larger than")


def test_what_is_odd_about_a_dropped_file_stands_below_the_path(person: Person) -> None:
    person.click("to-draw")
    lines = [f"{k / 16} 0 0 {0.5 * k + (40.0 if k > 20 else 0.0)} 0 0 0 1" for k in range(40)]
    person.drop("jump.tum", "\n".join(lines))
    person.until(lambda: person.read("traced").startswith("jump.tum: "))
    assert "jump" in person.read("path-notes")
    person.click_street((0, 0))
    assert person.read("path-notes") == ""


def test_a_model_with_a_text_encoder_is_chosen_and_prompted(
    browser: webdriver.Chrome, model: StudioModel, tmp_path: Path
) -> None:
    write_studio_model(tmp_path / "with-text", replace(CLIPS, height=64), with_text=True)
    other = load_model(ModelChoice(tmp_path / "with-text", prompt="a street", device="cpu"))
    with served(model, other) as here:
        person = Person(browser, here.url)
        person.until_ready()
        assert person.find("no-prompt").is_displayed()
        assert not person.find("prompt").is_displayed()
        person.choose("model", "1")
        assert "64×64" in person.read("facts")
        assert person.find("prompt").get_property("value") == "a street"
        person.find("prompt").send_keys(" at night")
        person.click("apply")
        person.until(lambda: person.driver.execute_script("return document.getElementById('made').height") == 64)
        (page,) = here.studio.pages.values()
        person.until(lambda: page.drive is not None and page.drive.sampling.prompt == "a street at night")
        person.until_ready()
        browser.get("about:blank")

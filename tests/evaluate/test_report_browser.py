"""The report in a real browser without a network: it opens, sorts, filters, expands and shows its pictures.

Without a browser these tests are skipped, or fail if MEROPE_REQUIRE_BROWSER is set.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from browser import opened_browser
from scenes import curved_drive, straight_drive
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from merope.evaluate.discover import ClipName, Problem
from merope.evaluate.record import Record, failed_record, thumbnails
from merope.evaluate.report import report_html, write_report
from merope.evaluate.results import Results, measure
from merope.formats.video import write_video

FRAMES = 9
NASTY = '<img src="http://example.org/x.png" onerror="alert(1)">"&'


def record(method: str, clip: ClipName, yaw_step_rad: float) -> Record:
    """A clip that should turn by 0.07 a frame and turns by something else."""
    pictures = thumbnails(torch.randint(0, 255, (FRAMES, 36, 64, 3), dtype=torch.uint8))
    path, valid = curved_drive(FRAMES, yaw_step_rad=yaw_step_rad), torch.ones(FRAMES, dtype=torch.bool)
    return Record(method, clip, curved_drive(FRAMES), path, valid, True, True, "stand-in", thumbnails=pictures)


def results(methods: dict[str, float]) -> Results:
    """Clips 0 … 4 get worse; the last method failed on one, and one is static."""
    records = []
    for method, error_rad in methods.items():
        for number in range(5):
            clip = ClipName(f"scene-{number}", ("original", "left", "right")[number % 3])
            records.append(record(method, clip, 0.07 + error_rad * (number + 1)))
        records.append(record(method, ClipName(NASTY), 0.07))
    problem = Problem(method, "lost", "unreadable video", "not a video")
    records.append(failed_record(method, ClipName("lost"), problem, straight_drive(FRAMES), True))
    return measure(records, [Problem(method, "stray", "no trajectory", "nobody asked")], {"seed": 0}, {"torch": "2"})


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    driver = opened_browser(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    made = {"one": results({"ours": 0.01}), "several": results({"close": 0.001, "far": 0.02, "middle": 0.008})}
    for name, numbers in made.items():
        (folder / f"{name}.html").write_text(report_html(numbers), encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in made}


@pytest.fixture(params=["one", "several"])
def page(request: pytest.FixtureRequest, browser: webdriver.Chrome, pages: dict[str, str]) -> webdriver.Chrome:
    browser.get(pages[request.param])
    return browser


@pytest.fixture
def comparison(browser: webdriver.Chrome, pages: dict[str, str]) -> webdriver.Chrome:
    browser.get(pages["several"])
    return browser


def select(driver: webdriver.Chrome, css: str) -> list[WebElement]:
    return driver.find_elements(By.CSS_SELECTOR, css)


def column(driver: webdriver.Chrome, table: str, head: str) -> list[float | None]:
    """Numbers of a column in the order of the rows, None where there is none."""
    script = """
        const table = document.querySelector(arguments[0]);
        const head = Array.from(table.tHead.rows[0].cells).find(
            (cell) => !cell.hidden && cell.textContent.startsWith(arguments[1]));
        return Array.from(table.tBodies, (body) => body.rows[0].cells[head.cellIndex].dataset.v);
    """
    return [None if value == "" else float(value) for value in driver.execute_script(script, table, head)]


def click_head(driver: webdriver.Chrome, table: str, head: str) -> None:
    (button,) = (one for one in select(driver, f"{table} thead th:not([hidden]) button") if one.text.startswith(head))
    button.click()


def test_opens_without_errors_and_without_a_request(page: webdriver.Chrome) -> None:
    select(page, "button.open")[0].click()
    loaded = page.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert [url for url in loaded if not url.startswith(("data:", "file:"))] == []
    assert [line for line in page.get_log("browser") if line["level"] in ("SEVERE", "WARNING")] == []
    assert page.execute_script("return document.compatMode") == "CSS1Compat"
    assert page.title == "Camera control report"


def test_clips_expand_and_show_paths_and_frames(page: webdriver.Chrome) -> None:
    methods = 3 if select(page, "#metric") else 1
    assert len(select(page, "tr.detail")) == 1
    assert len(select(page, "img")) == 4 * methods  # no other clip is decoded before it is asked for
    (body,) = (one for one in select(page, "tbody.clip") if one.get_attribute("data-name") == "right/scene-2")
    button = body.find_element(By.CSS_SELECTOR, "button.open")
    button.send_keys(Keys.ENTER)
    assert button.get_attribute("aria-expanded") == "true"
    detail = body.find_element(By.CSS_SELECTOR, f"#{button.get_attribute('aria-controls')}")
    assert detail.is_displayed()
    assert len(detail.find_elements(By.CSS_SELECTOR, "svg.birdseye")) == methods
    images = detail.find_elements(By.TAG_NAME, "img")
    assert len(images) == 4 * methods
    decoded = "Promise.all(Array.from(document.images, (image) => image.decode()))"
    page.execute_async_script(f"{decoded}.then(arguments[0])")
    assert [page.execute_script("return arguments[0].naturalWidth", image) for image in images] == [64] * len(images)
    assert [image.get_attribute("alt").startswith("Frame") for image in images] == [True] * len(images)
    button.send_keys(Keys.SPACE)
    assert not detail.is_displayed()


def test_the_worst_clip_with_pictures_is_open_from_the_start(page: webdriver.Chrome) -> None:
    (opened,) = select(page, 'button.open[aria-expanded="true"]')
    assert opened.text == "scene-4"  # the one before it has failed and has none
    assert all(image.is_displayed() for image in select(page, "tr.detail img"))


@pytest.mark.parametrize("is_there", [True, False])
def test_the_video_is_shown_if_it_lies_beside_the_page(
    browser: webdriver.Chrome, tmp_path: Path, is_there: bool
) -> None:
    video = tmp_path / "videos/50 % #1.mp4"
    if is_there:
        write_video(torch.zeros(FRAMES, 36, 64, 3, dtype=torch.uint8), video, 12.0)
    one = replace(record("ours", ClipName("clip"), 0.08), video=video)
    write_report(measure([one], [], {}, {}), tmp_path / "out/report.html")
    browser.get((tmp_path / "out/report.html").as_uri())
    size = "const one = document.querySelector('video'); return one === null ? 0 : one.videoWidth"
    WebDriverWait(browser, 20).until(lambda driver: driver.execute_script(size) == (64 if is_there else 0))
    assert len(select(browser, "tr.detail video")) == int(is_there)
    assert len(select(browser, "tr.detail img")) == 4  # frames remain either way
    browser.get_log("browser")  # the missing file is named there


def test_worst_clips_come_first(page: webdriver.Chrome) -> None:
    names = [body.get_attribute("data-name") for body in select(page, "tbody.clip")]
    assert names == [
        "lost",
        "left/scene-4",
        "original/scene-3",
        "right/scene-2",
        "left/scene-1",
        "original/scene-0",
        NASTY,
    ]


def test_summary_sorts_by_column_and_back(comparison: webdriver.Chrome) -> None:
    for head, worst_first in (("CamMC", True), ("AUC@10", False)):
        click_head(comparison, "#summary table", head)
        values = column(comparison, "#summary table", head)
        assert values == sorted(values, reverse=worst_first)
        click_head(comparison, "#summary table", head)
        assert column(comparison, "#summary table", head) == values[::-1]
        sorted_heads = select(comparison, "#summary table th[aria-sort]")
        assert [one.text[: len(head)] for one in sorted_heads] == [head] * len(sorted_heads)


def test_undefined_counts_as_worst(page: webdriver.Chrome) -> None:
    head = "CamMC" if not select(page, "#metric") else "middle"
    click_head(page, "table.clips", head)
    worst_first = column(page, "table.clips", head)
    assert worst_first[0] is None
    assert worst_first[1:] == sorted(worst_first[1:], reverse=True)
    click_head(page, "table.clips", head)
    assert column(page, "table.clips", head)[-1] is None


def test_methods_are_ordered_and_marked_as_in_the_paper(comparison: webdriver.Chrome) -> None:
    table = select(comparison, "#summary table")[0]
    rows = [row.text for row in table.find_elements(By.CSS_SELECTOR, "tbody th")]
    assert rows == ["far", "middle", "close"]  # by CamMC, from highest to lowest
    marks = {tag: table.find_elements(By.CSS_SELECTOR, f"tbody td {tag}") for tag in ("b", "u")}
    owners = {
        tag: {one.find_element(By.XPATH, "ancestor::tr/th").text for one in found} for tag, found in marks.items()
    }
    assert owners["b"] == {"close"}
    assert "far" not in owners["u"]


def test_clips_are_chosen_by_name_manoeuvre_and_problem(comparison: webdriver.Chrome) -> None:
    def shown() -> list[str | None]:
        return [body.get_attribute("data-name") for body in select(comparison, "tbody.clip") if body.is_displayed()]

    select(comparison, "#name")[0].send_keys("SCENE-3")
    assert shown() == ["original/scene-3"]
    select(comparison, "#name")[0].clear()
    select(comparison, "#name")[0].send_keys(" ", Keys.BACKSPACE)
    select(comparison, '#manoeuvre option[value="left"]')[0].click()
    assert sorted(map(str, shown())) == ["left/scene-1", "left/scene-4"]
    select(comparison, '#manoeuvre option[value=""]')[0].click()
    select(comparison, "#only-problems")[0].click()
    assert shown() == ["lost"]
    assert select(comparison, "#shown")[0].text == "1 of 7 clips"


def test_the_metric_of_the_comparison_can_be_chosen(comparison: webdriver.Chrome) -> None:
    before = column(comparison, "table.clips", "far")
    select(comparison, '#metric option[value="rot_deg"]')[0].click()
    after = column(comparison, "table.clips", "far")
    assert before != after
    assert len(select(comparison, "table.clips thead th:not([hidden])")) == 2 + 3


def test_a_dot_leads_to_its_clip(comparison: webdriver.Chrome) -> None:
    dot = select(comparison, 'circle[data-clip="original/scene-3"]')[0]
    comparison.execute_script("arguments[0].dispatchEvent(new MouseEvent('click'))", dot)
    opened = select(comparison, 'button.open[aria-expanded="true"]')[1]  # after the one that is open from the start
    assert opened.text == "scene-3"
    assert comparison.switch_to.active_element == opened


def test_problems_are_listed_with_how_they_count(page: webdriver.Chrome) -> None:
    rows = [row.text for row in select(page, "#problems tbody")]
    (lost,) = (row for row in rows if row.startswith("lost"))
    assert "not a video" in lost
    assert "miss in the AUC" in lost
    assert any(row.startswith("stray") for row in rows)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling_and_text_has_contrast(page: webdriver.Chrome, scheme: str) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    phone = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        page.execute_script("document.querySelectorAll('button.open')[1].click()")
        assert page.execute_script("return document.documentElement.scrollWidth") <= 390
        for css in ("body", ".lead", ".kind", "button.open"):
            assert contrast(page, css) >= 4.5, css
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def contrast(driver: webdriver.Chrome, css: str) -> float:
    """WCAG contrast of an element's text on the nearest background behind it."""
    script = """
        let element = document.querySelector(arguments[0]);
        const ink = getComputedStyle(element).color;
        const paper = () => getComputedStyle(element).backgroundColor;
        while (paper() === "rgba(0, 0, 0, 0)") element = element.parentElement;
        return [ink, paper()];
    """
    lights = sorted(luminance(colour) for colour in driver.execute_script(script, css))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def luminance(colour: str) -> float:
    channels = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


class Addresses(HTMLParser):
    """Everything in a page that could be fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]


def test_the_file_names_no_address_to_fetch(pages: dict[str, str]) -> None:
    text = Path(pages["several"].removeprefix("file://")).read_text(encoding="utf-8")
    details = re.findall(r'<script type="text/plain">(.*?)</script>', text, re.DOTALL)
    addresses = [address for part in (text, *details) for address in Addresses(part).found]
    assert len(addresses) == 1 + 4 + 6 * 3 * 4  # icon, sections, frames
    assert [address for address in addresses if not address.startswith(("data:", "#"))] == []

"""Who can use the page: on a phone, with a keyboard alone, with a screen reader, in the dark and in the light."""

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from studio.studio_browser import Person

FIRST, BLOCK = 9, 12
FAINT = """  // how many texts there are, and those with less than 4.5:1 between letters and ground
    const light = ([r, g, b]) => {
      const [x, y, z] = [r, g, b].map((one) => (one /= 255) <= .03928 ? one / 12.92 : ((one + .055) / 1.055) ** 2.4);
      return .2126 * x + .7152 * y + .0722 * z;
    };
    const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const ground = (element) => {
      for (; element; element = element.parentElement) {
        const colour = numbers(getComputedStyle(element).backgroundColor);
        if (colour.length === 3 || colour[3] === 1) return colour;
      }
      return [255, 255, 255];
    };
    const exempt = ":disabled, [aria-disabled=true], .hidden, .skip", fields = "[type=number], textarea";
    const words = [...document.querySelectorAll("body *")].filter((element) =>
      element.checkVisibility({ visibilityProperty: true }) && !element.closest(exempt) && (element.matches(fields)
        || [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim())));
    const faint = words.map((element) => {
      const look = getComputedStyle(element), on = light(ground(element));
      const text = light(numbers(element instanceof SVGElement ? look.fill : look.color));
      const ratio = (Math.max(on, text) + .05) / (Math.min(on, text) + .05);
      return [`${element.tagName}#${element.id} ${element.textContent.trim().slice(0, 30)}`, ratio];
    });
    return [words.length, faint.filter(([, ratio]) => ratio < 4.5)];
"""
FOCUSED = """
    const one = document.activeElement, look = getComputedStyle(one.closest(".file") ?? one);
    const name = one.id || one.dataset.key || one.className || one.getAttribute("aria-label") || one.tagName;
    return [name, parseFloat(look.outlineWidth) >= 2 && look.outlineStyle !== "none"];
"""

LISTEN = """
    window.said = [];
    const state = arguments[0];
    new MutationObserver(() => said.push(state.textContent)).observe(state, { childList: true });
"""


def set_mode(person: Person, mode: str) -> None:
    person.click("to-draw" if mode == "draw" else "to-drive")
    if mode == "video":
        person.choose("source", "video")
    if mode == "draw":
        person.click("add-point")
        person.until(lambda: person.driver.find_elements(By.CSS_SELECTOR, "#points tr"))


@pytest.mark.parametrize("mode", ["drive", "draw", "video"])
def test_all_words_can_be_read_in_the_dark_and_in_the_light(person: Person, mode: str) -> None:
    set_mode(person, mode)
    for theme in ("light", "dark"):
        person.set_theme(theme)
        count, faint = person.driver.execute_script(FAINT)
        assert count > 30
        assert faint == [], theme


@pytest.mark.parametrize("mode", ["drive", "draw", "video"])
def test_a_phone_has_all_of_it_without_scrolling_sideways(person: Person, mode: str) -> None:
    person.set_size(360, 780)
    set_mode(person, mode)
    assert person.driver.execute_script("return document.documentElement.scrollWidth") == 360
    for button in person.driver.find_elements(By.CSS_SELECTOR, ".pad button") if mode == "drive" else []:
        assert min(button.size["width"], button.size["height"]) >= 44


def test_a_finger_on_the_pad_drives_as_long_as_it_stays(person: Person) -> None:
    person.set_size(360, 780)
    person.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    forward = person.driver.find_element(By.CSS_SELECTOR, '[data-key="up"]')
    person.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", forward)
    box = person.driver.execute_script("return arguments[0].getBoundingClientRect().toJSON()", forward)
    finger = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    person.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [finger]})
    person.until(lambda: "held" in (forward.get_attribute("class") or ""))
    person.until(lambda: person.frames >= FIRST + 2 * BLOCK)
    person.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    person.until(lambda: "held" not in (forward.get_attribute("class") or ""))
    person.until_ready()
    person.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})


def tabbed(person: Person) -> list[str]:
    """What the Tab key comes to, in order. Each must show that it has the focus."""
    person.driver.execute_script("document.activeElement.blur(); window.getSelection().removeAllRanges()")
    person.driver.execute_script("document.body.tabIndex = -1; document.body.focus(); scrollTo(0, 0)")
    found: list[str] = []
    for _ in range(60):
        ActionChains(person.driver).send_keys(Keys.TAB).perform()
        name, is_visible = person.driver.execute_script(FOCUSED)
        if name == "BODY" or name in found:
            break
        assert is_visible, f"{name} does not show that it has the focus"
        found.append(name)
    return found


def test_the_keyboard_reaches_everything_in_the_order_of_the_page(person: Person) -> None:
    order = tabbed(person)
    first, panel = ["skip", "to-drive", "to-draw", "play", "cursor", "live"], ["up", "left", "down", "right"]
    assert order[:10] == first + panel
    assert order[10:15] == ["set-speed", "set-yaw", "pause", "restart", "save-video"]  # nothing to undo yet
    assert order[-6:] == ["source", "world", "lens", "steps", "fov", "apply"]
    person.click("to-draw")
    for _ in range(2):
        person.click("add-point")
    person.until(person.find("generate").is_enabled)
    drawn = tabbed(person)
    assert not set(drawn) & {"up", "pause", "apply"}
    fields = [f"Point 1, metres {what}" for what in ("to the right", "ahead", "per second")]
    assert [name for name in drawn if name.startswith("Point 1")] == fields
    assert {"generate", "stop", "add-point", "clear-points", "pose-file", "metric"} <= set(drawn)


def test_everything_has_a_name_for_screen_readers(person: Person) -> None:
    for mode in ("drive", "draw", "video"):
        set_mode(person, mode)
        tree = person.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        wanted = ("button", "slider", "spinbutton", "combobox", "link", "image", "img", "textbox", "checkbox")
        nodes = [node for node in tree if node.get("role", {}).get("value") in wanted and not node.get("ignored")]
        assert len(nodes) > 12
        assert [node for node in nodes if not node["name"]["value"]] == []


def test_what_happens_is_said_without_a_word_for_every_step(person: Person) -> None:
    state = person.find("state")
    assert (state.get_attribute("role"), state.get_attribute("aria-live")) == ("status", "polite")
    person.driver.execute_script(LISTEN, state)
    person.driver.find_element(By.CSS_SELECTOR, '[data-key="up"]').click()
    person.until(lambda: person.frames == FIRST + BLOCK)
    person.until_ready()
    assert person.driver.execute_script("return said") == ["Working …", "Ready: hold ↑ to drive"]
    assert not person.find("progress").is_displayed()

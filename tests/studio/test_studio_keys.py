"""What has the focus after a click: keys drive, pause, undo and restart, whatever was clicked before."""

from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from studio.studio_browser import Person
from studio.studio_server import Served

from merope.studio.street_drive import StreetDrive

FIRST, BLOCK = 9, 12


def press(person: Person, key: str) -> None:
    """Wherever the focus is."""
    ActionChains(person.driver).send_keys(key).perform()


def drive_a_block(person: Person) -> None:
    before = person.frames
    press(person, Keys.ARROW_UP)
    person.until(lambda: person.frames == before + BLOCK)
    person.until_ready()


def the_drive(server: Served) -> StreetDrive | None:
    (page,) = server.studio.pages.values()
    return page.drive


def test_keys_do_what_they_say_after_a_click_on_a_button(person: Person) -> None:
    for button in ("apply", "restart"):
        person.click(button)
        person.until_ready()
        person.until(lambda: person.frames == FIRST)
        drive_a_block(person)
        press(person, " ")
        person.until(lambda: person.state == "paused")
        assert person.frames == FIRST + BLOCK  # not begun anew
        press(person, " ")
        person.until_ready()
    press(person, "u")
    person.until(lambda: person.frames == FIRST)
    drive_a_block(person)
    person.click("pause")
    person.click("pause")
    press(person, "r")
    person.until(lambda: person.frames == FIRST)
    person.until_ready()


def test_space_presses_a_button_that_the_keyboard_has_reached(person: Person) -> None:
    drive_a_block(person)
    person.driver.execute_script("document.getElementById('undo').focus()")
    press(person, " ")
    person.until(lambda: person.frames == FIRST)
    assert person.state != "paused"


def test_arrow_keys_drive_after_the_slider_of_frames_was_used(person: Person) -> None:
    person.driver.find_element(By.CSS_SELECTOR, '[data-key="up"]').click()
    person.until(lambda: person.frames == FIRST + BLOCK)
    person.until_ready()
    person.click("cursor")
    assert person.find("live").get_attribute("aria-pressed") == "false"
    drive_a_block(person)


def test_enter_in_a_field_begins_a_drive_but_not_while_a_path_is_drawn(person: Person, server: Served) -> None:
    before = the_drive(server)
    person.click("to-draw")
    person.find("world").send_keys(Keys.ENTER)
    for _ in range(2):
        person.click("add-point")
    person.until(person.find("generate").is_enabled)  # an answer to what was asked after it
    assert the_drive(server) is before
    person.click("to-drive")
    person.find("steps").send_keys(Keys.ENTER)
    person.until(lambda: the_drive(server) not in (before, None))
    person.until_ready()

"""What a person does on the studio's page and reads there, in a real browser."""

import base64
import time
from collections.abc import Callable
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select


class Person:
    """Somebody before the page."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        driver.get(url)

    def find(self, id: str) -> WebElement:
        return self.driver.find_element(By.ID, id)

    def read(self, id: str) -> str:
        return str(self.find(id).get_property("textContent"))

    def click(self, id: str) -> None:
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", self.find(id))
        self.find(id).click()

    def choose(self, id: str, value: str) -> None:
        Select(self.find(id)).select_by_value(value)

    def set(self, id: str, value: str) -> None:
        """A slider or a field, as if it had been moved."""
        script = "arguments[0].value = arguments[1]; for (const name of ['input', 'change'])"
        self.driver.execute_script(f"{script} arguments[0].dispatchEvent(new Event(name))", self.find(id), value)

    def set_size(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def set_theme(self, theme: str) -> None:
        chosen = [{"name": "prefers-color-scheme", "value": theme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": chosen})

    def click_street(self, *places: tuple[int, int]) -> None:
        """In pixels to the right of and below the middle of the map."""
        for right, below in places:
            street = self.find("map")
            ActionChains(self.driver).move_to_element_with_offset(street, right, below).click().perform()

    def drop(self, name: str, content: str | bytes, kind: str = "") -> None:
        """A file, onto the page."""
        encoded = base64.b64encode(content if isinstance(content, bytes) else content.encode()).decode()
        script = """
            const carried = new DataTransfer();
            const content = Uint8Array.from(atob(arguments[1]), (one) => one.charCodeAt(0));
            carried.items.add(new File([content], arguments[0], { type: arguments[2] }));
            document.body.dispatchEvent(new DragEvent("drop", { bubbles: true, dataTransfer: carried }));
        """
        self.driver.execute_script(script, name, encoded, kind)

    def save(self, id: str, file: Path) -> Path:
        """What a link downloads into this file."""
        file.unlink(missing_ok=True)
        self.click(id)
        self.until(file.exists)
        return file

    def hold(self, *keys: str) -> None:
        chain = ActionChains(self.driver)
        for key in keys:
            chain.key_down(key)
        chain.perform()

    def release(self, *keys: str) -> None:
        chain = ActionChains(self.driver)
        for key in keys:
            chain.key_up(key)
        chain.perform()

    def until(self, is_so: Callable[[], object], seconds: float = 180.0) -> float:
        """Wait; how long it took."""
        began_s = time.monotonic()
        while not is_so():
            assert time.monotonic() < began_s + seconds, f"{self.read('state')} | {self.read('notice')}"
            time.sleep(0.02)
        return time.monotonic() - began_s

    def until_ready(self) -> None:
        self.until(lambda: self.state == "ready" and self.frames > 0)

    @property
    def state(self) -> str:
        return str(self.find("state").get_attribute("data-state"))

    @property
    def frames(self) -> int:
        """Of the drive, as many as can be watched."""
        slider = self.find("cursor")
        return int(slider.get_property("max")) + 1 if slider.is_enabled() else 0  # type: ignore[arg-type]

    def colours(self, id: str) -> int:
        """How many colours a canvas shows; one where nothing is drawn."""
        script = """
            const canvas = document.getElementById(arguments[0]);
            const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            return new Set(new Uint32Array(data.buffer)).size;
        """
        return int(self.driver.execute_script(script, id))

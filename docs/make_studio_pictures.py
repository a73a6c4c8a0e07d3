"""Write docs/images/studio.png, studio-phone.png and, in the dark, studio-draw.png: the studio's page in Chromium.

All options but --blocks go to `merope studio`. Pictures are kept in 256 colours, so that each is below 300 kB.
"""

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import merope

IMAGES = Path(__file__).with_name("images")
PAGE = Path(merope.__file__).parent / "studio" / "page"
PATIENCE_S = 600.0


def opened(folder: str) -> webdriver.Chrome:
    options = Options()
    options.binary_location = shutil.which("chromium") or "chromium"
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def set_width(driver: webdriver.Chrome, width: int, height: int, pixels: float) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": pixels, "mobile": width < 700}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    time.sleep(1.0)


def set_theme(driver: webdriver.Chrome, theme: str) -> None:
    chosen = [{"name": "prefers-color-scheme", "value": theme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": chosen})


def save_picture(driver: webdriver.Chrome, name: str) -> None:
    """What is on the screen, in the colours of the page and those that are most frequent."""
    picture = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    own = [int(colour[k : k + 2], 16) for colour in page_colours() for k in (0, 2, 4)]
    frequent = picture.quantize(256 - len(own) // 3, Image.Quantize.MEDIANCUT).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette((own + frequent)[: 3 * 256])
    picture.quantize(palette=palette, dither=Image.Dither.NONE).save(IMAGES / name, optimize=True)


def page_colours() -> list[str]:
    """Six hexadecimal digits each: thin lines and dots would lose theirs among those of the videos."""
    words = "".join((PAGE / name).read_text() for name in ("studio.css", "takes.js"))
    return sorted(set(re.findall(r"#([0-9a-f]{6})\b", words)))


def wait(driver: webdriver.Chrome, state: str) -> None:
    """Until the page has frames and is in this state."""
    is_so = f"document.getElementById('state').dataset.state === '{state}'"
    wait_until(driver, f"{is_so} && !document.getElementById('cursor').disabled")


def wait_until(driver: webdriver.Chrome, script: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not driver.execute_script(f"return {script}"):
        assert time.monotonic() < end, driver.execute_script("return document.body.innerText")
        time.sleep(0.2)


def drive(driver: webdriver.Chrome, blocks: int) -> None:
    """A turn to the left, one tap for each block."""
    for number in range(blocks):
        keys = (Keys.ARROW_UP, Keys.ARROW_LEFT) if number else (Keys.ARROW_UP,)
        chain = ActionChains(driver)
        for key in keys:
            chain.key_down(key)
        chain.perform()
        wait(driver, "working")
        for key in keys:
            chain = ActionChains(driver)
            chain.key_up(key).perform()
        wait(driver, "ready")
    wait_until(driver, "!/–/.test(document.getElementById('off').textContent)")  # it comes after the frames
    time.sleep(2.0)


def draw(driver: webdriver.Chrome) -> None:
    """Two paths side by side, clicked into the view from above."""
    driver.find_element(By.ID, "to-draw").click()
    for number, clicks in enumerate((((0, 60), (-4, 20), (-30, -30)), ((0, 60), (4, 20), (30, -30))), 1):
        driver.find_element(By.ID, "clear-points").click()
        for right_px, down_px in clicks:
            street = driver.find_element(By.ID, "map")
            ActionChains(driver).move_to_element_with_offset(street, right_px, down_px).click().perform()
        wait_until(driver, "!document.getElementById('generate').disabled")
        driver.find_element(By.ID, "generate").click()
        wait_until(driver, f"/left the path/.test(document.getElementById('take-{number}')?.textContent)")
        wait_until(driver, f"!/measuring/.test(document.getElementById('take-{number}').textContent)")
    time.sleep(5.0)  # to the last frame


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=2)
    options, studio = parser.parse_known_args()
    program = "import sys; from merope.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "studio", "--port", "0", *studio]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = next(found[1] for line in server.stdout if (found := re.search(r"open (\S+)", line)))
        with tempfile.TemporaryDirectory() as folder:
            driver = opened(folder)
            set_theme(driver, "light")
            set_width(driver, 1400, 1090, 1.0)
            driver.get(url)
            wait(driver, "ready")
            drive(driver, options.blocks)
            save_picture(driver, "studio.png")
            set_width(driver, 360, 1180, 2.0)
            save_picture(driver, "studio-phone.png")
            set_theme(driver, "dark")
            set_width(driver, 1400, 1090, 1.0)
            draw(driver)
            save_picture(driver, "studio-draw.png")
            driver.quit()
    finally:
        server.terminate()
        server.wait(30)


if __name__ == "__main__":
    main()

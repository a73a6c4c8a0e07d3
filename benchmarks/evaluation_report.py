"""The report of docs/evaluation-report.md: stand-in methods with known errors, and every kind of trouble.

    python benchmarks/evaluation_report.py --pictures docs/images --large 384

A method here is the procedural world rendered along a path with an error of known kind, so the page can be checked by
eye. To be quick only every 16th frame is rendered and held; poses are given (precomputed), not recovered.
"""

import argparse
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from merope import formats
from merope.evaluate.discover import ClipName
from merope.evaluate.recover import EstimatorChoice
from merope.evaluate.report import write_report
from merope.evaluate.results import Results, as_text, measure
from merope.evaluate.run import evaluate
from merope.formats.trajectory import Trajectory
from merope.formats.video import write_video
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Pinhole
from merope.geometry.poses import rigid
from merope.geometry.trajectories import driving_path, turn_by
from merope.world.render import render
from merope.world.scene import World

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

FRAMES, RATE_HZ, PREFIX, HOLD = 49, 12.0, 9, 16
HEIGHT, WIDTH = 180, 320
LENS = Pinhole(0.79 * WIDTH, 0.79 * WIDTH, WIDTH / 2, HEIGHT / 2, WIDTH, HEIGHT)
TURNS_RAD = {"original": 0.0, "left": -0.5, "right": 0.5}


def turns_too_little(path: Tensor, seed: int) -> Tensor:  # [T, 4, 4]
    """The commanded turn is not quite made."""
    return turn_by(path, -0.05 - 0.02 * (seed % 3), PREFIX)


def drifts(path: Tensor, seed: int) -> Tensor:  # [T, 4, 4]
    """Centres wander off, a few centimetres a frame."""
    generator = torch.Generator().manual_seed(seed)
    steps = 0.03 * torch.randn(len(path), 3, dtype=torch.float64, generator=generator)
    steps[0] = 0.0
    return rigid(path[:, :3, :3], path[:, :3, 3] + steps.cumsum(0))


def ignores_the_command(path: Tensor, seed: int) -> Tensor:  # [T, 4, 4]
    """Some other drive that shares the first frames."""
    other = driving_path(FRAMES, RATE_HZ, torch.Generator().manual_seed(900 + seed), PREFIX)
    return path[:1] @ other


METHODS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "drifts": drifts,
    "turns too little": turns_too_little,
    "ignores the command": ignores_the_command,
}


def write_example(folder: Path, scenes: int) -> None:
    """Commanded paths, videos and recovered paths of every method."""
    for scene in range(scenes):
        base = driving_path(FRAMES, RATE_HZ, torch.Generator().manual_seed(scene), PREFIX)
        for number, (manoeuvre, yaw_rad) in enumerate(TURNS_RAD.items()):
            commanded = turn_by(base, yaw_rad, PREFIX)
            name = f"{manoeuvre}/scene-{scene:04d}"
            _write_path(commanded, folder / "commanded" / f"{name}.json")
            world = World(scene).cleared(commanded)
            for method, follow in METHODS.items():
                followed = follow(commanded, 3 * scene + number)
                _write_path(followed, folder / "estimates" / method / f"{name}.json")
                write_video(_frames(world, followed), folder / "videos" / method / f"{name}.mp4", RATE_HZ)
                print(f"rendered {name} as {method}", flush=True)


def _write_path(poses: Tensor, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    formats.write(Trajectory(poses, True, "made for an example", lens=LENS), file)


def _frames(world: World, poses: Tensor) -> Tensor:  # [T, 4, 4] -> uint8 [T, H, W, 3]
    image = render(world, Cameras(poses[::HOLD], LENS), HEIGHT, WIDTH).image
    return (255 * image).round().to(torch.uint8).repeat_interleave(HOLD, 0)[:FRAMES]


def spoil(folder: Path) -> None:
    """One clip of each trouble that real folders have."""
    videos = folder / "videos"
    (videos / "drifts/left/scene-0001.mp4").write_bytes(b"not a video")
    (videos / "turns too little/right/scene-0000.mp4").unlink()
    parked = torch.eye(4, dtype=torch.float64).repeat(FRAMES, 1, 1)
    _write_path(parked, folder / "commanded" / "parked.json")
    for method in METHODS:
        _write_path(parked, folder / "estimates" / method / "parked.json")
        write_video(_frames(World(77), parked), videos / method / "parked.mp4", RATE_HZ)
    write_video(torch.zeros(4, 32, 32, 3, dtype=torch.uint8), videos / "drifts" / "nobody-asked.mp4", RATE_HZ)


def browser() -> "Chrome":
    """Headless Chromium with a fresh profile."""
    from selenium.webdriver import Chrome
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = shutil.which("chromium") or "chromium"
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tempfile.mkdtemp()}"):
        options.add_argument(flag)
    return Chrome(options=options, service=Service(shutil.which("chromedriver")))


def take_pictures(page: Path, folder: Path) -> None:
    """Screenshots of the page: the top, an opened clip (dark), and a phone (dark)."""
    from PIL import Image

    driver = browser()
    open_clip = "document.querySelectorAll('button.open')[arguments[0]].click()"
    show_clips = "document.querySelector('#clips').scrollIntoView()"
    for name, width, height, scheme, scripts in (
        ("report", 1400, 1500, "light", []),
        ("report-clip", 1240, 1100, "dark", [(open_clip, 2), (show_clips, None)]),
        ("report-phone", 390, 1130, "dark", [(open_clip, 3), (show_clips, None)]),
    ):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        driver.get(page.resolve().as_uri())
        for script, argument in scripts:
            driver.execute_script(script, argument)
        driver.save_screenshot(str(folder / f"{name}.png"))
        with Image.open(folder / f"{name}.png") as picture:
            small = picture.convert("RGB").quantize(128, dither=Image.Dither.NONE)
        small.save(folder / f"{name}.png", optimize=True)
    driver.quit()


def time_large_page(results: Results, file: Path, clips: int) -> None:
    """How large the page of a full run is and how long a browser takes to open it; clips are repeated to fill it."""
    own = {method: [one.record for one in results.clips if one.method == method] for method in results.methods}
    usable = {method: [record for record in records if record.thumbnails] for method, records in own.items()}
    names = [ClipName(f"scene-{k // 3:04d}", list(TURNS_RAD)[k % 3]) for k in range(clips)]
    many = [
        replace(records[k % len(records)], clip=name) for records in usable.values() for k, name in enumerate(names)
    ]
    write_report(measure(many, [], results.settings, results.versions), file)
    driver = browser()
    driver.get(file.resolve().as_uri())
    opened_ms = driver.execute_script("return performance.timing.loadEventEnd - performance.timing.navigationStart")
    driver.quit()
    print(f"{clips} clips of {len(usable)} methods: {file.stat().st_size / 1e6:.0f} MB, open after {opened_ms} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/report-example"))
    parser.add_argument("--scenes", type=int, default=3)
    parser.add_argument("--pictures", type=Path, help="folder for screenshots; needs chromium and selenium")
    parser.add_argument("--large", type=int, metavar="CLIPS", help="also time the page of so many clips")
    options = parser.parse_args()
    folder = options.out / "data"
    if not (folder / "commanded").exists():
        write_example(folder, options.scenes)
        spoil(folder)
    methods = {method: folder / "videos" / method for method in METHODS}
    choice = EstimatorChoice("precomputed")
    results = evaluate(folder / "commanded", methods, choice, options.out, estimates=folder / "estimates")
    print(as_text(results))
    if options.pictures is not None:
        take_pictures(options.out / "report.html", options.pictures)
    if options.large:
        time_large_page(results, options.out / "large.html", options.large)


if __name__ == "__main__":
    main()

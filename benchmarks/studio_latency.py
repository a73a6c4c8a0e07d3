"""The studio: how long after a key is pressed does the page have its first frame, and what is the time spent on?

    python benchmarks/studio_latency.py [--model FOLDER] [--steps 8 …] [--blocks 8] [--out FILE.json]

A real server and a page without a browser, over a real connection of this machine. For every number of steps a drive is
begun and blocks are driven, one key each, the next when the page has all that belongs to the one before, and has played
it. After four blocks the window of the stream is full. A row has the median of all blocks, in seconds from the key to

    step     the first denoising step (with the turn, the cameras and the plans of the block),
    denoised the last one,
    frame    the first picture of the block (its latent frame is decoded and encoded as JPEG),
    frames   the last picture,
    made     the end of the block (the stream has taken it in, and the video is written).

Beside them: the first picture of the very first block and of the slowest one, and the CPU seconds of the process from
the key to the first picture. Other work on the machine does not lengthen these: with n threads the first frame can come
after a n-th of them at the earliest.
"""

import argparse
import json
import platform
import socket
import threading
import time
from pathlib import Path
from statistics import median

import torch
import websocket

from merope.demo.drive import SHIPPED_MODEL
from merope.studio.guard import Access
from merope.studio.load_models import load_model
from merope.studio.serve import web_server
from merope.studio.studio_model import ModelChoice, StudioModel
from merope.studio.web_app import studio_app
from merope.train.provenance import commit, device_name

LENS = {"kind": "pinhole", "fov_deg": 70}
AHEAD = {"do": "steer", "speed_m_s": 8, "yaw_rate_deg_s": 0, "pressed": True}
RELEASED = {"do": "steer", "speed_m_s": 0, "yaw_rate_deg_s": 0}


class Page:
    """What a browser does on the wire."""

    def __init__(self, port: int) -> None:
        host = f"127.0.0.1:{port}"
        self.socket = websocket.create_connection(f"ws://{host}/drive", origin=f"http://{host}", timeout=600)

    def send(self, *messages: dict[str, object]) -> None:
        for message in messages:
            self.socket.send(json.dumps(message))

    def heard(self) -> tuple[str, int]:
        """The next message by its name; a generated picture of the drive is "picture" and its frame."""
        data = self.socket.recv()
        if isinstance(data, bytes):
            return ("picture" if data[0] == 0 else "true"), int.from_bytes(data[2:6], "big")
        message = json.loads(data)
        return message["say"], int(message.get("done", 0))

    def await_given(self, frames: int) -> None:
        """Until the last picture that a drive begins with."""
        while self.heard() != ("picture", frames - 1):
            pass


def driven(page: Page, steps: int, block_s: float) -> dict[str, float]:
    """Seconds from one key on. Nothing is left to be played then, for which the server would wait."""
    time.sleep(block_s)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    page.send(AHEAD, RELEASED)
    found: dict[str, float] = {}
    while "seen" not in found:
        name, number = page.heard()
        now_s = time.perf_counter() - began_s
        if name == "step":
            found.setdefault("step", now_s)
            found["denoised"] = now_s if number == steps else found.get("denoised", 0.0)
        elif name == "picture":
            found.setdefault("frame", now_s)
            found.setdefault("cpu_s_to_frame", time.process_time() - began_cpu_s)
            found["frames"] = now_s
        elif name in ("made", "seen"):
            found[name] = now_s
    return found


def measured(model: StudioModel, steps: int, blocks: int) -> dict[str, float]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = web_server(studio_app([model], Access()))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        page = Page(listener.getsockname()[1])
        page.send({"do": "begin", "world": 4, "lens": LENS, "steps": steps})
        page.await_given(model.first_frames)
        block_s = (model.first_frames + model.pipe.strides.frames - 1) / model.clips.frame_rate_hz
        rows = [driven(page, steps, block_s) for _ in range(blocks)]
        page.socket.close()
        server.should_exit = True
        thread.join()
    frames = [row["frame"] for row in rows]
    extremes = {"first_block_frame": round(frames[0], 3), "slowest_frame": round(max(frames), 3)}
    return {"steps": steps} | {name: round(median(row[name] for row in rows), 3) for name in rows[0]} | extremes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SHIPPED_MODEL)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = load_model(ModelChoice(options.model, device=options.device))
    rows = []
    for steps in options.steps:
        rows.append(measured(model, steps, options.blocks))
        print(rows[-1], flush=True)
    device = device_name(torch.device(options.device))
    machine = {"device": device, "threads": torch.get_num_threads(), "python": platform.python_version()}
    document = {"model": model.name, **machine, "torch": torch.__version__, "commit": commit(), "rows": rows}
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

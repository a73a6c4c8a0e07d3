"""A stream of many blocks: does its memory stay flat, do its blocks stay as fast, and where does the time go?

    python benchmarks/stream.py [--blocks 2000] [--out benchmarks/results/stream-cpu.json]
    python benchmarks/stream.py --model FOLDER --blocks 20 --steps 4 [--device cuda --precision bf16 --graphs]

Without a model: a tiny random Wan with a VAE and a MeRoPE branch, one denoising step for each block, so that thousands
of blocks pass in minutes. With one: a folder that `CameraVideoPipeline.from_pretrained` reads, its branch in `branch/`
and its sizes in `clips.json`.

First the frames per second are taken, with a full window. Then every row is a tenth of the stream: milliseconds for a
block (on the clock, and of CPU time, which other work on the machine does not lengthen), its shares, what process and
cache hold. Reading the shares slows a GPU down. Cameras are their plans and their attention; with --graphs, which
records a pass as one CUDA graph, they are their plans alone, and attention belongs to the transformer.

At the end the time from the cameras of a block to its first frames is measured: those of a latent frame come as soon as
they are decoded. Then one more block is driven, and driven again from the same cache with another count of forgotten
frames. Both must be the same to the last bit. With --compare N, N more blocks are driven twice: with what a stream
keeps between the steps of a block (turned keys, keys of the text), and without it.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanTransformer3DModel
from torch import Tensor

import merope
from merope import CameraBranchConfig, Cameras, CameraVideoPipeline, Pinhole
from merope.adapters import key_cache
from merope.adapters.attachment import attached_branch
from merope.adapters.recorded_passes import RecordedPasses
from merope.adapters.text_keys import TextKeys
from merope.generate.frame_coding import streamed_vae_dtype
from merope.generate.stream import CameraStream
from merope.train.provenance import commit, device_name

ROWS, UNTIMED_BLOCKS = 10, 6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
METRES_PER_FRAME, YAW_PER_FRAME_RAD = 0.8, 0.004


def tiny_pipeline() -> CameraVideoPipeline:
    """Random weights, in the branch too: zeros would hide the cameras."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "attention_head_dim": 24, "num_layers": 2, "ffn_dim": 32}
    sizes = {"in_channels": 4, "out_channels": 4, "text_dim": 8, "freq_dim": 16}
    transformer = WanTransformer3DModel(**heads, **sizes).eval()
    options = {"partition": (6, 6, 6, 6), "native_split": (2, 2, 2), "fractions": (0.0, 1.0)}
    branch = merope.attach(transformer, CameraBranchConfig(compression=2, blocks="every", encoding_options=options))
    with torch.no_grad():
        for parameter in branch.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    layers = {"base_dim": 3, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, "is_residual": True}
    patches = {"in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16}
    statistics = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    vae = AutoencoderKLWan(**layers, **patches, **statistics).eval()
    return CameraVideoPipeline(None, None, vae, FlowMatchEulerDiscreteScheduler(shift=3.0), transformer)


def read_pipeline(folder: Path, device: str, dtype: torch.dtype) -> tuple[CameraVideoPipeline, int, int]:
    """A model with its branch, and the height and width of its frames."""
    pipe = CameraVideoPipeline.from_pretrained(folder, dtype={"default": dtype, "vae": streamed_vae_dtype(device)})
    merope.load_branch(pipe.transformer, folder / "branch").to(dtype)
    clips = json.loads((folder / "clips.json").read_text())
    return pipe.to(device), clips["height"], clips["width"]


def driving_poses(first: int, count: int) -> Tensor:  # [count, 4, 4]
    """On a large circle, so that thousands of blocks stay in a bounded place; any frame without the ones before it."""
    yaw = YAW_PER_FRAME_RAD * torch.arange(first, first + count, dtype=torch.float64)
    radius_m = METRES_PER_FRAME / YAW_PER_FRAME_RAD
    poses = torch.eye(4, dtype=torch.float64).repeat(count, 1, 1)
    poses[:, 0, 0], poses[:, 0, 2], poses[:, 2, 0], poses[:, 2, 2] = yaw.cos(), yaw.sin(), -yaw.sin(), yaw.cos()
    poses[:, 0, 3], poses[:, 2, 3] = radius_m * (1 - yaw.cos()), radius_m * yaw.sin()
    return poses


class Stopwatch:
    """Seconds inside some calls."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            start = now()
            result = call(*args, **options)
            self.seconds[name] += now() - start
            return result

        return wrapped


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def resident_mib() -> float:
    """What this process has allocated and holds in memory; pages of files come and go with other work."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def drive(stream: CameraStream, blocks: int, lens: Pinhole) -> list[dict[str, float]]:
    """A row for every tenth of the blocks."""
    watch, rows = Stopwatch(), []
    for passes in stream._passes:
        passes.velocity = watch.timed("transformer", passes.velocity)
        passes.commit = watch.timed("transformer", passes.commit)
    stream.pipe.decode_block = watch.timed("vae", stream.pipe.decode_block)
    branch = attached_branch(stream.pipe.transformer)
    assert branch is not None
    branch.prepare_block = watch.timed("plans", branch.prepare_block)
    for processor in branch.processors().values() if not isinstance(stream._passes[0], RecordedPasses) else ():
        processor.camera_output = watch.timed("cameras", processor.camera_output)
    share = max(1, blocks // ROWS)
    for done in range(share, blocks + 1, share):
        watch.seconds.clear()
        start, cpu_start, frames = now(), time.process_time(), 0
        for _ in range(share):
            frames += len(stream.drive(Cameras(driving_poses(stream.frames, stream.block_frames), lens)))
        seconds, cpu_seconds = now() - start, time.process_time() - cpu_start
        watch.seconds["transformer"] -= watch.seconds["cameras"]
        watch.seconds["cameras"] += watch.seconds.pop("plans")
        shares = {f"{name}_percent": round(100 * part / seconds, 1) for name, part in watch.seconds.items()}
        row = {"blocks": done, "ms_per_block": round(1000 * seconds / share, 2), "fps": round(frames / seconds, 2)}
        row["cpu_ms_per_block"] = round(1000 * cpu_seconds / share, 2)
        cache = {"cache_bytes": sum(each.bytes for each in stream._state.caches)}
        rows.append({**row, **shares, "resident_mib": round(resident_mib(), 1), **cache})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def frames_per_second(stream: CameraStream, blocks: int, lens: Pinhole) -> float:
    """Without a stopwatch inside: to read it, a GPU must be waited for many times in a block."""
    start, frames = now(), 0
    for _ in range(blocks):
        frames += len(stream.drive(Cameras(driving_poses(stream.frames, stream.block_frames), lens)))
    return round(frames / (now() - start), 2)


def ms_to_first_frames(stream: CameraStream) -> float:
    """From the cameras of a block to its first frames."""
    shown, start = list[float](), now()
    stream.drive(driving_poses(stream.frames, stream.block_frames), on_frames=lambda _: shown.append(now()))
    return round(1000 * (shown[0] - start), 1)


def forgets(stream: CameraStream) -> bool:
    """Whether the next block is the same to the last bit after any number of forgotten frames."""
    poses = driving_poses(stream.frames, stream.block_frames)
    usual = stream.drive(poses)
    stream.undo()
    other = tuple(replace(cache, count=cache.count + 3_000_000) for cache in stream._state.caches)
    stream._state = replace(stream._state, caches=other)
    return torch.equal(stream.drive(poses), usual)


def compare_keeping(stream: CameraStream, blocks: int) -> dict[str, float]:
    """CPU time of blocks with and without what is kept, in turns, and how much their latents differ."""
    spent, apart = {"kept": 0.0, "anew": 0.0}, 0.0
    usual_keys, usual_text = key_cache.can_keep, TextKeys.of
    for _ in range(blocks):
        poses, made = driving_poses(stream.frames, stream.block_frames), {}
        for name in spent:
            if made:
                stream.undo()
            keeps = name == "kept"
            key_cache.can_keep = usual_keys if keeps else lambda q, plan: False
            TextKeys.of = usual_text if keeps else lambda self, text: {}
            start = time.process_time()
            stream.drive(poses)
            spent[name] += time.process_time() - start
            made[name] = stream.latents
        apart = max(apart, float((made["kept"] - made["anew"]).abs().max() / made["anew"].abs().max()))
    key_cache.can_keep, TextKeys.of = usual_keys, usual_text
    ms = {f"cpu_ms_per_block_{name}": round(1000 * seconds / blocks, 1) for name, seconds in spent.items()}
    return {**ms, "ratio": round(spent["kept"] / spent["anew"], 3), "largest_relative_difference": apart}


def main() -> None:
    """Drive, print and write."""
    parser = argparse.ArgumentParser(description="a stream of many blocks")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=tuple(DTYPES), default="fp32", help="of the transformer (%(default)s)")
    parser.add_argument("--graphs", action="store_true", help="record passes as CUDA graphs")
    parser.add_argument("--blocks", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--window", type=int, default=12)
    parser.add_argument("--sink", type=int, default=3)
    parser.add_argument("--compare", type=int, default=0, metavar="BLOCKS")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    pipe, height, width = tiny_pipeline(), 32, 64
    if options.model is not None:
        pipe, height, width = read_pipeline(options.model, options.device, DTYPES[options.precision])
    pipe.set_progress_bar_config(disable=True)
    lens = Pinhole(0.7 * width, 0.7 * width, width / 2, height / 2, width, height)
    sizes = {"height": height, "width": width, "window": options.window, "sink": options.sink}
    sampling = {"num_inference_steps": options.steps, "guidance_scale": 1.0, "cuda_graphs": options.graphs}
    stream = pipe.stream(lens=lens, **sizes, **sampling)
    frames_per_second(stream, UNTIMED_BLOCKS, lens)  # until the window is full
    checks: dict[str, Any] = {"fps": frames_per_second(stream, max(1, options.blocks // ROWS), lens)}
    rows = drive(stream, options.blocks, lens)
    checks["ms_to_first_frames"] = ms_to_first_frames(stream)
    checks["forgotten_frames_leave_no_trace"] = forgets(stream)
    if options.compare:
        checks["keeping"] = compare_keeping(stream, options.compare)
    print(json.dumps(checks))
    if options.out is not None:
        device = device_name(torch.device(options.device))
        machine = {"device": device, "threads": torch.get_num_threads(), "torch": torch.__version__}
        about = {"steps": options.steps, "precision": options.precision, "cuda_graphs": options.graphs, **sizes}
        about["model"] = "tiny" if options.model is None else options.model.name
        report = {"machine": {**machine, "commit": commit()}, "stream": {**about, **checks}, "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What a camera branch costs at full size: Wan2.2 TI2V-5B with random weights, denoising and training (paper, Table 6).

    python benchmarks/model.py [--out benchmarks/results/model-<gpu>.json] [--what denoise-49 denoise-121 train]

All rows of a clip run in one process on the same latents, text and cameras; the branch stands in 15 alternating blocks
with C = 4. "merope, paper's way" materialises keys and values for every query camera in plain PyTorch. Before anything
is timed, the paper's way and ours must give the same latents up to bf16. Denoising is the whole loop of the pipeline
with guidance, from noise to latents; for 121 frames only a few of its 50 steps are run and the time is scaled, which
the row says. Clips per second are 1 / seconds of one clip.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention import machine
from torch import Tensor
from train_step import PREFIX, measure, random_model

from merope.adapters import camera_attention
from merope.attention.dispatch import attend
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Pinhole
from merope.geometry.trajectories import driving_path
from merope.pipeline.camera_video import CameraVideoPipeline

METHODS = {"no branch": "none", "gta": "gta", "ucpe": "ucpe", "merope, paper's way": "merope", "merope": "merope"}
CLIPS = {
    "denoise-49": (49, 288, 512, 50),
    "denoise-121": (121, 704, 1280, 4),
}  # frames, height, width, steps that are run
LOOP_STEPS = 50


@contextmanager
def materialised(on: bool) -> Iterator[None]:
    """Attention of the branch as the paper's code does it, or ours."""
    ours = camera_attention.attend
    if on:
        camera_attention.attend = partial(attend, backend="sdpa", memory_budget=2**36)  # type: ignore[assignment]
    try:
        yield
    finally:
        camera_attention.attend = ours


def cameras_of(frames: int, height: int, width: int) -> Cameras:
    path = driving_path(frames, 12.0, torch.Generator().manual_seed(0), PREFIX)
    return Cameras(
        path, Pinhole(0.8 * width, 0.8 * width, width / 2, height / 2, width, height), plan_dtype=torch.float32
    )


def denoised(pipeline: CameraVideoPipeline, clip: tuple[int, int, int, int], has_branch: bool) -> Tensor:
    """Latents of one clip after the loop."""
    frames, height, width, steps = clip
    text = torch.randn(2, 512, 4096, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
    return pipeline(
        prompt_embeds=text[:1],
        negative_prompt_embeds=text[1:],
        cameras=cameras_of(frames, height, width) if has_branch else None,
        height=height,
        width=width,
        num_frames=frames,
        num_inference_steps=steps,
        generator=torch.Generator("cuda").manual_seed(2),
        output_type="latent",
        return_dict=False,
    )[0]


def denoise_row(method: str, name: str, pipeline: CameraVideoPipeline, repeats: int) -> dict[str, Any]:
    clip, has_branch = CLIPS[name], method != "no branch"
    with materialised(method.endswith("way")):
        denoised(pipeline, (*clip[:3], 2), has_branch)  # kernels are built and clocks settle
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            started_s = time.perf_counter()
            denoised(pipeline, clip, has_branch)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - started_s) * LOOP_STEPS / clip[3])
    return {
        "what": name,
        "method": method,
        "steps_run": clip[3],
        "clip_s": statistics.median(times),
        "spread_s": max(times) - min(times),
        "clips_per_s": 1 / statistics.median(times),
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def same_latents(pipeline: CameraVideoPipeline) -> float:
    """Relative difference of our latents and those of the paper's way after two steps, with a branch that speaks."""
    clip = (*CLIPS["denoise-49"][:3], 2)
    with materialised(True):
        expected = denoised(pipeline, clip, has_branch=True).float()
    got = denoised(pipeline, clip, has_branch=True).float()
    return float((got - expected).norm() / expected.norm())


def built(encoding: str) -> CameraVideoPipeline:
    pipeline = random_model("branch", encoding, torch.device("cuda")).pipeline
    pipeline.transformer.eval().to(torch.bfloat16)
    pipeline.vae.to("cuda")
    pipeline.set_progress_bar_config(disable=True)
    if encoding != "none":  # a fresh branch adds zeros: let it speak, so that wrong would be seen
        for name, parameter in pipeline.transformer.named_parameters():
            if "cam_out" in name:
                torch.nn.init.normal_(parameter, std=0.01)
    return pipeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/model-h200.json"))
    parser.add_argument("--what", nargs="+", default=["denoise-49", "denoise-121", "train"])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    difference = None
    for method, encoding in METHODS.items():
        if any(name in CLIPS for name in options.what):
            pipeline = built(encoding)
            if method == "merope":
                difference = same_latents(pipeline)
                assert difference < 0.02, f"latents differ from the paper's way by {difference:.3f}"
            rows += [denoise_row(method, n, pipeline, options.repeats) for n in options.what if n in CLIPS]
            del pipeline
            torch.cuda.empty_cache()
        if "train" in options.what:
            for trainable in ("branch", "all"):
                if (trainable, encoding) != ("branch", "none"):
                    with materialised(method.endswith("way")):
                        row = measure(trainable, encoding, torch.device("cuda"), steps=8)  # type: ignore[arg-type]
                    rows.append({"what": "train", "method": method, **{k: v for k, v in row.items() if k != "losses"}})
                    torch.cuda.empty_cache()
        for row in rows[-4:]:
            print(row, flush=True)
        options.out.write_text(json.dumps({"machine": machine(), "difference": difference, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

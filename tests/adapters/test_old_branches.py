"""Folders that version 0.1.0 wrote load and give what they gave then (tests/data/written-by-0.1.0/adapters)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import merope
from merope.generate.preflight import check_branch, outline_model

FOLDER = Path(__file__).parents[1] / "data" / "written-by-0.1.0" / "adapters"
BRANCHES = ("parallel", "rerope", "additive", "history-sa", "history-ca")
LENS = merope.Pinhole(10.0, 10.0, 6.0, 4.0, 12, 8)
MATCHED = (100.0, 102.0)  # times of the references


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    """Inputs, and the outputs of that time."""
    return load_file(FOLDER / "tensors.safetensors")


@pytest.fixture
def pipe() -> merope.CameraVideoPipeline:
    pipeline = merope.CameraVideoPipeline.from_pretrained(FOLDER / "pipeline")
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize("name", BRANCHES)
def test_branches(name: str, pipe: merope.CameraVideoPipeline, tensors: dict[str, Tensor]) -> None:
    cameras = merope.Cameras(tensors["world_from_camera"], LENS)
    check_branch(str(FOLDER / name), outline_model(str(FOLDER / "pipeline")), cameras)
    merope.load_branch(pipe.transformer, FOLDER / name)
    conditions: dict[str, Any] = {"cameras": cameras}
    if name.startswith("history"):
        places = merope.Cameras(tensors["history_world_from_camera"], LENS)
        conditions["history"] = merope.HistoryReferences(tensors["history_latents"], places, MATCHED)
    inputs = (tensors["latents"], torch.tensor([500]), tensors["text"])
    with torch.no_grad():
        output = pipe.transformer(*inputs, attention_kwargs=conditions, return_dict=False)[0]
    torch.testing.assert_close(output, tensors[f"forward {name}"], rtol=1e-4, atol=1e-5)
    assert (output - tensors["forward base"]).abs().max() > 0.05


def test_a_pipeline(pipe: merope.CameraVideoPipeline, tensors: dict[str, Tensor]) -> None:
    merope.load_branch(pipe.transformer, FOLDER / "parallel")
    cameras = merope.Cameras(tensors["world_from_camera"], LENS)
    size = {"height": 8, "width": 12, "num_frames": 3, "num_inference_steps": 2, "guidance_scale": 1.0}
    latents = pipe(cameras=cameras, latents=tensors["latents"], output_type="latent", **size).frames
    torch.testing.assert_close(latents, tensors["sampled"], rtol=1e-4, atol=1e-5)

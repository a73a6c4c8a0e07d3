"""A stream whose passes are recorded as a CUDA graph makes what the same stream makes launch by launch."""

from pathlib import Path

import pytest
import torch

from tests.gpu.errors import DEVICE

pytest.importorskip("diffusers", reason="a stream needs diffusers")
pytestmark = pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs need a GPU")

from merope.adapters.attachment import attach, attached_branch  # noqa: E402
from merope.adapters.recorded_passes import is_bound_by_launches  # noqa: E402
from merope.generate.camera_video import CameraVideoPipeline  # noqa: E402
from merope.generate.stream import CameraStream  # noqa: E402
from tests.adapters.wan_models import perturb, tiny_config, tiny_wan  # noqa: E402
from tests.generate.tiny_streams import begun, next_poses  # noqa: E402
from tests.tiny_pipelines import euler, tiny_pipeline  # noqa: E402

BLOCKS = 9


def pipeline(dtype: torch.dtype) -> CameraVideoPipeline:
    """In float32 heads of 24, which take the Triton kernels; in bfloat16 the paper's 128, which takes Hopper's."""
    half = dtype == torch.bfloat16
    transformer = tiny_wan(dtype, num_layers=2, **({"attention_head_dim": 128} if half else {}))
    options = {"encoding_options": {}} if half else {}
    perturb(attach(transformer, tiny_config(blocks="every", **options)), scale=0.05)
    pipe = tiny_pipeline(transformer=transformer, with_text=False, scheduler=euler()).to(DEVICE)
    branch = attached_branch(transformer)
    assert branch is not None
    branch.to(DEVICE)
    return pipe


def apart(stream: CameraStream, other: CameraStream) -> float:
    """How much the latents of two streams differ, of their norm."""
    assert stream.latents is not None
    assert other.latents is not None
    return float((stream.latents - other.latents).norm() / other.latents.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recorded_stream_is_that_of_single_launches(dtype: torch.dtype) -> None:
    pipe = pipeline(dtype)
    assert is_bound_by_launches(pipe.transformer)
    plain, recorded = (begun(pipe, window=6, sink=3, remember=100, cuda_graphs=graphs) for graphs in (False, True))
    bound = 1e-3 if dtype == torch.float32 else 5e-2
    for number in range(BLOCKS):
        if number == 5:  # as if it had not been driven
            recorded.drive(next_poses(recorded).flip(0))
            recorded.undo()
        recall = 3 if number == 6 else 0
        for stream in (plain, recorded):
            stream.drive(next_poses(stream), recall=recall)
        assert apart(recorded, plain) <= bound, f"block {number}"
        if number in (4, BLOCKS - 1):  # two blocks alike were driven
            assert recorded._passes[0]._recording is not None  # type: ignore[attr-defined]


def test_recorded_passes_leave_no_trace_of_other_streams() -> None:
    pipe = pipeline(torch.float32)
    first, second = (begun(pipe, window=6, seed=seed, cuda_graphs=True) for seed in (0, 1))
    alone = begun(pipe, window=6, seed=0, cuda_graphs=True)
    for _ in range(BLOCKS):
        for stream in (first, second, alone):
            stream.drive(next_poses(stream))
    assert apart(first, alone) <= 1e-3
    assert apart(second, alone) > 0.1


def test_a_saved_stream_goes_on(tmp_path: Path) -> None:
    pipe = pipeline(torch.float32)
    stream = begun(pipe, window=6, remember=100, cuda_graphs=True)
    for _ in range(4):
        stream.drive(next_poses(stream))
    stream.save(tmp_path)
    other = pipe.resume_stream(tmp_path, cuda_graphs=True)
    for _ in range(3):
        for each in (stream, other):
            each.drive(next_poses(each), recall=3)
    assert apart(other, stream) <= 1e-3

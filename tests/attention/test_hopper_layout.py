"""Where the Hopper kernels put channels, and how they turn them there: their own sources, compiled for the CPU."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from merope.attention.kernels import hopper_module
from merope.attention.kernels.hopper_tables import make_tables
from merope.encodings.merope import MeRoPE
from merope.geometry.cameras import Cameras
from tests.attention.test_hopper_arithmetic import View, half, turned_keys, turned_queries
from tests.scenes import PINHOLE, curved_drive

HARNESS = Path(__file__).with_name("hopper_on_cpu.cpp")
KERNELS = Path(hopper_module.__file__).parent
SOURCES = ("hopper_channels.cuh", "hopper_turns.cuh", "hopper_tiles.cuh")
CHECK = ("-x", "c++", "-fsyntax-only", "-")
TOKENS, CAMERA = 256, 1


def compiled(folder: Path, phases: bool) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    if subprocess.run([compiler, *CHECK], input=b"_Float16 x;", capture_output=True).returncode:
        pytest.skip("needs a g++ with half precision (_Float16: GCC 12 or newer)")
    text = "".join((KERNELS / name).read_text() for name in SOURCES)
    (folder / "sources.inc").write_text(re.sub(r"asm volatile\([^;]*;[^;]*\);", ";", text))
    command = [compiler, "-std=c++17", "-O1", "-w", f"-I{folder}", f"-DPHASES={int(phases)}", f"-DCAMERA={CAMERA}"]
    subprocess.run([*command, str(HARNESS), "-o", str(folder / "run")], check=True)
    return folder / "run"


@pytest.mark.parametrize("phases", [False, True])
def test_keys_values_and_queries_turn_in_their_places(tmp_path: Path, phases: bool) -> None:
    plan = MeRoPE(128, direction_scale=50.0 if phases else None).plan(Cameras(curved_drive(4), PINHOLE), (8, 8))
    tables = make_tables(plan)
    keys, values, queries = torch.randn(3, TOKENS, 128, generator=torch.Generator().manual_seed(0)).half()
    frames = torch.zeros(TOKENS, 9) if phases else tables.key_rotation[0]
    given = (
        *(keys, values, queries, frames, tables.query_disparity, tables.key_native, tables.query_native),
        *(tables.query_rotation, tables.key_views, tables.phasors[:, :, :4]),
    )
    data = b"".join(x.contiguous().numpy().tobytes() for x in given)
    output = subprocess.run([compiled(tmp_path, phases)], input=data, capture_output=True, check=True).stdout
    *turned, got = torch.frombuffer(bytearray(output), dtype=torch.float16).view(5, TOKENS, 128).double()
    view = View.of(tables, CAMERA, TOKENS)
    for x, in_view in zip((keys, values) * 2, turned, strict=True):  # in turns of one tile, then with keys ahead
        assert_rounded_alike(in_view, view.turn(half(turned_keys(x.double(), tables, 1))))
    assert_rounded_alike(got, half(turned_queries(queries.double(), tables, -1)))


def assert_rounded_alike(got: Tensor, right: Tensor) -> None:
    """Operators of tokens are float32 in the kernels: a number may round the other way."""
    assert float((got == right).double().mean()) > 0.95
    assert float((got - right).abs().max()) < 2**-7

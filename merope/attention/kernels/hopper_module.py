"""The Hopper kernels as compiled code: built at the first call by NVRTC, launched through the CUDA driver.

The structures mirror those of hopper_*.cu and hopper_*.cuh.
"""

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from merope.errors import invalid

SOURCES = (
    "hopper_instructions.cuh",
    "hopper_channels.cuh",
    "hopper_turns.cuh",
    "hopper_tiles.cuh",
    "hopper_queries.cuh",
    "hopper_forward.cu",
    "hopper_wide.cu",
    "hopper_grad_rows.cu",
    "hopper_grad_views.cuh",
    "hopper_grad_keys.cuh",
    "hopper_backward.cu",
)
"""In the order in which they are compiled as one text."""
FOR_ALL_KEYS = ("hopper_wide.cu",)
"""Those of them that builds for cameras that see a part of the keys leave out."""
OPTIONS = (b"--gpu-architecture=sm_90a", b"--std=c++17")
"""Of NVRTC."""


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute; its value is a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((f"{of}_{axis}", ctypes.c_uint) for of in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    ]


STARTS_EARLY = LaunchAttribute(6, 0, 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class Tokens(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "token"))]


class PackParams(ctypes.Structure):
    _fields_ = [
        *((name, Tokens) for name in ("k", "v")),
        *((name, ctypes.c_void_p) for name in ("packed_k", "packed_v", "rotation", "native")),
        ("tables_per_sample", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("heads", "keys", "padded_keys")),
    ]


class AttendParams(ctypes.Structure):
    _fields_ = [
        *((name, Tokens) for name in ("q", "out")),
        *((name, ctypes.c_void_p) for name in ("packed_k", "packed_v", "lse", "disparity", "rotation", "native")),
        *((name, ctypes.c_void_p) for name in ("key_views", "phasors")),
        ("tables_per_sample", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("batch", "heads", "cameras", "tokens_per_camera", "queries", "keys")),
        *((name, ctypes.c_int) for name in ("padded_keys", "key_cameras")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("seen", "camera_order")),
    ]


class BoundParams(ctypes.Structure):
    _fields_ = [
        ("pack", PackParams),
        ("grad", Tokens),
        ("part_bounds", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("queries", "head_groups")),
    ]


class PackQueryParams(ctypes.Structure):
    _fields_ = [
        *((name, Tokens) for name in ("q", "out", "grad")),
        *((name, ctypes.c_void_p) for name in ("lse", "disparity", "rotation", "native", "packed_q", "packed_grad")),
        *((name, ctypes.c_void_p) for name in ("rows", "part_bounds", "bounds", "sums")),
        ("tables_per_sample", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("heads", "cameras", "tokens_per_camera", "padded_rows", "queries")),
    ]


class GradParams(ctypes.Structure):
    _fields_ = [
        *((name, Tokens) for name in ("grad_k", "grad_v")),
        *((name, ctypes.c_void_p) for name in ("packed_k", "packed_v", "packed_q", "packed_grad")),
        *((name, ctypes.c_void_p) for name in ("rows", "bounds", "sums", "rotation", "native")),
        *((name, ctypes.c_void_p) for name in ("key_views", "phasors", "key_camera")),
        ("tables_per_sample", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("heads", "cameras", "padded_rows", "keys", "padded_keys", "key_cameras")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("seen", "walks", "key_sums")),
        *((name, ctypes.c_int) for name in ("whole_tiles", "pieces")),
    ]


class FinishParams(ctypes.Structure):
    _fields_ = [
        ("grad_q", Tokens),
        *((name, ctypes.c_void_p) for name in ("sums", "bounds", "disparity", "rotation", "native")),
        ("tables_per_sample", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("heads", "cameras", "tokens_per_camera", "padded_rows", "queries")),
        ("scale", ctypes.c_float),
    ]


def tokens(x: Tensor) -> Tokens:
    """Where the tokens of [B, H, N, 128] lie."""
    return Tokens(x.data_ptr(), *x.stride()[:3])


class Module:
    """The compiled kernels on one device, launched through the driver on PyTorch's current stream."""

    def __init__(self, cubin: bytes) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._handle = ctypes.c_void_p()
        self._functions: dict[str, ctypes.c_void_p] = {}
        _check("loading the kernels", self._driver.cuModuleLoadData(ctypes.byref(self._handle), cubin))

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        params: ctypes.Structure,
        early: bool = False,
    ) -> None:
        """`early`: may start before the kernel before it on the stream has ended, and waits for it by itself."""
        if name not in self._functions:
            self._functions[name] = self._function(name, shared)
        arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.pointer(params), ctypes.c_void_p))
        stream = torch.cuda.current_stream().cuda_stream
        config = LaunchConfig(*grid, threads, 1, 1, shared, stream, ctypes.pointer(STARTS_EARLY), int(early))
        _check(name, self._driver.cuLaunchKernelEx(ctypes.byref(config), self._functions[name], arguments, None))

    def _function(self, name: str, shared: int) -> ctypes.c_void_p:
        function, most_shared = ctypes.c_void_p(), 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(name, self._driver.cuModuleGetFunction(ctypes.byref(function), self._handle, name.encode()))
        _check(name, self._driver.cuFuncSetAttribute(function, most_shared, shared))
        return function


@lru_cache
def module(_device_index: int, phases: bool, visible: bool) -> Module:
    """The kernels on the current device."""
    return Module(cubin(phases, visible))


def kernel_source(phases: bool, visible: bool) -> str:
    """All kernels as one text: with the rotation block, or with phases of directions in its place; for query cameras
    that see all keys, or a part of them."""
    choices = [f"constexpr bool {k} = {str(v).lower()};" for k, v in (("kPhases", phases), ("kVisible", visible))]
    names = [name for name in SOURCES if not (visible and name in FOR_ALL_KEYS)]
    return "\n".join((*choices, *(Path(__file__).with_name(name).read_text() for name in names)))


@lru_cache
def cubin(phases: bool, visible: bool) -> bytes:
    """The kernels compiled for sm_90a, which takes seconds: kept for the processes that come after this one."""
    source = kernel_source(phases, visible).encode()
    file = kept_cubin(source)
    if file is None:
        return _compiled(source)
    with suppress(OSError):
        return file.read_bytes()
    made = _compiled(source)
    with suppress(OSError):  # a folder that is full or cannot be written to
        _keep(file, made)
    return made


def kept_cubin(source: bytes) -> Path | None:
    """Where a source's code is kept on this machine: in merope/ of XDG_CACHE_HOME, or of ~/.cache; None: nowhere."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "merope"
    except RuntimeError:  # a user without a home
        return None
    return folder / f"{hashlib.sha256(repr((source, OPTIONS, _nvrtc_version())).encode()).hexdigest()[:32]}.cubin"


def _keep(file: Path, made: bytes) -> None:
    """Write a file whole or not at all: another process may be reading it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(made)
        os.replace(part, file)
    except BaseException:
        os.unlink(part)
        raise


def _compiled(source: bytes) -> bytes:
    return compiled_with_log(source)[0]


def compiled_with_log(source: bytes, *more: bytes) -> tuple[bytes, str]:
    """The code, and what the compiler said. more: options besides OPTIONS."""
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    options = (ctypes.c_char_p * len(OPTIONS + more))(*OPTIONS, *more)
    _check("NVRTC", nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"hopper", 0, None, None))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = _bytes_of(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, size).rstrip(b"\0").decode()
    if failed:
        raise RuntimeError(f"NVRTC could not compile the kernels for sm_90a (it needs CUDA 12 or newer): {log}")
    return _bytes_of(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, size), log


def _nvrtc_version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check("NVRTC", _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _bytes_of(
    program: ctypes.c_void_p, get_size: Callable[..., int], get: Callable[..., int], size: ctypes.c_size_t
) -> bytes:
    _check("NVRTC", get_size(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check("NVRTC", get(program, buffer))
    return buffer.raw


def _nvrtc() -> ctypes.CDLL:
    """NVRTC of PyTorch's CUDA version (any beside a PyTorch without CUDA): on the loader's path, or beside PyTorch."""
    name = f"libnvrtc.so.{(torch.version.cuda or '[0-9]*').split('.')[0]}"
    beside = (Path(torch.__file__).parents[1] / "nvidia").glob(f"*/lib/{name}")
    with suppress(OSError):
        return ctypes.CDLL(name)
    for path in beside:
        for part in path.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(part))  # NVRTC opens it by name, which finds what is already loaded
        return ctypes.CDLL(str(path))
    raise invalid("backend", "one that this machine can build", "fused", f"install NVRTC ({name} was not found)")


def _check(what: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{what}: CUDA error {code}")

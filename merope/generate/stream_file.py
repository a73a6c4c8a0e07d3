"""A stream on disk: one file with its cache, cameras, text, and what the VAE remembers."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from merope.adapters.attachment import attached_branch
from merope.adapters.camera_attention import CameraAttention
from merope.adapters.camera_branch import base_fields
from merope.adapters.key_cache import FrameKeys, KeyCache, all_joined
from merope.errors import invalid
from merope.formats.own import LENSES
from merope.formats.writing import replace_tensors
from merope.generate.recall import PastBlock
from merope.generate.stream_checks import check_settings
from merope.generate.text import Text
from merope.generate.whole_clips import DecodedStream
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Lens, parameters

if TYPE_CHECKING:
    from merope.generate.camera_video import CameraVideoPipeline

FILE, FORMAT, VERSION = "stream.safetensors", "merope-stream", 1
ABOUT = "about"  # the file's one entry of text
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}

DAMAGE = (SafetensorError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)
"""What reading a damaged file may raise; brackets without end are a RuntimeError."""


@dataclass(frozen=True)
class StreamSettings:
    """What stays the same for all blocks."""

    height: int
    width: int
    window: int
    sink: int
    block: int
    steps: int
    guidance: float
    seed: int
    remember: int = 0
    past_noise: float = 0.0


@dataclass(frozen=True, eq=False)
class StreamState:
    """What a stream remembers between two blocks. It is never changed in place.

    caches, texts: of the prompt and, with guidance, of the negative prompt.
    """

    caches: tuple[KeyCache, ...]
    texts: tuple[Tensor, ...]  # [1, L, text_dim] each
    vae_past: dict[str, Tensor] = field(default_factory=dict)
    blocks: int = 0  # driven, without the prefix
    latents: Tensor | None = None  # [1, C, block, h, w] of the last block
    past: tuple[PastBlock, ...] = ()  # as many frames as settings.remember says
    recalled: tuple[int, ...] = ()  # latent frames that the last block was shown besides


def write_stream(
    folder: Path, pipe: "CameraVideoPipeline", settings: StreamSettings, lens: Lens | None, state: StreamState
) -> Path:
    """The file of a stream, in one step."""
    cache = state.caches[0]
    tensors = {f"vae.{name}": value for name, value in state.vae_past.items()}
    tensors |= {f"text.{n}": text for n, text in enumerate(state.texts)}
    for n, each in enumerate(state.caches):
        for place, frame in enumerate(each.frames):
            for layer, (keys, values) in frame.layers.items():
                tensors |= {f"keys.{n}.{place}.{layer}": keys, f"values.{n}.{place}.{layer}": values}
    if state.latents is not None:
        tensors["latents"] = state.latents
    about: dict[str, Any] = {"format": FORMAT, "version": VERSION, "settings": asdict(settings)}
    about |= {"count": cache.count, "frames": len(cache.frames), "blocks": state.blocks, "made_with": _made_with(pipe)}
    if lens is not None:
        about["lens"] = _take_apart(lens, "lens", tensors)
    if cache.cameras is not None:
        about["cameras"] = _take_cameras_apart(cache.cameras, "cameras", tensors)
    if state.past:
        about["past"] = {"first": [block.first for block in state.past]}
        about["past"]["cameras"] = _take_cameras_apart(
            all_joined([block.cameras for block in state.past]), "past.cameras", tensors
        )
        tensors["past.latents"] = torch.cat([block.latents for block in state.past])
    file = folder / FILE
    plain = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    replace_tensors(file, plain, {ABOUT: json.dumps(about)})
    return file


def read_stream(folder: Path, pipe: "CameraVideoPipeline") -> tuple[StreamSettings, Lens | None, StreamState]:
    """What `write_stream` wrote, on the pipeline's device. Whatever this pipeline cannot go on with is refused."""
    file = folder / FILE if folder.is_dir() else folder
    about, settings = _read_about(file)
    for name, value in _made_with(pipe).items():
        if about["made_with"].get(name) != value:
            fix = "resume with the model, branch and scheduler that the stream was made with"
            raise invalid(f"the pipeline's {name}", str(about["made_with"].get(name))[:300], str(value)[:300], fix)
    with _as_saved(file):
        with safe_open(file, "pt", device=str(pipe._execution_device)) as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        return settings, *_put_in_place(about, settings, tensors, pipe)


def saved_blocks(folder: Path) -> int:
    """How many blocks a stream had driven when it was saved."""
    return int(_read_about(folder / FILE)[0]["blocks"])


@contextmanager
def _as_saved(file: Path) -> Iterator[None]:
    """Whatever a damaged file leads to becomes one error that names it."""
    try:
        yield
    except FileNotFoundError:
        raise invalid("folder", f"one with a {FILE}", str(file), "pass what stream.save was given") from None
    except torch.OutOfMemoryError:  # no fault of the file
        raise
    except DAMAGE as error:
        got = f"{type(error).__name__}: {str(error).partition(';')[0][:300]}"
        fix = "put it back as stream.save left it, or begin another stream"
        raise invalid(str(file), "a whole stream as stream.save writes it", got, fix) from None


def _read_about(file: Path) -> tuple[dict[str, Any], StreamSettings]:
    """The text of a file, with settings and counts that go together."""
    with _as_saved(file), safe_open(file, "pt") as stored:
        about: dict[str, Any] = json.loads((stored.metadata() or {}).get(ABOUT, "{}"))
        if (about.get("format"), about.get("version")) != (FORMAT, VERSION):
            got = f"{about.get('format')} {about.get('version')}"
            raise invalid("its format", f"{FORMAT} of version {VERSION}", got, "pass what stream.save wrote")
        settings = StreamSettings(**about["settings"])
        numbers = {each.name: (getattr(settings, each.name), each.type) for each in fields(settings)}
        numbers |= {name: (about[name], int) for name in ("count", "frames", "blocks")}
        for name, (value, kind) in numbers.items():
            _require(name, type(value) in (int, kind) and math.isfinite(value), "a number", repr(value))
        KeyCache(settings.window, settings.sink, settings.block)  # which checks them
        count, blocks = about["count"], about["blocks"]
        is_whole = count % settings.block == 0 and count >= blocks * settings.block >= 0
        _require("count", is_whole, f"{blocks} blocks of {settings.block} latent frames, and those of a prefix", count)
        kept = min(count, settings.sink + settings.window - settings.block)
        _require("frames", about["frames"] == kept, f"{kept}, those of window and sink", about["frames"])
        _require("made_with", isinstance(about["made_with"], dict), "a table", about["made_with"])
        return about, settings


def _require(name: str, is_so: bool, expected: str, got: object) -> None:
    if not is_so:
        raise ValueError(f"{name} must be {expected}, got {got}")


def _put_in_place(
    about: dict[str, Any], settings: StreamSettings, tensors: dict[str, Tensor], pipe: "CameraVideoPipeline"
) -> tuple[Lens | None, StreamState]:
    """The lens and the state of a stream from the parts of its file."""
    count, frames, has_branch = about["count"], about["frames"], attached_branch(pipe.transformer) is not None
    texts = tuple(tensors[f"text.{n}"] for n in range(2 if settings.guidance > 1.0 else 1))
    most_steps = pipe.scheduler.config.num_train_timesteps
    _require("steps", settings.steps <= most_steps, f"at most {most_steps}", settings.steps)
    check_settings(pipe, settings, Text(None, None, texts[0], texts[1] if len(texts) > 1 else None))
    _require("text", {text.dtype for text in texts} == {pipe.transformer.dtype}, "of the model's dtype", texts[0].dtype)
    _check_tensors(tensors, _shapes(pipe, settings, count, frames))
    lens = _put_together(about["lens"], "lens", tensors) if "lens" in about else None
    cameras = _cameras(about["cameras"], "cameras", tensors, frames, settings) if has_branch and frames else None
    cache = KeyCache(settings.window, settings.sink, settings.block, count=count)
    caches = tuple(
        replace(cache, frames=tuple(_frame(tensors, n, place, cameras) for place in range(frames)))
        for n in range(len(texts))
    )
    vae_past = {name.removeprefix("vae."): value for name, value in tensors.items() if name.startswith("vae.")}
    remembered = min(count, settings.remember) // settings.block if has_branch else 0
    past = _past(about["past"], remembered, count, settings, tensors) if remembered else ()
    return lens, StreamState(caches, texts, vae_past, about["blocks"], tensors.get("latents"), past)


def _shapes(
    pipe: "CameraVideoPipeline", settings: StreamSettings, count: int, frames: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors that a stream of so many latent frames has with this model, one by one: a damaged count is huge."""
    config, branch = pipe.transformer.config, attached_branch(pipe.transformer)
    rows, columns = pipe.strides.latent_size(settings.height, settings.width)
    tokens, shape = pipe.strides.tokens_per_frame(rows, columns), (1, config.in_channels, settings.block, rows, columns)
    if not count:
        return
    yield "latents", shape
    sizes = {f"base.{n}": (config.num_attention_heads, config.attention_head_dim) for n in range(config.num_layers)}
    of_branch = () if branch is None else branch.processors().values()
    sizes |= {
        each.layer: (each.heads, each.encoding.head_dim) for each in of_branch if isinstance(each, CameraAttention)
    }
    for place in range(frames):
        for layer, (heads, head_dim) in sizes.items():
            for kind in ("keys", "values"):
                for text in range(2 if settings.guidance > 1.0 else 1):
                    yield f"{kind}.{text}.{place}.{layer}", (1, heads, tokens, head_dim)
    if pipe.vae is not None:
        names = {name.replace("_orig_mod.", ""): name for name, _ in pipe.vae.named_modules()}  # of compiled parts
        for name, past in _vae_past(pipe.vae, shape, count // settings.block).items():
            yield f"vae.{names[name]}", tuple(past.shape)


@torch.no_grad()
def _vae_past(vae: Any, shape: tuple[int, ...], blocks: int) -> dict[str, Tensor]:
    """What a VAE remembers after so many blocks, without numbers: its layers tell the shapes."""
    with torch.device("meta"):
        stream = DecodedStream(type(vae).from_config(vae.config))
        for _ in range(min(blocks, 2)):  # later ones change no shape
            stream.decode(torch.empty(shape))
    return stream.past


def _check_tensors(tensors: dict[str, Tensor], shapes: Iterator[tuple[str, tuple[int, ...]]]) -> None:
    """Refuse tensors that are missing, of another shape or kind of number, or not finite."""
    for name, shape in shapes:
        _require(name, tensors[name].shape == shape, f"of shape {list(shape)}", list(tensors[name].shape))
    dtypes: dict[str, torch.dtype] = {}
    for name, value in tensors.items():
        if name.endswith("has_pose"):
            continue
        is_finite = value.dtype in DTYPES.values() and bool(value.isfinite().all())
        _require(name, is_finite, "finite numbers", f"{value.dtype} with NaN, inf or no fractions")
        if name.startswith(("keys.", "values.", "vae.")):
            kind = "vae" if name.startswith("vae.") else name.split(".", 3)[3]  # or the layer
            before = dtypes.setdefault(kind, value.dtype)
            _require(name, value.dtype == before, f"{before} as the others", value.dtype)


def _made_with(pipe: "CameraVideoPipeline") -> dict[str, Any]:
    """What must be the same for a stream to go on exactly."""
    branch, scheduler = attached_branch(pipe.transformer), pipe.scheduler
    options = {name: value for name, value in scheduler.config.items() if not name.startswith("_")}
    of_branch = None
    if branch is not None:
        names = ("encoding", "encoding_options", "compression", "blocks", "translation_scale")
        of_branch = {name: branch.config[name] for name in names}
    made_with = {
        "transformer": base_fields(pipe.transformer),
        "branch": of_branch,
        "scheduler": {"class": type(scheduler).__name__, **options},
        "dtype": str(pipe.transformer.dtype),
        "denoising_levels": pipe.denoising_levels,
    }
    return json.loads(json.dumps(made_with, default=str))  # as a file gives it back


def _frame(tensors: dict[str, Tensor], cache: int, place: int, cameras: Cameras | None) -> FrameKeys:
    start = f"keys.{cache}.{place}."
    layers = [name.removeprefix(start) for name in tensors if name.startswith(start)]
    return FrameKeys(
        {layer: (tensors[start + layer], tensors[f"values.{cache}.{place}.{layer}"]) for layer in layers},
        None if cameras is None else cameras.at(slice(place, place + 1)),
    )


def _take_apart(lens: Lens, start: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A lens as words and tensors."""
    if type(lens).__name__ not in LENSES:
        raise invalid("lens", f"one of {', '.join(LENSES)}", type(lens).__name__, "use a lens of the library to save")
    values = parameters(lens)
    tensors |= {f"{start}.{name}": value for name, value in values.items()}
    return {"model": type(lens).__name__, "width": lens.width, "height": lens.height, "parameters": list(values)}


def _put_together(about: dict[str, Any], start: str, tensors: dict[str, Tensor]) -> Lens:
    values = {name: tensors[f"{start}.{name}"] for name in about["parameters"]}
    return LENSES[about["model"]](**values, width=about["width"], height=about["height"]).to("cpu")


def _past(
    about: dict[str, Any], blocks: int, count: int, settings: StreamSettings, tensors: dict[str, Tensor]
) -> tuple[PastBlock, ...]:
    """The last blocks of a stream of `count` latent frames."""
    block, latents = settings.block, tensors["past.latents"].cpu()
    expected = (blocks, *tensors["latents"].shape[1:])
    _require("past.latents", latents.shape == expected, f"of shape {list(expected)}", list(latents.shape))
    firsts = range(count - blocks * block, count, block)
    _require("past.first", about["first"] == list(firsts), f"{list(firsts)}", about["first"])
    cameras = _cameras(about["cameras"], "past.cameras", tensors, blocks * block, settings)
    parts = zip(firsts, latents.split(1), strict=True)
    return tuple(
        PastBlock(first, own, cameras.at(slice(n * block, (n + 1) * block))) for n, (first, own) in enumerate(parts)
    )


def _take_cameras_apart(cameras: Cameras, start: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    tensors[f"{start}.world_from_camera"] = cameras.world_from_camera
    if cameras.has_pose is not None:
        tensors[f"{start}.has_pose"] = cameras.has_pose
    lens = _take_apart(cameras.lens, f"{start}.lens", tensors)
    return {"lens": lens, "dtype": str(cameras.dtype), "given_dtype": str(cameras.given_dtype)}


def _cameras(
    about: dict[str, Any], start: str, tensors: dict[str, Tensor], count: int, settings: StreamSettings
) -> Cameras:  # [count]
    """The cameras to the last bit: their rotations are not made orthonormal once more."""
    tensors = {name: value.cpu() for name, value in tensors.items() if name.startswith(start)}
    poses, lens = tensors[f"{start}.world_from_camera"], _put_together(about["lens"], f"{start}.lens", tensors)
    dtype, given_dtype = (DTYPES[about[name]] for name in ("dtype", "given_dtype"))
    _require(start, poses.shape == (count, 4, 4), f"of shape [{count}, 4, 4]", list(poses.shape))
    _require(f"{start}.world_from_camera", poses.dtype == torch.float64, "float64", poses.dtype)
    size = (settings.width, settings.height)
    _require(f"{start}.lens", (lens.width, lens.height) == size, f"for images of {size}", (lens.width, lens.height))
    checked = Cameras(poses, lens, tensors.get(f"{start}.has_pose"), dtype)
    return checked._with(world_from_camera=poses, given_dtype=given_dtype)

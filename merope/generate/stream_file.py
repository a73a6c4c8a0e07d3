"""A stream on disk: one file with its cache, cameras, text, and what the VAE remembers."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from merope.adapters.attachment import attached_branch
from merope.adapters.camera_branch import base_fields
from merope.adapters.key_cache import FrameKeys, KeyCache, all_joined
from merope.errors import invalid
from merope.formats.own import LENSES
from merope.formats.writing import replace_tensors
from merope.generate.recall import PastBlock
from merope.geometry.cameras import Cameras
from merope.geometry.lens_batches import parameters
from merope.geometry.lenses import Lens

if TYPE_CHECKING:
    from merope.generate.camera_video import CameraVideoPipeline

FILE, FORMAT, VERSION = "stream.safetensors", "merope-stream", 1
ABOUT = "about"  # the file's one entry of text
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}


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
    """What `write_stream` wrote, on the pipeline's device."""
    file = folder / FILE if folder.is_dir() else folder
    about, tensors = _read(file, str(pipe._execution_device))
    if about.get("format") != FORMAT or about.get("version") != VERSION:
        got = f"{about.get('format')} {about.get('version')}"
        raise invalid(str(file), f"a {FORMAT} of version {VERSION}", got, "pass what stream.save wrote")
    made_with, here = about["made_with"], _made_with(pipe)
    for name, value in made_with.items():
        if here[name] != value:
            fix = "resume with the model, branch and scheduler that the stream was made with"
            raise invalid(f"the pipeline's {name}", str(value)[:300], str(here[name])[:300], fix)
    settings = StreamSettings(**about["settings"])
    lens = _put_together(about["lens"], "lens", tensors) if "lens" in about else None
    cameras = _cameras(about["cameras"], "cameras", tensors) if "cameras" in about else None
    texts = tuple(tensors[f"text.{n}"] for n in range(2) if f"text.{n}" in tensors)
    caches = tuple(
        KeyCache(
            settings.window,
            settings.sink,
            settings.block,
            tuple(_frame(tensors, n, place, cameras) for place in range(about["frames"])),
            about["count"],
        )
        for n in range(len(texts))
    )
    past = {name.removeprefix("vae."): value for name, value in tensors.items() if name.startswith("vae.")}
    remembered = _past(about["past"], settings.block, tensors) if "past" in about else ()
    return settings, lens, StreamState(caches, texts, past, about["blocks"], tensors.get("latents"), remembered)


def saved_blocks(folder: Path) -> int:
    """How many blocks a stream had driven when it was saved."""
    with safe_open(folder / FILE, "pt") as stored:
        return int(json.loads(stored.metadata()[ABOUT])["blocks"])


def _read(file: Path, device: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(file, "pt", device=device) as stored:
            about = json.loads((stored.metadata() or {}).get(ABOUT, "{}"))
            return about, {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise invalid("folder", f"one with a {FILE}", str(file), "pass what stream.save was given") from None
    except SafetensorError as error:
        raise invalid(str(file), "a whole safetensors file", str(error), "save the stream again") from None


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
    plain: dict[str, Any] = json.loads(json.dumps(made_with, default=str))  # as a file gives it back
    return plain


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


def _past(about: dict[str, Any], block: int, tensors: dict[str, Tensor]) -> tuple[PastBlock, ...]:
    cameras = _cameras(about["cameras"], "past.cameras", tensors)
    latents = tensors["past.latents"].cpu().split(1)
    places = [slice(n * block, (n + 1) * block) for n in range(len(latents))]
    parts = zip(about["first"], latents, places, strict=True)
    return tuple(PastBlock(first, of_block, cameras.at(place)) for first, of_block, place in parts)


def _take_cameras_apart(cameras: Cameras, start: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    tensors[f"{start}.world_from_camera"] = cameras.world_from_camera
    if cameras.has_pose is not None:
        tensors[f"{start}.has_pose"] = cameras.has_pose
    lens = _take_apart(cameras.lens, f"{start}.lens", tensors)
    return {"lens": lens, "dtype": str(cameras.dtype), "given_dtype": str(cameras.given_dtype)}


def _cameras(about: dict[str, Any], start: str, tensors: dict[str, Tensor]) -> Cameras:
    """The cameras to the last bit: their rotations are not made orthonormal once more."""
    tensors = {name: value.cpu() for name, value in tensors.items() if name.startswith(start)}
    poses, lens = tensors[f"{start}.world_from_camera"], _put_together(about["lens"], f"{start}.lens", tensors)
    checked = Cameras(poses, lens, tensors.get(f"{start}.has_pose"))
    dtypes = {name: DTYPES[about[name]] for name in ("dtype", "given_dtype")}
    return checked._with(world_from_camera=poses, **dtypes)

"""What is wrong with a model or branch folder, found from its small files before gigabytes of weights are read."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.utils import logging
from safetensors import SafetensorError, safe_open
from torch import nn

from merope.adapters.camera_branch import CameraBranch
from merope.adapters.saving import check_base
from merope.errors import invalid
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.strides import VideoStrides
from merope.geometry.cameras import Cameras

WEIGHT_FILES = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class ModelOutline:
    """A model without its weights."""

    transformer: WanTransformer3DModel  # on the meta device
    strides: VideoStrides
    has_text: bool


def outline_model(
    model: str,  # a folder, or a hub id
    transformer_folder: str | None = None,  # fine-tuned, in place of the model's own
) -> ModelOutline:
    """The outline of a model that `CameraVideoPipeline.from_pretrained` can load; all others are refused."""
    folder = local_folder("model", model)
    if folder is not None and not (folder / "model_index.json").is_file():
        fix = "pass a model in diffusers' layout, such as Wan2.2-TI2V-5B-Diffusers"
        raise invalid("model", "a folder with model_index.json", str(folder), fix)
    index = _config("model", CameraVideoPipeline, model)
    parts = _components(index)
    if "transformer_2" in parts:
        fix = "use Wan2.2 TI2V-5B or Wan2.1: a camera branch belongs to one transformer"
        raise invalid("model", "of one transformer", f"{model} with transformer_2", fix)
    if "transformer" not in parts:
        raise invalid("model", "with a transformer", f"{model} with {sorted(parts)}", "pass a Wan model")
    kind = index["transformer"][1]
    if kind != WanTransformer3DModel.__name__:
        fix = "run the model's own pipeline with merope.cameras, see docs/bases.md"
        raise invalid("model", "a Wan model, which takes a clean prefix", f"{model} with a {kind}", fix)
    if folder is not None:
        replaced = set() if transformer_folder is None else {"transformer"}
        for part in sorted(parts & {"transformer", "vae", "text_encoder"} - replaced):
            check_weights(folder / part)
    with torch.device("meta"):
        transformer = WanTransformer3DModel.from_config(_transformer_config(model, transformer_folder))
        vae = None
        if "vae" in parts:
            vae = AutoencoderKLWan.from_config(AutoencoderKLWan.load_config(model, subfolder="vae"))
    strides = VideoStrides.of(transformer.config, None if vae is None else vae.config)
    trained = None if transformer_folder is None else local_folder("transformer", transformer_folder)
    if trained is not None:
        check_sizes(trained, transformer)
    if folder is not None:
        sized = {} if vae is None else {"vae": vae}
        for part, made in (sized if transformer_folder else sized | {"transformer": transformer}).items():
            check_sizes(folder / part, made)
    return ModelOutline(transformer, strides, {"text_encoder", "tokenizer"} <= parts)


def _transformer_config(model: str, folder: str | None) -> Any:
    if folder is None:
        return WanTransformer3DModel.load_config(model, subfolder="transformer")
    local = local_folder("transformer", folder)
    if local is not None:
        check_weights(local)
    return _config("transformer", WanTransformer3DModel, folder)


def check_branch(
    branch: str,  # a folder, or a hub id
    outline: ModelOutline,
    cameras: Cameras,  # of one clip
) -> None:
    """Refuse a branch that is missing, incomplete, made for another base model, or of a method without such lenses."""
    folder = local_folder("branch", branch)
    if folder is not None and not (folder / "config.json").is_file():
        fix = "pass a folder that branch.save_pretrained wrote"
        raise invalid("branch", "a folder with config.json", str(folder), fix)
    config = _config("branch", CameraBranch, branch)
    if folder is not None and config.get("integration") != "rerope":  # which has no weights of its own
        check_weights(folder)
    check_base(config, outline.transformer)
    with torch.device("meta"):
        made = CameraBranch.from_config(config)
    if folder is not None:
        check_sizes(folder, made)
    encoding = made.encoding
    if encoding is not None:
        content = torch.zeros(1, 1, encoding.content_channels) if encoding.content_channels else None
        encoding.plan(cameras.at(slice(0, 1)), (1, 1), content=content)  # PRoPE and RayRoPE do not take every lens


def trained_block_frames(model: str, branch: str | None) -> int | None:
    """Latent frames of the blocks that a model, or its branch, was trained to make one after the other; None: none."""
    frames: int | None = _trained("causal_block_frames", model, branch)
    return frames


def trained_steps(model: str, branch: str | None) -> int | None:
    """Denoising steps that a model, or its branch, was trained for; None: as many as one likes."""
    return len(_trained("denoising_levels", model, branch) or ()) or None


def _trained(name: str, model: str, branch: str | None) -> Any:
    of_branch = None if branch is None else _config("branch", CameraBranch, branch).get(name)
    return _config("model", CameraVideoPipeline, model).get(name) or of_branch


def local_folder(name: str, given: str) -> Path | None:
    """The folder that is meant, None for a hub id (owner/name); a folder that is not there is refused."""
    path = Path(given)
    if path.is_dir():
        return path
    looks_like_a_path = given.startswith((".", "/", "~")) or given.count("/") != 1
    if looks_like_a_path or path.exists():
        raise FileNotFoundError(f"{name} folder {given} is missing; check the path, or pass a hub id (owner/name)")
    return None


def check_weights(folder: Path) -> None:
    """Refuse a component whose weights, or shards of them, are not there."""
    fix = "complete the download"
    files = [path for pattern in WEIGHT_FILES for path in folder.glob(pattern)]
    for index in folder.glob("*.index.json"):
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise invalid(str(index), "an index of weights", f"{type(error).__name__}: {error}", fix) from None
        missing = sorted(name for name in shards if not (folder / name).is_file())
        if missing:
            raise FileNotFoundError(
                f"weights {folder / missing[0]} are missing, {len(missing)} of {len(shards)}; {fix}"
            )
    if not files:
        raise FileNotFoundError(f"weights are missing: no *.safetensors in {folder}; {fix}")


def check_sizes(folder: Path, outline: nn.Module) -> None:
    """Refuse weights that are not those of the config beside them, from the headers of safetensors files."""
    found: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as weights:
                found |= {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise invalid(str(file), "a safetensors file", error, "get it again") from None
    wanted = {name: list(weight.shape) for name, weight in outline.state_dict().items()}
    is_quantised = "quantization_config" in json.loads((folder / "config.json").read_text())
    wrong = [name for name, shape in wanted.items() if found.get(name) != shape]
    if found and wrong and not is_quantised:
        first = wrong[0]
        got = f"{first} of {found[first]}" if first in found else f"no {first}"
        expected = f"those of its config.json, {first} of {wanted[first]}"
        more = f" ({len(wrong)} of {len(wanted)} differ)"
        raise invalid(f"weights in {folder}", expected, got + more, "get both files from the same training")


def _config(name: str, kind: Any, given: str) -> dict[str, Any]:
    """The JSON of a folder or hub id."""
    try:
        config: dict[str, Any] = kind.load_config(given)
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise OSError(
            f"{name} {given} is neither a folder here nor found on the hub ({reason}); download it"
        ) from error
    except RecursionError:
        raise invalid(f"config of {name}", "JSON", f"brackets nested too deeply in {given}", "get it again") from None
    if not isinstance(config, dict):
        raise invalid(f"config of {name}", "a JSON object", f"a {type(config).__name__} in {given}", "get it again")
    return config


def _components(index: Mapping[str, Any]) -> set[str]:
    """Names of the components that a model_index.json says are there."""
    return {name for name, value in index.items() if isinstance(value, list) and len(value) == 2 and value[0]}


@contextmanager
def no_loading_bars() -> Iterator[None]:
    """Without the progress bars that diffusers draws for every part of a model that it reads."""
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()

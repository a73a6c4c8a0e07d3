"""What is wrong with a model or branch folder, found from its small files before gigabytes of weights are read."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils import logging
from safetensors import SafetensorError, safe_open
from torch import nn

from merope.adapters.camera_branch import CameraBranch
from merope.adapters.families import family_named, family_of
from merope.adapters.families.facts import Family
from merope.adapters.pipeline_branches import TRANSFORMERS
from merope.adapters.saving import check_base
from merope.errors import invalid
from merope.generate.base_video import has_own_pipeline
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.strides import VideoStrides
from merope.geometry.cameras import Cameras

WEIGHT_FILES = ("*.safetensors", "*.bin")
INDEX = "model_index.json"
HEAVY = ("transformer", "vae", "text_encoder")
"""How the names of components begin that have weights in every model."""


@dataclass(frozen=True)
class ModelOutline:
    """A model without its weights."""

    transformers: dict[str, ModelMixin]  # on the meta device, by the names of the components
    strides: VideoStrides
    has_text: bool
    pipeline: type[Any] | None = None  # its own pipeline, where that is not CameraVideoPipeline
    vae: nn.Module | None = None  # on the meta device
    folders: Mapping[str, Path] = field(default_factory=dict)  # of the components that are on this machine

    @property
    def transformer(self) -> Any:
        """Of two experts the first."""
        return self.transformers["transformer"]

    @property
    def family(self) -> Family:
        return family_of(self.transformer)


def outline_model(
    model: str,  # a folder, or a hub id
    transformer_folder: str | None = None,  # fine-tuned, in place of the model's own
    own_pipeline: bool = False,  # whether others than `CameraVideoPipeline` will do
) -> ModelOutline:
    """The outline of a model that is known, from its small files; all others are refused."""
    folder = model_folder(model)
    index = _config("model", CameraVideoPipeline, model)
    parts = {name for name, value in index.items() if isinstance(value, list) and len(value) == 2 and value[0]}
    if "transformer" not in parts:
        raise invalid("model", "with a transformer", f"{model} with {sorted(parts)}", "pass a Wan model")
    family, is_own = family_named(index["transformer"][1]), has_own_pipeline(index)
    if is_own and not own_pipeline:
        got = f"{model} with {' and '.join(name for name in TRANSFORMERS if name in parts)} of {family.models}"
        fix = "merope generate runs other models, see docs/bases.md"
        raise invalid("model", "a Wan model of one transformer", got, fix)
    folders = {} if folder is None else {name: folder / name for name in parts}
    if transformer_folder is not None:
        folders.pop("transformer", None)
        own = local_folder("transformer", transformer_folder)
        folders |= {} if own is None else {"transformer": own}
    with torch.device("meta"):
        transformers = {
            name: _outlined(index, name, model, folders, transformer_folder if name == "transformer" else None)
            for name in TRANSFORMERS
            if name in parts
        }
        vae = _outlined(index, "vae", model, folders) if "vae" in parts else None
    sizes = transformers["transformer"].config
    _check_packages(family.packages(sizes, index), family)
    if is_own:
        strides = VideoStrides.of_family(family, sizes, vae)
    else:
        strides = VideoStrides.of(sizes, None if vae is None else vae.config)
    pipeline = _class(family.pipeline or index["_class_name"]) if is_own else None
    has_text = {"text_encoder", "tokenizer"} <= parts
    return ModelOutline(transformers, strides, has_text, pipeline, vae, folders)


def model_folder(
    model: str,  # a folder, or a hub id
) -> Path | None:
    """The folder of a model that is on this machine. Other folders are refused, with what they are."""
    folder = local_folder("model", model)
    if folder is None or (folder / INDEX).is_file():
        return folder
    fix = "pass a model in diffusers' layout, such as Wan2.2-TI2V-5B-Diffusers"
    if (folder / "trained" / INDEX).is_file():
        fix = f"pass {folder / 'trained'}, which the run wrote"
    elif (folder / "config.json").is_file() and f'"{CameraBranch.__name__}"' in (folder / "config.json").read_text():
        fix = "this is a camera branch: pass it as --branch, and the model that it belongs to as --model"
    raise invalid("model", f"a folder with {INDEX}", str(folder), fix)


def check_model_weights(outline: ModelOutline) -> None:
    """Refuse components of a folder without their weights, or with those of other sizes."""
    for name, folder in sorted(outline.folders.items()):
        if name.startswith(HEAVY) or (folder / "config.json").is_file():
            check_weights(folder)
    made: dict[str, nn.Module] = dict(outline.transformers)
    if outline.vae is not None:
        made["vae"] = outline.vae
    for name, part in made.items():
        if name in outline.folders:
            check_sizes(outline.folders[name], part)


def _outlined(
    index: Mapping[str, Any], name: str, model: str, folders: Mapping[str, Path], elsewhere: str | None = None
) -> Any:
    """A component of diffusers without weights, from its config."""
    if name in folders and not (folders[name] / "config.json").is_file():
        raise FileNotFoundError(f"{folders[name] / 'config.json'} is missing; complete the download")
    kind = _class(index[name][1])
    return kind.from_config(_config(name, kind, elsewhere) if elsewhere else _config(name, kind, model, name))


def _class(name: str) -> Any:
    """A class of diffusers."""
    found = getattr(diffusers, name, None)
    if found is None:
        fix = "install the version of diffusers that the model was made for, or one of those in docs/bases.md"
        raise invalid("model", f"made of classes of diffusers {diffusers.__version__}", f"one with a {name}", fix)
    return found


def _check_packages(packages: tuple[str, ...], family: Family) -> None:
    """Refuse a model whose pipeline would miss a package, after its weights were read."""
    for package in packages:
        if find_spec(package) is None:
            fix = f"pip install {package}"
            raise invalid(f"{package}, which {family.models} needs,", "installed", "no such package", fix)


def check_branch(
    branch: str,  # a folder, or a hub id
    outline: ModelOutline,
    cameras: Cameras,  # of one clip
) -> None:
    """Refuse a branch that is missing, incomplete, made for another base model, or of a method without such lenses.

    A model of two transformers has a branch for each, in folders of their names.
    """
    for name, transformer in outline.transformers.items():
        _check_branch(branch, None if len(outline.transformers) == 1 else name, transformer, cameras)


def _check_branch(branch: str, subfolder: str | None, transformer: ModelMixin, cameras: Cameras) -> None:
    folder = local_folder("branch", branch)
    if folder is not None and subfolder is not None:
        folder = folder / subfolder
    if folder is not None and not (folder / "config.json").is_file():
        fix = "pass a folder that branch.save_pretrained wrote"
        raise invalid("branch", "a folder with config.json", str(folder), fix)
    config = _config("branch", CameraBranch, branch, subfolder)
    if folder is not None and config.get("integration") != "rerope":  # which has no weights of its own
        check_weights(folder)
    check_base(config, transformer)
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
    return _trained("causal_block_frames", model, branch)


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
    looks_like_a_path = given.startswith((".", "/", "~")) or given.count("/") != 1 or path.parent.is_dir()
    if looks_like_a_path:
        raise invalid(f"{name} folder", "there, or a hub id (owner/name)", f"{given}, which is none", "check the path")
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


def _config(name: str, kind: Any, given: str, subfolder: str | None = None) -> dict[str, Any]:
    """The JSON of a folder or hub id."""
    try:
        config: dict[str, Any] = kind.load_config(given, subfolder=subfolder)
    except OSError as error:
        if Path(given).is_dir():
            file = Path(given) / (subfolder or "") / kind.config_name
            raise invalid(str(file), "JSON that can be read", error.__context__ or error, "get it again") from None
        reason = str(error).splitlines()[0]
        raise OSError(
            f"{name} {given} is neither a folder here nor found on the hub ({reason}); download it"
        ) from error
    except RecursionError:
        raise invalid(f"config of {name}", "JSON", f"brackets nested too deeply in {given}", "get it again") from None
    if not isinstance(config, dict):
        raise invalid(f"config of {name}", "a JSON object", f"a {type(config).__name__} in {given}", "get it again")
    return config


@contextmanager
def no_loading_bars() -> Iterator[None]:
    """Without the progress bars that diffusers draws for every part of a model that it reads."""
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()

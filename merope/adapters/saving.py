"""Reading a saved camera branch, and whether it belongs to a base model."""

import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from diffusers.models.modeling_utils import ModelMixin

from merope.adapters.camera_branch import CameraBranch, base_fields
from merope.adapters.families import family_of, family_of_base
from merope.errors import invalid

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def read_branch(
    folder_or_hub_id: str | PathLike[str],
    transformer: ModelMixin,
    **options: Any,  # of diffusers' from_pretrained
) -> CameraBranch:
    """The branch in a folder or on the hub, complete and made for a model like this transformer; not attached yet."""
    _check_exists(folder_or_hub_id, options.get("subfolder") or "")
    config = CameraBranch.load_config(folder_or_hub_id, **options)
    check_base(config, transformer)
    if config["integration"] == "rerope":  # has no weights of its own
        return CameraBranch.from_config(config)
    if asked_dtype(options) is None:  # diffusers would read float64 as float32
        options["dtype"] = torch.float64 if transformer.dtype == torch.float64 else torch.float32
    branch, info = CameraBranch.from_pretrained(folder_or_hub_id, output_loading_info=True, **options)
    problems = {kind: info[kind] for kind in ("missing_keys", "unexpected_keys") if info[kind]}
    if problems:
        fix = "save the branch again with save_pretrained"
        raise invalid("the branch's weights", "those of its config.json", problems, fix)
    return branch


def asked_dtype(options: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype among options of diffusers' from_pretrained, under its new or its old name."""
    return options.get("dtype") or options.get("torch_dtype")


def check_base(config: Mapping[str, Any], transformer: ModelMixin) -> None:
    """Refuse a base model that differs from the one a branch was made for, with every difference."""
    if "base" not in config or "integration" not in config:
        fix = "pass a folder that branch.save_pretrained wrote"
        raise invalid("config.json", "that of a camera branch", f"one of {config.get('_class_name')}", fix)
    family, made_for_family = family_of(transformer), family_of_base(config["base"])
    here = base_fields(transformer)
    fits = family.takes_branches_of(made_for_family)
    differences = [] if fits else [f"a {made_for_family.transformer} there, a {family.transformer} here"]
    differences += [
        f"{name} {made_for} there, {here.get(name)} here"
        for name, made_for in config["base"].items()
        if name != "transformer" and here.get(name) != made_for
    ]
    if differences:
        origin = f" ({config['base_model']})" if config.get("base_model") else ""
        fix = "load the base model that the branch was trained on"
        raise invalid("transformer", f"like the branch's base model{origin}", "; ".join(differences), fix)


def _check_exists(folder_or_hub_id: str | PathLike[str], subfolder: str) -> None:
    folder = Path(folder_or_hub_id)
    if folder.is_dir():
        folder = folder / subfolder
        if not (folder / "config.json").is_file():
            raise invalid(str(folder), "a folder with config.json", "one without", "pass what save_pretrained wrote")
    elif not HUB_ID.fullmatch(str(folder_or_hub_id)):
        raise invalid("folder_or_hub_id", "an existing folder or organisation/name", folder, "check the path")

"""Commands that run models: train, generate, analyse."""

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merope.errors import invalid

if TYPE_CHECKING:
    from merope.formats.parts import Part
    from merope.train.config import TrainConfig

MOST_SEED = 2**62


def add_train(parser: argparse.ArgumentParser) -> None:
    add_config(parser, "TOML file, or the name of one in the package, such as tiny", nargs="?")
    parser.add_argument("--list", action="store_true", help="print the names of the configs in the package")
    parser.add_argument(
        "--export",
        type=user_path,
        metavar="CHECKPOINT",
        help="write the trained folders of this step-… folder, no training",
    )
    parser.epilog = "e.g. merope train tiny --set run.steps=100 --set run.out=outputs/longer"
    parser.set_defaults(run=_train)


def _train(options: argparse.Namespace) -> int:
    from merope.train.toml_config import read_config, read_table, shipped_configs

    if options.list:
        print("\n".join(f"{name:42} {about}" for name, about in shipped_configs().items()))
        return 0
    if options.config is None:
        raise invalid("config", "a TOML file or a name", "none", "`merope train --list` shows the names")
    if "vae" in read_table(options.config):
        return _train_vae(options)
    from merope.train.config import TrainConfig
    from merope.train.loop import export_checkpoint, train
    from merope.train.provenance import steps_done

    config = read_config(TrainConfig, options.config, options.set)
    folder = train(config) if options.export is None else export_checkpoint(config, options.export)
    if options.export is None and steps_done(config) < config.run.steps:
        return 130  # stopped, which training has said; what follows in a script must not take it for done
    if os.environ.get("RANK", "0") == "0":  # of torchrun
        trained = folder / "trained" if options.export is None else folder
        print(f"wrote {folder}")
        print(f"drive it: {_driving_command(config, trained)}")
    return 0


def _driving_command(config: "TrainConfig", trained: Path) -> str:
    """What to run next with trained folders."""
    is_causal = config.objective.causal_block_frames is not None
    is_pipeline = (trained / "model_index.json").exists()  # a model of pixels or of a VAE of its own is written whole
    if is_pipeline and config.branch != "none":
        along = ("--world", "0", "--keys", "w*40 a*20 w*40", "--out", "drive")
        words = ["drive", "--model", str(trained), *along] if is_causal else ["demo", "--model", str(trained)]
        return shlex.join(["merope", *words])
    command, out = ("drive", "drive") if is_causal else ("generate", "clip.mp4")
    words = [command, "--model", str(trained if is_pipeline else config.model.pretrained)]
    words += ["--branch", "none" if config.branch == "none" else str(trained / "branch")]
    if (trained / "transformer").exists() and not is_pipeline:
        words += ["--transformer", str(trained / "transformer")]
    return shlex.join(["merope", *words, "--trajectory", "POSES", "--prompt", "TEXT", "--out", out])


def _train_vae(options: argparse.Namespace) -> int:
    from merope.train.toml_config import read_config
    from merope.train.vae_config import VaeTrainConfig
    from merope.train.vae_loop import export_vae_checkpoint, train_vae

    config = read_config(VaeTrainConfig, options.config, options.set)
    if options.export is not None:
        print(f"wrote {export_vae_checkpoint(config, options.export)}")
    elif not train_vae(config):
        return 130
    else:
        print(f"wrote {config.run.out}")
    return 0


def add_generate(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to generate")
    what.add_argument("--model", required=True, help="folder or hub id of a model in diffusers' layout")
    what.add_argument("--branch", required=True, help='folder or hub id of a camera branch, or "none"')
    what.add_argument("--transformer", help="one that was trained whole, in place of the model's")
    what.add_argument("--prompt", help="text of the clip; required if the model has a text encoder")
    what.add_argument("--negative-prompt", help="text to stay away from")
    what.add_argument(
        "--prefix", type=user_path, help="video or folder of images whose first frames the clip continues"
    )
    known = "or what the model's clips.json names"
    what.add_argument("--prefix-frames", type=int, help=f"how many of them; 4k + 1 for most VAEs (9, {known})")
    what.add_argument("--size", type=int, nargs=2, metavar=("HEIGHT", "WIDTH"), help=f"(288 512, {known})")
    what.add_argument("--frames", type=int, help=f"frames of the clip; 4k + 1 for most VAEs (49, {known})")
    what.add_argument("--fps", type=float, help=f"of the clip; paths with times are resampled to it (12, {known})")
    what.add_argument("--out", type=user_path, required=True, metavar="CLIP.mp4", help="other files are named after it")
    cameras = parser.add_argument_group("cameras")
    cameras.add_argument("--trajectory", type=user_path, required=True, help="pose file or folder (docs/formats.md)")
    lens = add_path_options(cameras)
    lens.add_argument("--rig", type=user_path, metavar="FILE", help="rig file: all its views go along the path")
    how = parser.add_argument_group("how")
    how.add_argument("--steps", type=int, help="denoising steps: what the model was trained for, or 50")
    how.add_argument("--guidance", type=float, help="scale of text guidance (5, or 1 without a text encoder)")
    how.add_argument("--seed", type=seed, default=0, help="of the noise (0)")
    how.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="(bfloat16 on a GPU)")
    how.add_argument("--device", help="such as cpu or cuda (cuda if there is one)")
    how.add_argument("--offload", action="store_true", help="keep on the GPU only what runs")
    parser.epilog = "e.g. merope generate --model M --branch B --trajectory path.json --out c.mp4"
    parser.set_defaults(run=_generate, if_stopped="; nothing was written")


def add_config(parser: argparse.ArgumentParser, about: str, nargs: str | None = None) -> None:
    """A config file, and what is to be changed in it."""
    parser.add_argument("config", type=user_path, nargs=nargs, help=about)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the config")


def add_part(parser: argparse.ArgumentParser) -> None:
    """Work that several machines share."""
    about = "do this part of the clips alone, such as 2/3; when all are done, the same command without it joins them"
    parser.add_argument("--part", type=_part, metavar="I/N", help=about)


def _part(text: str) -> "Part":
    from merope.formats.parts import Part

    try:
        return Part.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def require_config(file: Path) -> None:
    """Refuse a config that does not exist at once, before anything slow is imported."""
    from merope.train.toml_config import find_config

    find_config(file)


def add_trajectory_option(parser: argparse._ActionsContainer) -> None:
    """Options of the reader of pose files."""
    about = "what the format needs besides, such as camera=cam01 or image_size=[640,360]; may be repeated"
    parser.add_argument(
        "--trajectory-option", action="append", default=[], type=key_and_value, metavar="KEY=VALUE", help=about
    )


def add_path_options(parser: argparse._ArgumentGroup) -> argparse._MutuallyExclusiveGroup:
    """How a pose file is read, and the lens of its cameras; the group of options of which one names a lens."""
    parser.add_argument("--trajectory-format", metavar="NAME", help="needed only where the content fits several")
    add_trajectory_option(parser)
    parser.add_argument("--assume-metric", action="store_true", help="the path is in metres, whatever its format says")
    parser.add_argument("--xi", type=float, default=0.0, help="with --fov: of a fisheye (0, a pinhole)")
    lens = parser.add_mutually_exclusive_group()
    lens.add_argument("--lens", type=user_path, metavar="FILE", help="pose file whose lens is used")
    lens.add_argument("--fov", type=float, metavar="DEGREES", help="horizontal field of view of a centred lens")
    return lens


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What the user gave or left at its default, without what the parser keeps for itself."""
    return {name: value for name, value in vars(options).items() if name not in ("command", "run", "if_stopped")}


def user_path(text: str) -> Path:
    """A file or folder; the shell leaves the ~ of --out=~/run alone."""
    return Path(os.path.expanduser(text))


def seed(text: str) -> int:
    """A whole number that generators of random numbers take, also with a few added."""
    if abs(int(text)) >= MOST_SEED:
        raise argparse.ArgumentTypeError(f"{text} is not below {MOST_SEED} in size")
    return int(text)


def key_and_value(text: str) -> tuple[str, object]:
    """camera=cam01 as ("camera", "cam01"), image_size=[640,360] as ("image_size", (640, 360))."""
    import json

    key, separator, value = text.partition("=")
    if not (key and separator):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    if key in ("path", "format", "is_metric", "lens"):
        raise argparse.ArgumentTypeError(f"{key} is not an option of a format (docs/formats.md)")
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError:
        parsed = value
    except RecursionError:
        raise argparse.ArgumentTypeError(f"{text[:40]} … is nested too deeply") from None
    return key, tuple(parsed) if isinstance(parsed, list) else parsed


def require_files(options: argparse.Namespace, *names: str) -> None:
    """Refuse a path that does not exist at once, before anything slow is imported."""
    for name in names:
        given = getattr(options, name.removeprefix("--").replace("-", "_"))
        for path in given if isinstance(given, list) else [given]:
            if path is not None and not path.exists():
                raise invalid(name, "a file or folder that exists", path, "check the path")


def _generate(options: argparse.Namespace) -> int:
    require_files(options, "--trajectory", *(() if options.rig else ("--prefix",)), "--lens", "--rig")
    from merope.demo.given_paths import clip_options
    from merope.generate.command import generate
    from merope.generate.inputs import GenerateConfig

    given = settings(options)
    size = given.pop("size") or (None, None)
    given |= {"fov_deg": given.pop("fov"), "trajectory_options": dict(given.pop("trajectory_option"))}
    given |= dict(zip(("height", "width"), size, strict=True))
    said = {name: value for name, value in given.items() if value is not None}
    config = GenerateConfig(**(clip_options(Path(options.model).expanduser()) | said))
    generate(config)
    clips = ", ".join(map(str, config.clips()))
    print(f"wrote {clips} with .cameras.json, .birdseye.png and .json beside it")
    return 0


def add_analyse(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder or hub id of a model in diffusers' layout")
    parser.add_argument("--branch", required=True, help="folder or hub id of a camera branch")
    parser.add_argument("--transformer", help="one that was trained whole, in place of the model's")
    parser.add_argument("--trajectory", type=user_path, required=True, help="pose file or folder (docs/formats.md)")
    parser.add_argument("--assume-metric", action="store_true", help="the path is in metres, whatever its format says")
    parser.add_argument("--fov", type=float, metavar="DEGREES", help="of a centred lens, where the file has none")
    known = "or what the model's clips.json names"
    parser.add_argument("--size", type=int, nargs=2, metavar=("HEIGHT", "WIDTH"), help=f"(288 512, {known})")
    parser.add_argument("--frames", type=int, help=f"RGB frames of the path (49, {known})")
    parser.add_argument("--fps", type=float, help=f"paths with times are resampled to it (12, {known})")
    parser.add_argument("--steps", type=int, default=8, help="denoising steps to average over (8)")
    parser.add_argument("--seed", type=seed, default=0, help="of the noise (0)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="(bfloat16 on a GPU)")
    parser.add_argument("--device", help="such as cpu or cuda (cuda if there is one)")
    parser.add_argument("--out", type=user_path, required=True, help="folder for analysis.json and pictures")
    parser.epilog = "e.g. merope analyse --model M --branch B --trajectory path.json --out a"
    parser.set_defaults(run=_analyse)


def _analyse(options: argparse.Namespace) -> int:
    require_files(options, "--trajectory")
    from merope.demo.given_paths import clip_options
    from merope.generate.camera_path import PathSource, read_clip_path
    from merope.generate.inputs import chosen_device, chosen_dtype, warn_of_idle_weights
    from merope.generate.preflight import model_folder
    from merope.geometry.cameras import Cameras
    from merope.paper.analysis import AnalyseConfig, analyse_model

    model, branch = os.path.expanduser(options.model), os.path.expanduser(options.branch)
    transformer = None if options.transformer is None else os.path.expanduser(options.transformer)
    model_folder(model)
    warn_of_idle_weights(model, branch, transformer)
    clip = {"height": 288, "width": 512, "frames": 49, "fps": 12.0} | clip_options(Path(model))
    height, width = options.size or (clip["height"], clip["width"])
    frames = int(clip["frames"]) if options.frames is None else options.frames
    fps = clip["fps"] if options.fps is None else options.fps
    lens = {"assume_metric": options.assume_metric, "fov_deg": options.fov}
    path = read_clip_path(PathSource(options.trajectory, frames, fps, int(height), int(width), **lens))
    assert path.lens is not None
    device = chosen_device(options.device)
    run = (options.steps, options.seed, chosen_dtype(options.dtype, device), device)
    config = AnalyseConfig(
        model, branch, options.out, int(height), int(width), *run, transformer, str(options.trajectory), fps
    )
    analyses = analyse_model(config, Cameras(path.world_from_camera, path.lens))
    for name, analysis in analyses.items():
        if len(analyses) > 1:
            print(name)
        for block, amplitude, share in zip(analysis.blocks, analysis.amplitude, analysis.share, strict=True):
            print(f"block {block:>3}  amplitude {float(amplitude):.4f}  {float(share):6.1%} of all")
    print(f"wrote {options.out / 'analysis.json'}, amplitude.png and attention-mass.png")
    return 0

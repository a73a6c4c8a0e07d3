"""Commands that run models: train, generate, analyse."""

import argparse
import os
import sys
from pathlib import Path


def add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="TOML file, see configs/")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the config")
    parser.add_argument(
        "--export", type=Path, metavar="CHECKPOINT", help="write the trained folders of this step-… folder, no training"
    )
    parser.set_defaults(run=_train)


def _train(options: argparse.Namespace) -> int:
    from merope.bench.provenance import steps_done
    from merope.train.config import TrainConfig
    from merope.train.loop import export_checkpoint, train
    from merope.train.toml_config import read_config, read_table

    if "vae" in read_table(options.config):
        return _train_vae(options)
    config = read_config(TrainConfig, options.config, options.set)
    folder = train(config) if options.export is None else export_checkpoint(config, options.export)
    if options.export is None and steps_done(config) < config.run.steps:
        return 130  # stopped, which training has said; what follows in a script must not take it for done
    if os.environ.get("RANK", "0") == "0":  # of torchrun
        print(f"wrote {folder}")
    return 0


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
    what.add_argument("--model", required=True, help="folder or hub id of a Wan model in diffusers' layout")
    what.add_argument("--branch", required=True, help='folder or hub id of a camera branch, or "none"')
    what.add_argument("--transformer", help="one that was trained whole, in place of the model's")
    what.add_argument("--prompt", help="text of the clip; required if the model has a text encoder")
    what.add_argument("--negative-prompt", help="text to stay away from")
    what.add_argument("--prefix", type=Path, metavar="VIDEO", help="video whose first frames the clip continues")
    what.add_argument("--prefix-frames", type=int, default=9, help="how many of them, 4k + 1")
    what.add_argument("--size", type=int, nargs=2, default=(288, 512), metavar=("HEIGHT", "WIDTH"))
    what.add_argument("--frames", type=int, default=49, help="frames of the clip, 4k + 1")
    what.add_argument("--fps", type=float, default=12.0, help="of the clip; paths with times are resampled to it")
    what.add_argument("--out", type=Path, required=True, metavar="CLIP.mp4", help="other files are named after it")
    cameras = parser.add_argument_group("cameras")
    cameras.add_argument("--trajectory", type=Path, required=True, help="pose file or folder (docs/formats.md)")
    cameras.add_argument("--trajectory-format", metavar="NAME", help="needed only where the content fits several")
    cameras.add_argument(
        "--trajectory-option",
        action="append",
        default=[],
        type=key_and_value,
        metavar="KEY=VALUE",
        help="what the format needs besides, such as camera=cam01 or image_size=[640,360]; may be repeated",
    )
    cameras.add_argument("--assume-metric", action="store_true", help="the path is in metres, whatever its format says")
    lens = cameras.add_mutually_exclusive_group()
    lens.add_argument("--lens", type=Path, metavar="FILE", help="pose file whose lens is used")
    lens.add_argument("--fov", type=float, metavar="DEGREES", help="horizontal field of view of a centred lens")
    cameras.add_argument("--xi", type=float, default=0.0, help="with --fov: a unified (fisheye) camera")
    how = parser.add_argument_group("how")
    how.add_argument("--steps", type=int, default=50, help="denoising steps")
    how.add_argument("--guidance", type=float, help="scale of text guidance (5, or 1 without a text encoder)")
    how.add_argument("--seed", type=int, default=0)
    how.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of transformer and text encoder")
    how.add_argument("--device", help="cuda if there is one")
    how.add_argument("--offload", action="store_true", help="keep on the GPU only what runs")
    parser.set_defaults(run=_generate)


def key_and_value(text: str) -> tuple[str, object]:
    """camera=cam01 as ("camera", "cam01"), image_size=[640,360] as ("image_size", (640, 360))."""
    import json

    key, separator, value = text.partition("=")
    if not (key and separator):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError:
        parsed = value
    return key, tuple(parsed) if isinstance(parsed, list) else parsed


def _generate(options: argparse.Namespace) -> int:
    from merope.generate.command import generate
    from merope.generate.inputs import GenerateConfig

    given = {key: value for key, value in vars(options).items() if key not in ("command", "run")}
    height, width = given.pop("size")
    fov_deg, reader_options = given.pop("fov"), dict(given.pop("trajectory_option"))
    config = GenerateConfig(**given, height=height, width=width, fov_deg=fov_deg, trajectory_options=reader_options)
    try:
        generate(config)
    except KeyboardInterrupt:
        print("merope: stopped; nothing was written", file=sys.stderr)
        return 130
    print(f"wrote {config.out} with .cameras.json, .birdseye.png and .json beside it")
    return 0


def add_analyse(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder or hub id of a Wan model in diffusers' layout")
    parser.add_argument("--branch", required=True, help="folder or hub id of a camera branch")
    parser.add_argument("--transformer", help="one that was trained whole, in place of the model's")
    parser.add_argument("--trajectory", type=Path, required=True, help="pose file or folder (docs/formats.md)")
    parser.add_argument("--assume-metric", action="store_true", help="the path is in metres, whatever its format says")
    parser.add_argument("--fov", type=float, metavar="DEGREES", help="of a centred lens, where the file has none")
    parser.add_argument("--size", type=int, nargs=2, default=(288, 512), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--frames", type=int, default=49, help="RGB frames of the path, 4k + 1")
    parser.add_argument("--fps", type=float, default=12.0, help="paths with times are resampled to it")
    parser.add_argument("--steps", type=int, default=8, help="denoising steps to average over")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", help="cuda if there is one")
    parser.add_argument("--out", type=Path, required=True, help="folder for analysis.json and pictures")
    parser.set_defaults(run=_analyse)


def _analyse(options: argparse.Namespace) -> int:
    from merope.generate.inputs import GenerateConfig, camera_path, warn_of_idle_weights
    from merope.geometry.cameras import Cameras
    from merope.paper.analysis import AnalyseConfig, analyse_model

    height, width = options.size
    clip = GenerateConfig(  # the clip whose making is watched
        model=options.model,
        branch=options.branch,
        trajectory=options.trajectory,
        out=options.out / "clip.mp4",
        transformer=options.transformer,
        assume_metric=options.assume_metric,
        fov_deg=options.fov,
        height=height,
        width=width,
        frames=options.frames,
        fps=options.fps,
        steps=options.steps,
        dtype=options.dtype,
        device=options.device,
    )
    warn_of_idle_weights(clip)
    path = camera_path(clip)
    assert path.lens is not None
    run = (clip.steps, options.seed, clip.run_dtype, clip.run_device)
    config = AnalyseConfig(clip.model, clip.branch, options.out, height, width, *run, clip.transformer)
    analysis = analyse_model(config, Cameras(path.world_from_camera, path.lens))
    for block, amplitude, share in zip(analysis.blocks, analysis.amplitude, analysis.share, strict=True):
        print(f"block {block:>3}  amplitude {float(amplitude):.4f}  {float(share):6.1%} of all")
    print(f"wrote {options.out / 'analysis.json'}, amplitude.png and attention-mass.png")
    return 0

"""The `merope` command: parse, call, print. Heavy imports happen inside commands."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="merope", description="Drive a video model with a camera path in metres.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_demo(commands.add_parser("demo", help="measure and draw what camera encodings do as the baseline grows"))
    _add_taxonomy(commands.add_parser("taxonomy", help="measure the paper's table of encodings; exit 1 if it differs"))
    _add_curate(commands.add_parser("curate", help="cluster trajectories, keep prototypes, write a manifest"))
    _add_generate(commands.add_parser("generate", help="a trajectory, a prompt and first frames to a video"))
    _add_analyse(commands.add_parser("analyse", help="what a camera branch does in a model: two pictures and numbers"))
    _add_evaluate(commands.add_parser("evaluate", help="how well videos follow their camera paths; a report page"))
    _add_fidelity(commands.add_parser("fidelity", help="FID and FVD of videos against reference videos"))
    _add_train(commands.add_parser("train", help="train a camera branch; the same command goes on after a stop"))
    bench = commands.add_parser("bench", help="measure").add_subparsers(required=True, metavar="what")
    _add_bench_world(bench.add_parser("world", help="train an encoding on procedural worlds and measure its control"))
    data = commands.add_parser("data", help="make or look at data").add_subparsers(required=True, metavar="what")
    _add_cache(data.add_parser("cache", help="encode frames and captions of a training config once, to disk"))
    _add_synth(data.add_parser("synth", help="write a small data set of the procedural world in a real one's layout"))
    options = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except (ValueError, OSError) as error:  # something to be mended by the user, not a fault of the program
        print(f"merope: {error}", file=sys.stderr)
        return 2


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("outputs/demo"), help="folder for pictures and numbers")
    parser.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    from merope.demo import run

    run(options.out)
    return 0


def _add_taxonomy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON instead of the table")
    parser.set_defaults(run=_taxonomy)


def _taxonomy(options: argparse.Namespace) -> int:
    from merope.taxonomy import PAPER, as_json, measure, table

    rows = []
    for count, name in enumerate(PAPER, start=1):
        print(f"measuring {name} ({count} of {len(PAPER)})", end="\r", file=sys.stderr, flush=True)
        rows.append(measure(name))
    print(as_json(rows) if options.json else table(rows))
    return 0 if all(row.agrees_with_paper for row in rows) else 1


def _add_curate(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--poses", type=Path, nargs="+", help="pose files of equal length, in any format that is read")
    source.add_argument("--nuscenes", type=Path, metavar="ROOT", help="windows of a nuScenes camera")
    parser.add_argument(
        "--metric", action="store_true", help="the pose files are in metres, whatever their format says"
    )
    parser.add_argument("--version", default="v1.0-trainval", help="folder of nuScenes tables")
    parser.add_argument("--frames", type=int, default=49, help="frames of a nuScenes window")
    parser.add_argument("--step", type=int, default=1, help="frames between the beginnings of windows")
    parser.add_argument("--clusters", type=int, default=256)
    parser.add_argument(
        "--suppression", type=float, default=1.0, metavar="METRES", help="Fréchet distance to keep apart"
    )
    parser.add_argument("--scope", choices=("cluster", "global"), default="cluster")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("outputs/curation"), help="folder for manifest and picture")
    parser.set_defaults(run=_curate)


def _curate(options: argparse.Namespace) -> int:
    from merope.data.curate import curate_trajectories, summary
    from merope.data.formats import read
    from merope.data.nuscenes import NuScenes
    from merope.errors import invalid

    if options.nuscenes is not None:
        data = NuScenes(options.nuscenes, options.version)
        windows = data.windows(options.frames, step=options.step)
        if not windows:
            raise invalid("frames", f"at most {data.longest_scene}, the longest scene", options.frames, "ask for fewer")
        trajectories = [data.trajectory(window) for window in windows]
    else:
        is_metric = True if options.metric else None
        trajectories = [replace(read(path, is_metric=is_metric), name=str(path)) for path in options.poses]
    clusters = min(options.clusters, len(trajectories))
    curation = curate_trajectories(
        trajectories, options.out, clusters, options.suppression, options.seed, options.scope
    )
    counts = summary(curation)
    print(", ".join(f"{name}: {value}" for name, value in counts.items() if isinstance(value, int)))
    print(f"wrote {options.out / 'manifest.jsonl'}, curation.json and curation.png")
    return 0


def _add_analyse(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder or hub id of a Wan model in diffusers' layout")
    parser.add_argument("--branch", required=True, help="folder or hub id of a camera branch")
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
    from merope.analysis import AnalyseConfig, analyse_model
    from merope.generate import GenerateConfig, camera_path
    from merope.geometry.cameras import Cameras

    height, width = options.size
    clip = GenerateConfig(  # the clip whose making is watched
        model=options.model,
        branch=options.branch,
        trajectory=options.trajectory,
        out=options.out / "clip.mp4",
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
    path = camera_path(clip)
    assert path.lens is not None
    config = AnalyseConfig(
        clip.model, clip.branch, options.out, height, width, clip.steps, options.seed, clip.run_dtype, clip.run_device
    )
    analysis = analyse_model(config, Cameras(path.world_from_camera, path.lens))
    for block, amplitude, share in zip(analysis.blocks, analysis.amplitude, analysis.share, strict=True):
        print(f"block {block:>3}  amplitude {float(amplitude):.4f}  {float(share):6.1%} of all")
    print(f"wrote {options.out / 'analysis.json'}, amplitude.png and attention-mass.png")
    return 0


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--commanded",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="pose files named like the videos, or a manifest",
    )
    parser.add_argument("--videos", type=Path, metavar="FOLDER", help="videos of one method, named by its folder")
    parser.add_argument(
        "--method", action="append", default=[], metavar="NAME=FOLDER", help="videos of a method; repeat to compare"
    )
    parser.add_argument("--estimator", default="colmap", help="colmap, opencv, precomputed, vggt-omega, vggt, …")
    parser.add_argument("--checkpoint", type=Path, help="weights of a learned estimator")
    parser.add_argument("--estimates", type=Path, metavar="FOLDER", help="recovered paths, for precomputed")
    parser.add_argument("--fidelity", type=Path, metavar="FILE", help="fidelity.json: FID and FVD for the report")
    parser.add_argument("--workers", type=int, help="processes; by default one per core, or one with a checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    parser.add_argument("--out", type=Path, default=Path("outputs/evaluation"), help="folder of the report")
    parser.set_defaults(run=_evaluate)


def _evaluate(options: argparse.Namespace) -> int:
    import os

    from merope.evaluate.recover import EstimatorChoice
    from merope.evaluate.results import as_text
    from merope.evaluate.run import evaluate

    methods = _methods(options)
    choice = EstimatorChoice(options.estimator, options.checkpoint)
    workers = options.workers or (1 if options.checkpoint else os.cpu_count() or 1)
    try:
        results = evaluate(
            options.commanded,
            methods,
            choice,
            options.out,
            workers,
            options.estimates,
            options.seed,
            options.fidelity,
        )
    except KeyboardInterrupt:
        print("\nmerope: interrupted; finished clips are kept, run the same command to go on", file=sys.stderr)
        return 130
    print(as_text(results))
    print(f"wrote {options.out / 'report.html'}, results.json and clips.csv")
    return 0


def _methods(options: argparse.Namespace) -> dict[str, Path]:
    """Folders of videos by the names of their methods, from --videos and --method."""
    from merope.errors import invalid

    methods = {} if options.videos is None else {options.videos.resolve().name: options.videos}
    for given in options.method:
        name, separator, folder = given.partition("=")
        if not (name and separator and folder) or name in methods:
            raise invalid("--method", "NAME=FOLDER with a name of its own", repr(given), "give each method once")
        methods[name] = Path(folder)
    if not methods:
        raise invalid("--videos or --method", "given", "neither", "pass a folder of videos")
    return methods


def _add_fidelity(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--videos", type=Path, metavar="FOLDER", help="videos of one method, named by its folder")
    parser.add_argument(
        "--method", action="append", default=[], metavar="NAME=FOLDER", help="videos of a method; repeat to compare"
    )
    parser.add_argument(
        "--reference", type=Path, required=True, metavar="FOLDER", help="real videos, or statistics of them (.npz)"
    )
    parser.add_argument("--inception", type=Path, metavar="FILE", help="TorchScript detector of FID")
    parser.add_argument("--i3d", type=Path, metavar="FILE", help="TorchScript detector of FVD")
    parser.add_argument("--prefix-frames", type=int, default=9, help="first frames of every video that are left out")
    parser.add_argument("--out", type=Path, default=Path("outputs/fidelity"), help="folder of fidelity.json")
    parser.set_defaults(run=_fidelity)


def _fidelity(options: argparse.Namespace) -> int:
    import torch

    from merope.evaluate.detectors import Detector, I3DDetector, InceptionDetector
    from merope.evaluate.fidelity import as_text, fidelity

    device = "cuda" if torch.cuda.is_available() else "cpu"
    detectors: list[Detector] = []
    if options.inception is not None:
        detectors.append(InceptionDetector(options.inception, device))
    if options.i3d is not None:
        detectors.append(I3DDetector(options.i3d, device))
    try:
        result = fidelity(_methods(options), options.reference, detectors, options.out, options.prefix_frames)
    except KeyboardInterrupt:
        print("\nmerope: interrupted; finished folders are kept, run the same command to go on", file=sys.stderr)
        return 130
    print(as_text(result))
    print(f"wrote {options.out / 'fidelity.json'}")
    return 1 if result.left_out else 0


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="TOML file, see configs/")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the config")
    parser.add_argument(
        "--export", type=Path, metavar="CHECKPOINT", help="write the trained folders of this step-… folder, no training"
    )
    parser.set_defaults(run=_train)


def _train(options: argparse.Namespace) -> int:
    from merope.train.config import TrainConfig
    from merope.train.loop import export_checkpoint, train
    from merope.train.toml_config import read_config

    config = read_config(TrainConfig, options.config, options.set)
    folder = train(config) if options.export is None else export_checkpoint(config, options.export)
    if os.environ.get("RANK", "0") == "0":  # of torchrun
        print(f"wrote {folder}")
    return 0


def _add_bench_world(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="TOML file of configs/world")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the config")
    parser.add_argument("--seed", type=int, default=0, help="of initialisation, worlds and noise; names the folder")
    parser.add_argument("--worlds", type=int, default=32, help="unseen worlds, three paths each")
    parser.add_argument("--workers", type=int, default=2, help="processes that recover poses")
    parser.add_argument(
        "--until",
        choices=("trained", "generated", "scored"),
        default="scored",
        help="how far to go; later stages pick up what earlier ones left in the folder",
    )
    parser.set_defaults(run=_bench_world)


def _bench_world(options: argparse.Namespace) -> int:
    import torch

    from merope.bench.world import WorldTest, generate_row
    from merope.bench.world_scores import score_row, table, with_seed
    from merope.train.config import TrainConfig
    from merope.train.loop import train
    from merope.train.toml_config import read_config

    config = with_seed(read_config(TrainConfig, options.config, options.set), options.seed)
    test = WorldTest(worlds=options.worlds)
    train(config)  # a finished run of the same config is only written out again, another one is refused
    if options.until != "trained":
        generate_row(config, test, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if options.until == "scored":
        print(table({config.run.out.name: score_row(config, test, options.workers)}))
    print(f"wrote {config.run.out}")
    return 0


def _add_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="TOML file of a training run whose data come from files")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the config")
    parser.add_argument("--out", type=Path, required=True, help="folder of the cache; an interrupted one is completed")
    parser.add_argument("--validation", action="store_true", help="cache the validation clips instead")
    parser.set_defaults(run=_cache)


def _cache(options: argparse.Namespace) -> int:
    from merope.train.caching import cache_clips
    from merope.train.config import TrainConfig
    from merope.train.toml_config import read_config

    config = read_config(TrainConfig, options.config, options.set)
    try:
        skipped = cache_clips(config, options.out, options.validation)
    except KeyboardInterrupt:
        print("\nmerope: interrupted; finished clips are kept, run the same command to go on", file=sys.stderr)
        return 130
    print(f"wrote {options.out}" + (f"; {len(skipped)} clips could not be read" if skipped else ""))
    return 1 if skipped else 0


def _add_synth(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layout", choices=("nuscenes",), default="nuscenes")
    parser.add_argument("--out", type=Path, required=True, help="folder of the data set")
    parser.add_argument("--version", default="v1.0-mini", help="folder of tables inside it")
    parser.add_argument("--scenes", type=int, default=2)
    parser.add_argument("--frames", type=int, default=60, help="frames of a scene, at 12 Hz")
    parser.add_argument("--size", type=int, nargs=2, default=(144, 256), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=_synth)


def _synth(options: argparse.Namespace) -> int:
    from merope.data.synth import synthesise_nuscenes

    height, width = options.size
    synthesise_nuscenes(options.out, options.version, options.scenes, options.frames, height, width, options.seed)
    print(f"wrote {options.scenes} scenes of {options.frames} frames to {options.out}")
    return 0


def _add_generate(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to generate")
    what.add_argument("--model", required=True, help="folder or hub id of a Wan model in diffusers' layout")
    what.add_argument("--branch", required=True, help="folder or hub id of a camera branch")
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
        type=_key_and_value,
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


def _key_and_value(text: str) -> tuple[str, object]:
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
    from merope.generate import GenerateConfig, generate

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

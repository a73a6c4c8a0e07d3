"""The `merope` command: parse, call, print. Heavy imports happen inside commands."""

import argparse
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
    data = commands.add_parser("data", help="make or look at data").add_subparsers(required=True, metavar="what")
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

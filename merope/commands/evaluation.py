"""Commands that measure videos: evaluate, fidelity."""

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path

from merope.commands.models import add_part, add_trajectory_option, require_files, seed, user_path
from merope.errors import invalid


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    paths = "pose files named like the videos, or a manifest"
    parser.add_argument("--commanded", type=user_path, required=True, metavar="FOLDER", help=paths)
    _add_methods(parser)
    add_trajectory_option(parser)
    parser.add_argument("--fov", type=float, metavar="DEGREES", help="of the videos, where pose files have no lens")
    names = "opencv, precomputed, vggt-omega, vggt, depth-anything-3, map-anything or colmap (%(default)s)"
    parser.add_argument("--estimator", default="colmap", help=names)
    check = (
        "a second estimator that has to find the same path, or a clip is not trusted and in no mean: opencv or "
        "colmap, or none to switch it off; by default opencv checks colmap, and others are not checked"
    )
    parser.add_argument("--check", default="default", metavar="ESTIMATOR", help=check)
    parser.add_argument("--checkpoint", type=user_path, help="weights of a learned estimator")
    parser.add_argument("--estimates", type=user_path, metavar="FOLDER", help="recovered paths, for precomputed")
    parser.add_argument("--fidelity", type=user_path, metavar="FILE", help="fidelity.json: FID and FVD for the report")
    parser.add_argument("--workers", type=int, help="processes; by default one per core, or one with a checkpoint")
    parser.add_argument("--seed", type=seed, default=0, help="of the bootstrap (0)")
    parser.add_argument(
        "--out", type=user_path, default=Path("outputs/evaluation"), help="for the report (outputs/evaluation)"
    )
    add_part(parser)
    parser.epilog = "e.g. merope evaluate --commanded drives/poses --videos drives/videos"
    parser.set_defaults(run=_evaluate, if_stopped="; finished clips are kept, run the same command to go on")


def _evaluate(options: argparse.Namespace) -> int:
    methods = _methods(options)
    require_files(options, "--commanded", "--estimates", "--fidelity", "--checkpoint")
    from merope.evaluate.recover import EstimatorChoice
    from merope.evaluate.results import as_text
    from merope.evaluate.run import evaluate
    from merope.formats.parts import usable_cores

    choice = EstimatorChoice(options.estimator, options.checkpoint, options.check)
    by_default = 1 if options.checkpoint else usable_cores()
    results = evaluate(
        options.commanded,
        methods,
        choice,
        options.out,
        by_default if options.workers is None else options.workers,
        options.estimates,
        options.seed,
        options.fidelity,
        dict(options.trajectory_option),
        options.fov,
        options.part,
    )
    if results is None:
        print(f"part {options.part} is done; without --part the command measures all clips")
        return 0
    print(as_text(results))
    print(f"wrote {options.out / 'report.html'}, results.json and clips.csv")
    # Poses that were found but are not trusted are a finding, no failure.
    if all(clip.metrics is None or clip.metrics.valid_frames < 2 for clip in results.clips):
        got = f"none of {len(results.clips)}"
        raise invalid("videos", "such that at least one can be measured", got, _way_out(options.commanded, methods))
    return 0


def _way_out(commanded: Path, methods: Mapping[str, Path]) -> str:
    """What to do where nothing could be measured. A data set has its paths and its videos in folders of their own."""
    poses, videos = commanded / "poses", [folder / "videos" for folder in methods.values()]
    if poses.is_dir() and all(folder.is_dir() for folder in videos):
        inside = ", ".join(shlex.quote(str(folder)) for folder in videos)
        return f"pass the folders inside: --commanded {shlex.quote(str(poses))}, videos from {inside}"
    return "mend the problems above; videos whose pose files have no lens need --fov"


def add_fidelity(parser: argparse.ArgumentParser) -> None:
    _add_methods(parser)
    parser.add_argument(
        "--reference", type=user_path, required=True, metavar="FOLDER", help="real videos, or statistics of them (.npz)"
    )
    parser.add_argument("--inception", type=user_path, metavar="FILE", help="TorchScript detector of FID")
    parser.add_argument("--i3d", type=user_path, metavar="FILE", help="TorchScript detector of FVD")
    parser.add_argument(
        "--allow-code", action="store_true", help="run the detector files, which are programs: only those you trust"
    )
    parser.add_argument("--prefix-frames", type=int, default=9, help="first frames of videos that are left out (9)")
    parser.add_argument(
        "--out", type=user_path, default=Path("outputs/fidelity"), help="for fidelity.json (outputs/fidelity)"
    )
    add_part(parser)
    parser.epilog = "e.g. merope fidelity --videos ours --reference real --i3d i3d.pt --allow-code"
    parser.set_defaults(run=_fidelity, if_stopped="; finished folders are kept, run the same command to go on")


def _fidelity(options: argparse.Namespace) -> int:
    methods = _methods(options)
    require_files(options, "--reference")
    _require_consent(options)
    import torch

    from merope.evaluate.detectors import Detector, I3DDetector, InceptionDetector
    from merope.evaluate.fidelity import as_text, fidelity

    device = "cuda" if torch.cuda.is_available() else "cpu"
    detectors: list[Detector] = []
    if options.inception is not None:
        detectors.append(InceptionDetector(options.inception, device))
    if options.i3d is not None:
        detectors.append(I3DDetector(options.i3d, device))
    result = fidelity(methods, options.reference, detectors, options.out, options.prefix_frames, options.part)
    if result is None:
        print(f"part {options.part} is done; without --part the command compares all videos")
        return 0
    print(as_text(result))
    print(f"wrote {options.out / 'fidelity.json'}")
    return 1 if result.left_out else 0


def _require_consent(options: argparse.Namespace) -> None:
    """TorchScript is a program that can read and write files: it runs only if the user says so."""
    given = [str(file) for file in (options.inception, options.i3d) if file is not None]
    if given and not options.allow_code:
        fix = "pass --allow-code if you trust where they are from"
        raise invalid("--allow-code", "given to run detector files", f"none for {', '.join(given)}", fix)


def _add_methods(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--videos", type=user_path, metavar="FOLDER", help="videos of one method, named by its folder")
    several = "videos of a method; repeat to compare"
    parser.add_argument("--method", action="append", default=[], metavar="NAME=FOLDER", help=several)


def _methods(options: argparse.Namespace) -> dict[str, Path]:
    """Folders of videos by the names of their methods, from --videos and --method."""
    methods = {} if options.videos is None else {options.videos.resolve().name: options.videos}
    for given in options.method:
        name, separator, folder = given.partition("=")
        if not (name and separator and folder) or name in methods:
            raise invalid("--method", "NAME=FOLDER with a name of its own", repr(given), "give each method once")
        methods[name] = user_path(folder)
    if not methods:
        raise invalid("--videos or --method", "given", "neither", "pass a folder of videos")
    return methods

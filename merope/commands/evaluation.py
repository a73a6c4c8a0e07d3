"""Commands that measure videos: evaluate, fidelity."""

import argparse
import os
import sys
from pathlib import Path


def add_evaluate(parser: argparse.ArgumentParser) -> None:
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


def add_fidelity(parser: argparse.ArgumentParser) -> None:
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

"""`merope data from-videos`: a folder of videos without poses to a training set."""

import argparse
import glob
from pathlib import Path
from typing import TYPE_CHECKING

from merope.commands.models import require_files, user_path

if TYPE_CHECKING:
    from torch import Tensor

    from merope.evaluate.estimators.estimator import PoseEstimate
    from merope.evaluate.recover import EstimatorChoice
    from merope.geometry.lenses import Lens


def add_from_videos(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("videos", type=user_path, help="folder of videos of a phone or a dash-cam")
    parser.add_argument(
        "--out", type=user_path, required=True, help="folder of the training set; a stopped one is completed"
    )
    scale = parser.add_argument_group("metres, from one of").add_mutually_exclusive_group()
    scale.add_argument("--speed", type=float, metavar="M_S", help="mean speed in every piece of every video")
    logs = "folder with <video>.csv: columns time_s and speed_m_s"
    scale.add_argument("--speed-logs", type=user_path, metavar="FOLDER", help=logs)
    scale.add_argument("--camera-height", type=float, metavar="METRES", help="of the camera above the road")
    lens = parser.add_argument_group("lens; estimated where left out").add_mutually_exclusive_group()
    lens.add_argument("--lens", type=user_path, metavar="FILE", help="pose file whose lens is used")
    lens.add_argument("--fov", type=float, metavar="DEGREES", help="horizontal field of view of a centred pinhole")
    poses = parser.add_argument_group("poses")
    poses.add_argument("--estimator", default="colmap", help="as of merope evaluate (colmap)")
    poses.add_argument("--checkpoint", type=user_path, help="weights of a learned estimator")
    estimates = "folder with the answer of another program for each piece, <piece>.* in any format"
    poses.add_argument("--estimates", type=user_path, metavar="FOLDER", help=estimates)
    check = "who has to find the same path: opencv, colmap or none (opencv for colmap)"
    poses.add_argument("--check", default="default", metavar="ESTIMATOR", help=check)
    clips = parser.add_argument_group("clips")
    clips.add_argument("--fps", type=float, default=12.0, help="of the training set (12)")
    clips.add_argument("--frames", type=int, default=49, help="of a clip (49)")
    clips.add_argument("--step", type=int, default=24, help="frames between the beginnings of clips (24)")
    clips.add_argument("--piece-frames", type=int, default=121, help="recovered together, at most (121)")
    clips.add_argument("--size", type=int, nargs=2, default=(288, 512), metavar=("HEIGHT", "WIDTH"), help="(288 512)")
    parser.epilog = "e.g. merope data from-videos footage/ --out drives --camera-height 1.3"
    parser.set_defaults(run=_from_videos, if_stopped="; finished pieces are kept, run the same command to go on")


def _from_videos(options: argparse.Namespace) -> int:
    require_files(options, "--speed-logs", "--lens", "--checkpoint", "--estimates")
    from merope.datasets.footage_pieces import FromVideos
    from merope.datasets.from_videos import training_set
    from merope.errors import invalid
    from merope.evaluate.recover import EstimatorChoice, built

    if not options.videos.is_dir():
        raise invalid("videos", "a folder", str(options.videos), "name the folder that the videos are in")
    height, width = options.size
    settings = FromVideos(
        fps=options.fps,
        frames=options.frames,
        step=options.step,
        piece_frames=max(options.piece_frames, options.frames),
        height=height,
        width=width,
        speed_m_s=options.speed,
        speed_logs=options.speed_logs,
        camera_height_m=options.camera_height,
    )
    choice = EstimatorChoice(options.estimator, options.checkpoint, options.check)
    lens = _lens(options)
    if options.estimates is None:
        built(choice)  # which is refused here if something is missing
    about = f"{options.estimates or choice.fingerprint()}, lens {options.lens or options.fov or 'estimated'}"

    def recover(piece: str, frames: "Tensor", known: "Lens | None") -> "PoseEstimate | None":
        return _recovered(choice, options.estimates, piece, frames, known)

    calibrate = options.estimates is None
    records = training_set(options.videos, options.out, settings, recover, lens, about, calibrate)
    left_out = [record for record in records if not record["kept"]]
    for record in left_out:
        print(f"left out {record['piece']}: {record['reason']}")
    clips = {name: len((options.out / name).read_text().splitlines()) for name in ("train.jsonl", "val.jsonl")}
    print(f"kept {len(records) - len(left_out)} of {len(records)} pieces in {options.out}")
    print(f"{clips['train.jsonl']} clips in train.jsonl, {clips['val.jsonl']} in val.jsonl; clusters in curation")
    return 1 if len(left_out) == len(records) else 0


def _lens(options: argparse.Namespace) -> "Lens | None":
    """The lens that was given. A field of view is that of the first video; all have to be like it."""
    from merope.datasets.from_videos import size_of_videos
    from merope.errors import invalid
    from merope.formats import read
    from merope.generate.camera_path import lens_of_fov

    if options.fov is not None:
        return lens_of_fov(options.fov, 0.0, *size_of_videos(options.videos))
    if options.lens is None:
        return None
    lens = read(options.lens).lens
    if lens is None or lens.batch_shape:
        raise invalid(str(options.lens), "a pose file with one lens", "none, or several", "pass --fov DEGREES")
    return lens


def _recovered(
    choice: "EstimatorChoice", estimates: Path | None, piece: str, frames: "Tensor", lens: "Lens | None"
) -> "PoseEstimate | None":
    """The poses of a piece, checked by a second estimator; None where another program has not answered yet."""
    from dataclasses import replace

    from merope.evaluate.estimators.precomputed import PrecomputedEstimator
    from merope.evaluate.recover import built
    from merope.evaluate.trust import checked
    from merope.formats import read
    from merope.geometry.lens_batches import resized

    if estimates is None:
        estimate = built(choice)(frames, lens)
    else:
        folder = estimates / piece
        files = sorted(estimates.glob(f"{glob.escape(piece)}.*")) or ([folder] if folder.exists() else [])
        if not files:
            return None
        estimate = PrecomputedEstimator(files[0])(frames, lens)
        known = None if lens is not None else read(files[0]).lens  # for images of that program's size
        own = None if known is None else resized(known, frames.shape[2], frames.shape[1])
        estimate = replace(estimate, lens=own)
    second = choice.second
    seen = lens if lens is not None else estimate.lens
    return checked(estimate, frames, None if second is None else lambda: built(second)(frames, seen))

"""`merope drive`: what the user says, brought together with what an earlier run of the same drive was told."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merope.commands.models import add_path_options, key_and_value, seed, settings, user_path
from merope.errors import invalid

if TYPE_CHECKING:
    from merope.demo.driven_street import Street
    from merope.generate.drive_inputs import DriveConfig

FILES = ("trajectory", "lens", "prefix", "prefix_poses")
MAY_CHANGE = ("out", "resume", "device")
KINDS: dict[object, tuple[type, ...]] = {
    int: (int,),
    seed: (int,),
    float: (int, float),
    user_path: (str,),
    None: (str,),
}
"""How JSON keeps what the type of an option reads."""
SIZE, FPS = (288, 512), 12.0
OF_CLIP = (
    *("transformer", "trajectory_format", "assume_metric", "lens", "xi", "prefix", "prefix_frames"),
    *("prompt", "negative_prompt", "guidance", "seed", "dtype", "device"),
)
"""Options that a clip of `merope generate` has under the same name."""


def add_drive(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("where to")
    path = where.add_mutually_exclusive_group()
    path.add_argument("--keys", help='such as "w*40 a*10 w*40", one step per frame (docs/formats.md)')
    path.add_argument("--trajectory", type=user_path, help="pose file or folder of any length (docs/formats.md)")
    where.add_argument("--speed", type=float, default=8.0, metavar="M/S", help="of the keys w and s (8)")
    where.add_argument("--yaw-rate", type=float, default=15.0, metavar="DEGREES/S", help="of the keys a and d (15)")
    add_path_options(where)
    start = parser.add_argument_group("where from")
    first = start.add_mutually_exclusive_group()
    first.add_argument(
        "--prefix", type=user_path, help="video or folder of images whose first frames the drive continues"
    )
    first.add_argument("--world", type=int, metavar="N", help="a street of the demo, whose first frames are rendered")
    start.add_argument("--prefix-frames", type=int, default=9, help="how many of them, whole blocks: 9, 21, 33 … (9)")
    start.add_argument("--prefix-poses", type=user_path, metavar="FILE", help="with --keys: pose file of the prefix")
    start.add_argument("--resume", action="store_true", help="go on with the drive in --out; needs no other option")
    what = parser.add_argument_group("what")
    what.add_argument("--model", help="folder or hub id of a Wan model (with --world: the one in the package)")
    what.add_argument("--branch", help='folder or hub id of a camera branch, or "none" (with --world: in the model)')
    what.add_argument("--transformer", help="one that was trained whole, in place of the model's")
    what.add_argument("--prompt", help="text of the video; required if the model has a text encoder")
    what.add_argument("--negative-prompt", help="text to stay away from")
    what.add_argument("--size", type=int, nargs=2, metavar=("HEIGHT", "WIDTH"), help="288 512, or what the model knows")
    what.add_argument("--fps", type=float, help="of the video: 12, or what the model knows")
    what.add_argument(
        "--out", type=user_path, required=True, metavar="FOLDER", help="for the video and all that belongs to it"
    )
    how = parser.add_argument_group("how")
    how.add_argument("--window", type=int, default=12, help="latent frames that a block sees, its own 3 included (12)")
    how.add_argument("--sink", type=int, default=3, help="first latent frames that it sees besides (3)")
    how.add_argument(
        "--past-noise", type=float, default=0.0, metavar="LEVEL", help="level of noise on finished blocks (0)"
    )
    how.add_argument("--recall", type=int, default=0, metavar="N", help="older views of the same place, at most 3 (0)")
    how.add_argument("--steps", type=int, help="denoising steps of a block: what the model was trained for, or 50")
    how.add_argument("--guidance", type=float, help="scale of text guidance: 5, or 1 without a text encoder")
    how.add_argument("--seed", type=seed, default=0, help="of the noise (0)")
    how.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="(bfloat16 on a GPU)")
    how.add_argument("--device", help="such as cpu or cuda (cuda if there is one)")
    parser.epilog = "e.g. merope drive --world 4 --keys 'w*40' --out my-drive"
    stopped = "; finished blocks are kept, --resume goes on with them"
    parser.set_defaults(run=lambda options: _drive(options, parser._actions), if_stopped=stopped)


def _drive(options: argparse.Namespace, actions: Sequence[argparse.Action]) -> int:
    given = settings(options)
    if options.resume:
        given = _resumed(given, actions)
    else:
        _require(options)
    from merope.generate.drive_command import drive, resume
    from merope.generate.drive_inputs import route_from_files

    street = None
    if given["world"] is not None:
        from merope.demo.driven_street import Street

        street = Street.of(given["world"], given["model"])
    config = _config(given, street)
    if options.resume:
        folder = resume(config)
    else:
        settled = {"model": config.clip.model, "branch": config.clip.branch}
        recorded = {name: value for name, value in (given | settled).items() if name not in MAY_CHANGE}
        folder = drive(config, recorded, route_from_files if street is None else street.route)
    print(f"wrote {folder.folder}: video.mp4 of {folder.frames} frames, video.cameras.json, report.json")
    return 0


def _require(options: argparse.Namespace) -> None:
    """Refuse what is missing at once, before anything slow is imported."""
    for name in ("model", "branch"):
        if getattr(options, name) is None and options.world is None:
            raise invalid(f"--{name}", "given", "nothing", "pass it, or --world N for the model in the package")
    for name in FILES:
        path = getattr(options, name)
        if path is not None and not path.exists():
            raise invalid(f"--{name.replace('_', '-')}", "a file or folder that exists", path, "check the path")


def _resumed(given: dict[str, Any], actions: Sequence[argparse.Action]) -> dict[str, Any]:
    """What the drive in a folder was told when it began. Whoever says it again must say the same."""
    from merope.generate.drive_folder import PUT_BACK, REPORT, read_report

    file, defaults = given["out"] / REPORT, {action.dest: action.default for action in actions}
    try:
        recorded = read_report(given["out"])["command"]
    except FileNotFoundError:
        fix = "run the command without --resume, or check the folder"
        raise invalid("--resume", "used with the folder of a drive", f"{given['out']} without {REPORT}", fix) from None
    for action in actions:
        value = recorded.get(action.dest, action.default)  # of a drive that is older than the option
        if action.dest not in MAY_CHANGE and not _may_be_said(action, value):
            raise invalid(f"command.{action.dest} in {file}", "as the drive wrote it", repr(value)[:100], PUT_BACK)
    now = json.loads(json.dumps(given, default=str))
    for name, value in now.items():
        said = value != json.loads(json.dumps(defaults[name], default=str))
        before = recorded.get(name, defaults[name])
        is_same = (_settled(str(value)) if name in ("model", "branch") else value) == before
        if said and name not in MAY_CHANGE and not is_same:
            fix = "leave it out, or begin another drive in another folder"
            raise invalid(f"--{name.replace('_', '-')}", f"{before} as when the drive began", value, fix)
    paths = {name: Path(recorded[name]) for name in FILES if recorded.get(name) is not None}
    return {**defaults, **recorded, **paths, **{name: given[name] for name in MAY_CHANGE}}


def _may_be_said(action: argparse.Action, value: Any) -> bool:
    """Whether a value of a report is one that an option can have. Model and branch are always there."""
    if type(value) is type(action.default) and value == action.default and action.dest not in ("model", "branch"):
        return True
    if action.nargs == 0:
        return isinstance(value, bool)
    if action.type is key_and_value:
        pairs = value if isinstance(value, list) else [value]
        return all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs)
    if action.nargs is not None and not (isinstance(value, list) and len(value) == action.nargs):
        return False
    kinds = KINDS[action.type]
    is_listed = action.choices is None or value in action.choices
    return is_listed and all(type(each) in kinds for each in (value if action.nargs else [value]))


def _config(given: dict[str, Any], street: "Street | None") -> "DriveConfig":
    from merope.demo.given_paths import clip_options
    from merope.generate.drive_inputs import KEYS, DriveConfig
    from merope.generate.inputs import GenerateConfig

    chosen, known = dict(given), dict[str, Any]()
    if street is not None:
        chosen = street.filled_in(chosen)
    else:
        known = clip_options(Path(chosen["model"]).expanduser())
    height, width = chosen["size"] or (known.get("height", SIZE[0]), known.get("width", SIZE[1]))
    clip = GenerateConfig(
        model=_settled(chosen["model"]),
        branch=_settled(chosen["branch"]),
        trajectory=KEYS if chosen["trajectory"] is None else chosen["trajectory"],
        out=chosen["out"] / "video.mp4",
        trajectory_options=dict(chosen["trajectory_option"]),
        fov_deg=chosen["fov"],
        height=height,
        width=width,
        frames=1,
        fps=known.get("fps", FPS) if chosen["fps"] is None else chosen["fps"],
        steps=chosen["steps"],
        **{name: chosen[name] for name in OF_CLIP},
    )
    driving = {name: chosen[name] for name in ("keys", "prefix_poses", "window", "sink", "past_noise", "recall")}
    return DriveConfig(clip, speed_m_s=chosen["speed"], yaw_rate_deg_s=chosen["yaw_rate"], **driving)


def _settled(name: str) -> str:
    """A folder by its whole path, so that a drive goes on from anywhere; a hub id as it is."""
    folder = Path(name).expanduser()
    return str(folder.resolve()) if folder.is_dir() else name

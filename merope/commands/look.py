"""Commands to look at first: demo and studio drive the model that ships, growth and taxonomy measure encodings."""

import argparse
from pathlib import Path

from merope.commands.models import require_files, seed, settings, user_path
from merope.errors import invalid


def add_demo(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to drive")
    what.add_argument("--trajectory", type=user_path, help="pose file (docs/formats.md) in place of the three paths")
    what.add_argument("--assume-metric", action="store_true", help="the path is in metres, whatever its format says")
    what.add_argument("--lens", choices=("pinhole", "fisheye"), default="pinhole", help="of every camera (pinhole)")
    what.add_argument("--world", type=int, help="number of a street that no model was trained on (4)")
    how = parser.add_argument_group("how")
    how.add_argument("--model", type=user_path, help="pipeline folder with a branch/ inside (the one in the package)")
    how.add_argument("--steps", type=int, help="denoising steps (what the model's clips.json names)")
    how.add_argument("--seed", type=seed, default=0, help="of the noise; the paths share it (0)")
    how.add_argument("--device", default="auto", help="such as cpu or cuda (%(default)s: cuda if there is one)")
    how.add_argument("--out", type=user_path, default=Path("outputs/demo"), help="for what is made (outputs/demo)")
    parser.epilog = "e.g. merope demo --trajectory path.json --world 7"
    parser.set_defaults(run=_demo, if_stopped="; nothing was written")


def _demo(options: argparse.Namespace) -> int:
    require_files(options, "--trajectory", "--model")
    from merope.demo.drive import DemoConfig, run, table

    drives = run(DemoConfig(**{key: value for key, value in settings(options).items() if value is not None}))
    print(table(drives))
    print(
        f"wrote {options.out}: demo.mp4, demo.webp, report.html, poster.png, results.json; "
        "bare clips and their cameras in clips/"
    )
    return 0


def add_studio(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to drive")
    what.add_argument(
        "--model",
        type=user_path,
        action="append",
        help="pipeline folder with a clips.json inside (the one in the package); again for each that pages can choose",
    )
    what.add_argument("--branch", type=user_path, help="camera branch of the one model (branch/ in the model's folder)")
    what.add_argument("--steps", type=int, help="denoising steps (those of the model's clips.json, at most 6 a block)")
    what.add_argument("--seed", type=seed, help="of the noise (0)")
    what.add_argument("--prompt", help="text that pages begin with, for models with a text encoder")
    what.add_argument("--device", help="such as cpu or cuda (cuda if there is one)")
    where = parser.add_argument_group("where to serve")
    where.add_argument("--host", default="127.0.0.1", help="address (%(default)s: nobody else can reach it)")
    where.add_argument("--port", type=int, default=8642, help="0 takes any that is free (%(default)s)")
    where.add_argument("--token", help="what the page's address must contain; needed with any other host")
    parser.epilog = "e.g. merope studio --model outputs/world/merope-seed0/trained"
    parser.set_defaults(run=_studio)


def _studio(options: argparse.Namespace) -> int:
    require_files(options, "--model", "--branch")
    from merope.studio.guard import Access
    from merope.studio.serve import StudioConfig, serve
    from merope.studio.studio_model import ModelChoice

    given = settings(options)
    access, port = Access(given.pop("host"), given.pop("token")), given.pop("port")
    folders = given.pop("model") or [ModelChoice.model]
    if given["branch"] is not None and len(folders) > 1:
        fix = "leave it out: each model has its own in branch/"
        raise invalid("--branch", "given with one model", f"{len(folders)} models", fix)
    chosen = {name: value for name, value in given.items() if value is not None}
    serve(StudioConfig(tuple(ModelChoice(model=folder, **chosen) for folder in folders), access, port))
    return 0


def add_growth(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=user_path, default=Path("outputs/growth"), help="for pictures (outputs/growth)")
    parser.epilog = "e.g. merope growth --out outputs/growth"
    parser.set_defaults(run=_growth)


def _growth(options: argparse.Namespace) -> int:
    from merope.formats.writing import require_writable
    from merope.paper.growth import run

    require_writable("--out", options.out)
    run(options.out)
    return 0


def add_taxonomy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON instead of the table")
    parser.epilog = "e.g. merope taxonomy --json"
    parser.set_defaults(run=_taxonomy)


def _taxonomy(options: argparse.Namespace) -> int:
    from merope.draw.progress import ProgressLine
    from merope.paper.taxonomy import MEASURED, as_json, measure, table

    rows, progress = [], ProgressLine("measuring", len(MEASURED), "encodings")
    for name in MEASURED:
        rows.append(measure(name))
        progress.show(len(rows))
    print(as_json(rows) if options.json else table(rows))
    return 0 if all(row.agrees_with_paper for row in rows) else 1

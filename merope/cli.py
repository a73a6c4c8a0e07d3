"""The `merope` command: parse, call, print. Heavy imports happen inside commands."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="merope", description="Drive a video model with a camera path in metres.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    demo = commands.add_parser("demo", help="measure and draw what camera encodings do as the baseline grows")
    demo.add_argument("--out", type=Path, default=Path("outputs/demo"), help="folder for pictures and numbers")
    taxonomy = commands.add_parser("taxonomy", help="measure the paper's table of encodings; exit 1 on a contradiction")
    taxonomy.add_argument("--json", action="store_true", help="print the numbers as JSON instead of the table")
    options = parser.parse_args(arguments)
    return {"demo": _demo, "taxonomy": _taxonomy}[options.command](options)


def _demo(options: argparse.Namespace) -> int:
    from merope.demo import run

    run(options.out)
    return 0


def _taxonomy(options: argparse.Namespace) -> int:
    from merope.taxonomy import PAPER, as_json, measure, table

    rows = []
    for count, name in enumerate(PAPER, start=1):
        print(f"measuring {name} ({count} of {len(PAPER)})", end="\r", file=sys.stderr, flush=True)
        rows.append(measure(name))
    print(as_json(rows) if options.json else table(rows))
    return 0 if all(row.agrees_with_paper for row in rows) else 1

"""The `merope` command: parse, call, print. Heavy imports happen inside commands."""

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command line."""
    parser = argparse.ArgumentParser(prog="merope", description="Drive a video model with a camera path in metres.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    demo = commands.add_parser("demo", help="measure and draw what camera encodings do as the baseline grows")
    demo.add_argument("--out", type=Path, default=Path("outputs/demo"), help="folder for pictures and numbers")
    options = parser.parse_args(arguments)
    if options.command == "demo":
        from merope.demo import run

        run(options.out)

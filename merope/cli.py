"""The `merope` command: parse, call, print. Heavy imports happen inside commands."""

import argparse
import os
import select
import sys
from collections.abc import Callable, Sequence

import merope
from merope.commands.bench import add_bench
from merope.commands.data import add_cache, add_curate, add_synth
from merope.commands.driving import add_drive
from merope.commands.evaluation import add_evaluate, add_fidelity
from merope.commands.footage import add_from_videos
from merope.commands.look import add_demo, add_growth, add_studio, add_taxonomy
from merope.commands.models import add_analyse, add_generate, add_train
from merope.commands.paths import add_path

UNREAD = 141
"""The status of a program whose output nobody reads any more, as shells have it."""
EXTRAS = {
    **dict.fromkeys(("diffusers", "transformers", "accelerate", "ftfy"), "wan"),
    **dict.fromkeys(("av", "PIL", "scipy", "sklearn", "threadpoolctl", "numba"), "data"),
    **dict.fromkeys(("cv2", "pycolmap"), "eval"),
    "matplotlib": "plot",
    "pyarrow": "tables",
    **dict.fromkeys(("starlette", "uvicorn", "wsproto"), "studio"),
}
"""Modules that commands import and the core does without, and the extra of pyproject.toml that brings each."""


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="merope", description="Drive a video model with a camera path in metres.")
    parser.add_argument("--version", action="version", version=f"merope {merope.__version__}")
    parser.set_defaults(if_stopped="")  # what a command keeps or leaves when Ctrl-C ends it
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    add_demo(commands.add_parser("demo", help="drive the model that ships along three paths, or yours, and measure it"))
    add_studio(commands.add_parser("studio", help="a page on which one drives with the arrow keys, or draws paths"))
    add_growth(commands.add_parser("growth", help="measure and draw what camera encodings do as the baseline grows"))
    add_taxonomy(commands.add_parser("taxonomy", help="measure the paper's table of encodings; exit 1 if it differs"))
    add_curate(commands.add_parser("curate", help="cluster trajectories, keep prototypes, write a manifest"))
    add_path(commands.add_parser("path", help="make a camera path from a few numbers, or convert one"))
    add_generate(commands.add_parser("generate", help="a trajectory, a prompt and first frames to a video"))
    add_drive(
        commands.add_parser("drive", help="a path of any length, or keys, to a video that grows; --resume goes on")
    )
    add_analyse(commands.add_parser("analyse", help="what a camera branch does in a model: two pictures and numbers"))
    add_evaluate(commands.add_parser("evaluate", help="how well videos follow their camera paths; a report page"))
    add_fidelity(commands.add_parser("fidelity", help="FID and FVD of videos against reference videos"))
    add_train(commands.add_parser("train", help="train a camera branch; the same command goes on after a stop"))
    add_bench(commands.add_parser("bench", help="measure encodings"))
    data = commands.add_parser("data", help="make or look at data").add_subparsers(required=True, metavar="what")
    add_cache(data.add_parser("cache", help="encode frames and captions of a training config once, to disk"))
    add_synth(data.add_parser("synth", help="write a small data set of the procedural world in a real one's layout"))
    add_from_videos(data.add_parser("from-videos", help="videos without poses to a training set in metres"))
    return parser


def _nobody_reads() -> bool:
    """Whether the reader of what is printed has gone, as in `merope train --list | head -1`. The rest is dropped."""
    stdout = select.poll()
    stdout.register(sys.stdout, 0)
    if not any(event & select.POLLERR for _, event in stdout.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain at its end
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command line; returns the exit status."""
    options = command_parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        status = run(options)
        sys.stdout.flush()
        return status
    except (ValueError, OSError) as error:  # something to be mended by the user, not a fault of the program
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return UNREAD
        print(f"merope: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        print(f"merope: {module} is not installed: pip install 'merope[{EXTRAS[module]}]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nmerope: stopped{options.if_stopped}", file=sys.stderr)
        return 130

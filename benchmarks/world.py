"""Rows of the world benchmark one after another, or a few at once, as many as fit into some minutes.

    python benchmarks/world.py --rows none gta merope --seeds 0 1 --minutes 9 --results benchmarks/results/world
    merope bench table benchmarks/results/world --out docs/world-benchmark.md

    python benchmarks/world.py --benchmark miniature --rows ucpe merope direction-phases --seeds 0 1 2
    merope bench table benchmarks/results/miniature --benchmark miniature --out docs/miniature-benchmark.md

Poses are recovered in other processes while the next row is trained: those of every row's own test before those of any
sweep. A test is written into the results folder within a second after it is scored. When the time is over the row in
training writes a checkpoint, and the same command goes on from there; so it does after SIGTERM or Ctrl-C. Rows that are
in the results folder already are left alone; tests that they lack (`--stretch`) are added if the weights are still
there. Give a minute or two less than there are: what was generated is still scored. A step leaves a large GPU idle
while its launches are prepared: `--at-once 3` trains three rows in three processes, and `--set
data.keep_renders=FOLDER` has them render the worlds of a seed once for all.

Poses take longer than training. `--until generated` leaves them out; copy the rows' generated*.safetensors to a machine
with cores, in folders of the same names, and run the command there with `--score-only`. Without `--rows` it scores what
is there.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from signal import SIGINT, SIGTERM, signal

CONFIGS = Path(__file__).parents[1] / "configs"
TRAINING_MINUTES, A_WEEK_MINUTES = 9.0, 7 * 24 * 60.0


def main() -> None:
    """Make what is missing, in as many processes as wanted; each takes the next row that no other has."""
    parser = argparse.ArgumentParser(description="rows of the world benchmark")
    parser.add_argument(
        "--benchmark", choices=("world", "miniature"), default="world", help="folder of configs (world)"
    )
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="names of configs in that folder; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    over = f"after which training is stopped ({TRAINING_MINUTES:g}); with --score-only, scoring"
    parser.add_argument("--minutes", type=float, help=over)
    parser.add_argument("--results", type=Path, help="(benchmarks/results/BENCHMARK)")
    parser.add_argument("--stretch", nargs="+", type=float, default=[], help="also test on paths so many times as long")
    parser.add_argument("--worlds", type=int, default=32)
    parser.add_argument("--at-once", type=int, default=1, help="rows that are trained at the same time")
    parser.add_argument("--workers", type=int, default=8, help="processes that recover poses, of each that trains")
    parser.add_argument("--until", choices=("generated", "scored"), default="scored", help="how far to go (scored)")
    parser.add_argument("--score-only", action="store_true", help="score videos that another machine generated")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of every config")
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)  # a process that another one started
    options = parser.parse_args()
    options.results = options.results or Path("benchmarks/results") / options.benchmark
    if options.at_once > 1 and not options.beside:
        run_beside(options.at_once, [sys.executable, *sys.argv, "--beside"])
        return
    try:
        make_rows(options)
    except ValueError as error:  # something to be mended by the user, not a fault of the program
        sys.exit(str(error))


def run_beside(processes: int, command: list[str]) -> None:
    """Run a command so many times at once, and stay until all are gone. SIGTERM and Ctrl-C reach every one as SIGTERM.

    It is repeated, as at the end of the time: a training loop in its last step would forget it. A second Ctrl-C of a
    terminal ends the others at once by itself.
    """
    asked: list[int] = []
    for number in (SIGINT, SIGTERM):
        signal(number, lambda number, frame: asked.append(number))
    started = [subprocess.Popen(command) for _ in range(processes)]
    while any(process.poll() is None for process in started):
        for process in started if asked else ():
            process.terminate()
        time.sleep(1.0 if asked else 0.2)
    stopped = (0, -SIGTERM, -SIGINT) if asked else (0,)  # who was not training when the signal came may die of it
    if failed := sum(process.returncode not in stopped for process in started):
        sys.exit(f"{failed} of {processes} processes failed; what they say is above")


def make_rows(options: argparse.Namespace) -> None:
    """The rows that this process gets."""
    from merope.bench.generated import benchmark_tests, generated_file, is_generated
    from merope.bench.groups import BENCHMARKS
    from merope.bench.result_files import is_scored
    from merope.bench.rows import run_rows, time_limit
    from merope.bench.scorer import Scorer
    from merope.bench.scores import with_seed
    from merope.bench.scoring_pool import scoring_pool
    from merope.errors import invalid
    from merope.train.config import TrainConfig
    from merope.train.toml_config import read_config

    if options.score_only and options.at_once > 1:
        raise invalid("--at-once", "1 with --score-only", options.at_once, "give it more --workers")
    every = [row for rows in BENCHMARKS[options.benchmark].values() for row in rows]
    for row in options.rows or ():
        if row not in every:
            raise invalid("--rows", f"some of {', '.join(every)}", row, "name a row of the benchmark")
    names = options.rows or every
    tests = benchmark_tests(options.worlds, options.stretch)
    changes = [*options.set, "run.keep_checkpoints=1"]
    rows = [read_config(TrainConfig, CONFIGS / options.benchmark / f"{name}.toml", changes) for name in names]
    configs = [with_seed(config, seed) for seed in options.seeds for config in rows]
    if options.score_only and options.rows is None:
        configs = [config for config in configs if generated_file(config, tests[0]).exists()]

    def is_done(config: TrainConfig) -> bool:
        is_there = options.until == "generated" and all(is_generated(config, test) for test in tests)
        return is_there or is_scored(config, tests, options.results)

    with time_limit(60.0 * time_minutes(options)) as is_over, scoring_pool(options.workers) as pool:
        scorer, has_failed = Scorer(pool, options.results), True
        try:
            run_rows(
                configs,
                tests,
                scorer,
                options.until,
                is_over,
                is_done,
                options.score_only,
                rows_at_once=options.at_once,
            )
            has_failed = False
        finally:
            if options.until == "scored":
                wrote = ", ".join(f"{result['row']} seed {result['seed']}" for result in scorer.written)
                print("wrote", wrote or "no row")
            left = sum(not is_done(config) for config in configs)
            advice = "; the same command goes on from there" if left and not has_failed else ""
            print(f"{left} of {len(configs)} rows are left{advice}")


def time_minutes(options: argparse.Namespace) -> float:
    """How long it may take; scores alone take as long as they take, where nothing else is said."""
    if options.minutes is not None:
        return float(options.minutes)
    return A_WEEK_MINUTES if options.score_only else TRAINING_MINUTES


if __name__ == "__main__":
    main()

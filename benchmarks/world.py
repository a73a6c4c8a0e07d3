"""Rows of the world benchmark one after another, or a few at once, as many as fit into some minutes.

    python benchmarks/world.py --rows none gta merope --seeds 0 1 --minutes 9 --results benchmarks/results/world
    merope bench table benchmarks/results/world --out docs/world-benchmark.md

Poses are recovered in other processes while the next row is trained. When the time is over the row in training writes a
checkpoint, and the same command goes on from there; rows that are in the results folder already are left alone. Give a
minute or two less than there are: what was generated is still scored. A step leaves a large GPU idle while its launches
are prepared: `--at-once 3` trains three rows in three processes, and `--set data.keep_renders=FOLDER` has them render
the worlds of a seed once for all.
"""

import argparse
import subprocess
import sys
from functools import partial
from pathlib import Path

from merope.bench.world import benchmark_tests
from merope.bench.world_rows import Scorer, is_scored, run_rows, scoring_pool, time_limit
from merope.bench.world_scores import with_seed
from merope.bench.world_table import GROUPS
from merope.train.config import TrainConfig
from merope.train.toml_config import read_config

CONFIGS = Path(__file__).parents[1] / "configs" / "world"
ROWS = [row for rows in GROUPS.values() for row in rows]


def main() -> None:
    """Make what is missing, in as many processes as wanted; each takes the next row that no other has."""
    parser = argparse.ArgumentParser(description="rows of the world benchmark")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--minutes", type=float, default=9.0, help="after which training is stopped")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/world"))
    parser.add_argument("--stretch", nargs="+", type=float, default=[], help="also test on paths so many times as long")
    parser.add_argument("--worlds", type=int, default=32)
    parser.add_argument("--at-once", type=int, default=1, help="rows that are trained at the same time")
    parser.add_argument("--workers", type=int, default=8, help="processes that recover poses, of each that trains")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of every config")
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)  # a process that another one started
    options = parser.parse_args()
    others = 0 if options.beside else options.at_once - 1
    started = [subprocess.Popen([sys.executable, *sys.argv, "--beside"]) for _ in range(others)]
    try:
        make_rows(options)
    finally:
        failed = [process.args for process in started if process.wait() != 0]
    if failed:
        sys.exit(f"{len(failed)} of {options.at_once} processes failed; what they say is above")


def make_rows(options: argparse.Namespace) -> None:
    """The rows that this process gets."""
    tests = benchmark_tests(options.worlds, options.stretch)
    changes = [*options.set, "run.keep_checkpoints=1"]
    rows = {row: read_config(TrainConfig, CONFIGS / f"{row}.toml", changes) for row in options.rows}
    configs = [with_seed(config, seed) for seed in options.seeds for config in rows.values()]
    with scoring_pool(options.workers) as pool, time_limit(60.0 * options.minutes) as is_over:
        scorer = Scorer(pool, options.results, options.at_once)
        made = partial(is_scored, tests=tests, results=options.results)
        run_rows(configs, tests, scorer, is_over=is_over, is_made=made)
    print("wrote", ", ".join(f"{result['row']} seed {result['seed']}" for result in scorer.written) or "no row")
    left = sum(not is_scored(config, tests, options.results) for config in configs)
    print(f"{left} of {len(configs)} rows are left" + ("; the same command goes on from there" if left else ""))


if __name__ == "__main__":
    main()

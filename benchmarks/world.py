"""Rows of the world benchmark one after another in one process, as many as fit into some minutes.

    python benchmarks/world.py --rows none gta merope --seeds 0 1 --minutes 9 --results benchmarks/results/world
    merope bench table benchmarks/results/world --out docs/world-benchmark.md

Poses are recovered in other processes while the next row is trained. When the time is over the row in training writes a
checkpoint, and the same command goes on from there; rows that are in the results folder already are left alone. Give a
minute or two less than there are: what was generated is still scored.
"""

import argparse
from pathlib import Path

from merope.bench.world import WorldTest
from merope.bench.world_rows import Scorer, is_scored, run_rows, scoring_pool, time_limit
from merope.bench.world_scores import with_seed
from merope.bench.world_table import GROUPS
from merope.train.config import TrainConfig
from merope.train.toml_config import read_config

CONFIGS = Path(__file__).parents[1] / "configs" / "world"
ROWS = [row for rows in GROUPS.values() for row in rows]


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description="rows of the world benchmark, one after another")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--minutes", type=float, default=9.0, help="after which training is stopped")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/world"))
    parser.add_argument("--stretch", nargs="+", type=float, default=[], help="also test on paths so many times as long")
    parser.add_argument("--worlds", type=int, default=32)
    parser.add_argument("--workers", type=int, default=8, help="processes that recover poses")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of every config")
    options = parser.parse_args()
    tests = [WorldTest(options.worlds, stretch=stretch) for stretch in (1.0, *options.stretch)]
    changes = [*options.set, "run.keep_checkpoints=1"]
    rows = {row: read_config(TrainConfig, CONFIGS / f"{row}.toml", changes) for row in options.rows}
    configs = [with_seed(config, seed) for seed in options.seeds for config in rows.values()]
    missing = [config for config in configs if not is_scored(config, tests, options.results)]
    print(f"{len(configs) - len(missing)} of {len(configs)} rows are done", flush=True)
    with scoring_pool(options.workers) as pool, time_limit(60.0 * options.minutes) as is_over:
        scorer = Scorer(pool, options.results)
        finished = run_rows(missing, tests, scorer, is_over=is_over)
    print("wrote", ", ".join(f"{result['row']} seed {result['seed']}" for result in scorer.written) or "no row")
    print("all rows are done" if finished else "time is over; the same command goes on from there")


if __name__ == "__main__":
    main()

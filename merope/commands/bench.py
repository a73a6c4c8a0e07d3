"""Commands that measure encodings: bench world, bench table."""

import argparse
import sys

from merope.commands.models import add_config, require_config, seed, user_path


def add_bench(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "e.g. merope bench world world/merope --results outputs/world"
    commands = parser.add_subparsers(required=True, metavar="what")
    add_world(commands.add_parser("world", help="train an encoding on procedural worlds and measure its control"))
    add_table(commands.add_parser("table", help="tables of the world benchmark from the results of its rows"))


def add_world(parser: argparse.ArgumentParser) -> None:
    add_config(parser, "TOML file, or the name of one in the package, such as world/merope")
    parser.add_argument("--seed", type=seed, default=0, help="of weights, worlds and noise; names the folder (0)")
    parser.add_argument("--worlds", type=int, default=32, help="unseen worlds, three paths each (32)")
    longer = "also test on paths so many times as long, in half of the worlds"
    parser.add_argument("--stretch", type=float, nargs="+", default=[], metavar="FACTOR", help=longer)
    parser.add_argument("--workers", type=int, default=2, help="processes that recover poses (2)")
    copied = (
        "folder that gets a copy of the scores, for the table, and what figures need; "
        "other tests of the same weights stay in its file"
    )
    parser.add_argument("--results", type=user_path, metavar="DIR", help=copied)
    stage = "how far to go (scored); later stages pick up what earlier ones left in the folder"
    parser.add_argument("--until", choices=("trained", "generated", "scored"), default="scored", help=stage)
    score = "score videos that another machine generated: of its folder generated*.safetensors are enough"
    parser.add_argument("--score-only", action="store_true", help=score)
    parser.epilog = "e.g. merope bench world world/merope --seed 1 --results outputs/world"
    parser.set_defaults(run=_world, if_stopped="; finished stages are kept, the same command goes on after them")


def _world(options: argparse.Namespace) -> int:
    require_config(options.config)
    from merope.bench.generated import benchmark_tests
    from merope.bench.measured_rows import Row
    from merope.bench.rows import run_rows
    from merope.bench.scorer import Scorer
    from merope.bench.scores import with_seed
    from merope.bench.scoring_pool import scoring_pool
    from merope.bench.table import group_table
    from merope.train.config import TrainConfig
    from merope.train.toml_config import read_config

    config = with_seed(read_config(TrainConfig, options.config, options.set), options.seed)
    tests = benchmark_tests(options.worlds, options.stretch)
    with scoring_pool(options.workers) as pool:
        scorer = Scorer(pool, options.results)
        finished = run_rows([config], tests, scorer, options.until, score_only=options.score_only)
    if not finished:
        why = "stopped, or another process is making the row"
        print(f"merope: {why}; the same command goes on from there", file=sys.stderr)
        return 130
    for result in scorer.written:
        print(group_table([Row(result["row"], {result["seed"]: result})], against=None))
    print(f"wrote {config.run.out}")
    return 0


def add_table(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=user_path, metavar="DIR", help="folder of merope bench world --results")
    parser.add_argument("--against", metavar="ROW", help="row that the others are compared with (merope)")
    parser.add_argument(
        "--out", type=user_path, metavar="FILE.md", help="new file, or page with markers, for the tables"
    )
    listed = "whose rows are listed: those of configs/world or of configs/miniature (world)"
    parser.add_argument("--benchmark", choices=("world", "miniature"), default="world", help=listed)
    parser.epilog = "e.g. merope bench table outputs/world --against merope"
    parser.set_defaults(run=_table)


def _table(options: argparse.Namespace) -> int:
    from merope.bench.groups import BENCHMARKS
    from merope.bench.table import read_rows, tables, write_tables
    from merope.errors import invalid

    rows, against = read_rows(options.results), options.against
    if against is not None and against not in rows:
        raise invalid("--against", f"a row of {options.results}", repr(against), f"it has {', '.join(rows)}")
    text = tables(rows, against or "merope", BENCHMARKS[options.benchmark])
    if options.out is None:
        print(text)
    else:
        write_tables(text, options.out)
        print(f"wrote {options.out}")
    return 0

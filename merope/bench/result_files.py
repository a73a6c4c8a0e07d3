"""Results files of the world benchmark: what they say, and when a new measurement may be added to one.

All tests of a file are of the same weights, and none is ever lost.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from merope.bench.generated import weights_of
from merope.bench.run_facts import about_clips
from merope.errors import invalid
from merope.train.config import TrainConfig
from merope.train.provenance import provenance, steps_done
from merope.world.commanded import WorldTest

Result = Mapping[str, Any]

SCORING = 2
"""Raised when the same frames get other scores: floors that were kept are then measured again."""

UNSAID_SCORING = 2
"""That of results files which do not say theirs."""

SAME_RUN = ("row", "seed", "steps", "batch_size", "parameters", "commit", "trained_s", "final_loss", "validation_loss")
"""What tells one run from another in results files which do not say the digest of their weights."""


def parts_of(result: Result) -> list[Result]:
    """The tests of a results file: the benchmark's own, then the sweep."""
    return [result, *result["sweep"]]


def results_file(config: TrainConfig, results: Path) -> Path:
    """Where a row lies in a results folder."""
    return results / f"{config.run.out.name}.json"


def is_scored(config: TrainConfig, tests: Sequence[WorldTest], results: Path) -> bool:
    """Whether a results folder has this row: as long a training on the same clips, and all tests of it."""
    row = read_result(results_file(config, results))
    if row is None:
        return False
    found = [part["test"] for part in parts_of(row)]
    same = {"steps": config.run.steps, "batch_size": config.run.batch_size, "data": about_clips(config)}
    return all(row[key] == value for key, value in same.items()) and all(asdict(test) in found for test in tests)


def known_floor(config: TrainConfig, test: WorldTest, results: Path) -> dict[str, Any] | None:
    """The floor of a test in the results of any row: it depends on clips and test alone, and takes minutes of cores."""
    for file in sorted(results.glob("*-seed*.json")):
        with suppress(ValueError):  # a damaged file, which is refused where it is needed itself
            result = read_result(file) or {}
            for part in parts_of(result) if result.get("data") == about_clips(config) else ():
                if part["test"] == asdict(test) and part.get("scoring", UNSAID_SCORING) == SCORING:
                    return dict(part["rows"]["floor"])
    return None


def check_nothing_is_trained_again(config: TrainConfig, results: Path | None) -> None:
    """Refuse to train a row that has results: those of another training may neither join nor replace them."""
    done, wanted = steps_done(config), config.run.steps
    files = {config.run.out / "scores.json": 1}  # a longer run in the same folder replaces its own
    if results is not None:
        files[results_file(config, results)] = wanted
    for file, least in files.items():
        result = read_result(file)
        if result is not None and done < least:
            what = ", ".join(f"×{part['test']['stretch']:g}" for part in parts_of(result))
            got = f"{what} of {result['steps']:,} steps, while {config.run.out} has {done:,} of {wanted:,} steps"
            raise left_alone(file, got)


def left_alone(file: Path, got: str) -> ValueError:
    """The error for a results file that must not be overwritten."""
    fix = (
        "it was left as it is, and nothing was trained; bring the folder of its run back to add tests to it, "
        "or move it away or name another results folder to make the row anew"
    )
    return invalid(str(file), "absent, or made from the weights of this run with the same test", got, fix)


def read_result(file: Path) -> dict[str, Any] | None:
    """A results file, None where there is none."""
    if not file.exists():
        return None
    try:
        result: dict[str, Any] = json.loads(file.read_text())
        lacking = [key for key in ("test", "rows", "clips") for part in parts_of(result) if key not in part]
        problem = f"no {lacking[0]}" if lacking else ""
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise invalid(str(file), "results of merope bench world", problem, "the file is damaged: move it away")
    return result


def what_differs(before: Mapping[str, Any], config: TrainConfig, tests: Sequence[WorldTest]) -> str:
    """Why tests of a row's trained weights may not be added to its results file; empty if they may."""
    weights, asked = weights_of(config), {test.stretch: asdict(test) for test in tests}
    if before["data"] != about_clips(config):
        return f"clips like {before['data']}, not {about_clips(config)}"
    now = provenance(config)
    is_same_run = now["trained_s"] is not None and all(before.get(key) == now[key] for key in SAME_RUN)
    for part in parts_of(before):
        stretch = part["test"]["stretch"]
        wanted = asdict(tests[0]) if part is before else asked.get(stretch)
        if part.get("weights", weights if is_same_run else "") != weights:
            return f"×{stretch:g} of other weights"
        if wanted is not None and part["test"] != wanted:
            return f"×{stretch:g} tested with {part['test']}, not {wanted}"
        if wanted is None and part.get("scoring", UNSAID_SCORING) != SCORING:
            return f"×{stretch:g} with scores of another version (name it after --stretch to score it again)"
    return ""


def put_together(
    about: Mapping[str, Any],
    parts: Sequence[Mapping[str, Any]],  # of the benchmark's own test, then of its sweep
    earlier: Iterable[Mapping[str, Any]],  # results of the same weights, see what_differs
) -> dict[str, Any]:
    """What a results file says: the tests that were just made, and earlier ones that were not made again.

    What it says of the training stays: as many rows as are tested at once need not have been trained at once.
    """
    plain, sweep = dict(about), dict[float, Mapping[str, Any]]()
    for result in earlier:
        plain |= {key: value for key, value in result.items() if key not in parts[0]}
        sweep |= {part["test"]["stretch"]: part for part in result["sweep"]}
    sweep |= {part["test"]["stretch"]: part for part in parts[1:]}
    return plain | dict(parts[0]) | {"sweep": [sweep[stretch] for stretch in sorted(sweep)]}

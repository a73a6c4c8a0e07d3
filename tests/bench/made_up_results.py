"""Results files with numbers from dice, to try tables and pictures on."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from merope.world.commanded import FIRST_TEST_SEED, MANOEUVRES

FLOOR = {"failed_frames": 3, "frames": 312, "values": {}} | {
    "values": {name: {"mean": 0.125, "low": 0.1, "high": 0.2, "count": 24} for name in ("rot_deg", "metric_tr_percent")}
    | {"cammc": {"mean": 0.07, "low": 0.06, "high": 0.08, "count": 24}}
}


def write_result(
    folder: Path,
    row: str,
    seed: int,
    level: float,  # of every error
    stretches: tuple[float, ...] = (1.0,),
    worlds: int = 8,
    **changes: Any,
) -> dict[str, Any]:
    """A row whose errors are `level` × the difficulty of a world, which all rows share, with a little noise."""
    parts = [_test(row, seed, level * stretch, stretch, worlds) for stretch in stretches]
    about = {"row": row, "seed": seed, "steps": 3000, "batch_size": 48, "data": {"fov_deg": [70.0, 70.0]}}
    about["validation_loss"] = level / 20
    result = about | parts[0] | {"sweep": parts[1:]} | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{row}-seed{seed}.json").write_text(json.dumps(result))
    return result


def _test(row: str, seed: int, level: float, stretch: float, worlds: int) -> dict[str, Any]:
    own = np.random.default_rng([seed, *row.encode()])
    difficulty = np.random.default_rng(0).uniform(0.5, 1.5, worlds)
    clips = {}
    for world in range(worlds):
        for manoeuvre in MANOEUVRES:
            error = float(level * difficulty[world] * own.uniform(0.9, 1.1))
            numbers = dict.fromkeys(("rot_deg", "metric_tr_percent", "cammc", "ate_m"), error)
            numbers |= {"auc_10": 100.0 - error, "psnr_db": 20.0 - error, "lens": "pinhole-like"}
            clips[f"world-{world}-{manoeuvre}"] = {"world": FIRST_TEST_SEED + world, "manoeuvre": manoeuvre} | numbers
    generated = {"all": {"failed_frames": 2, "frames": 39 * worlds}}
    test = {"worlds": worlds, "turn_deg": 30.0, "steps": 30, "stretch": stretch}
    return {"test": test, "rows": {"generated": generated, "floor": {"all": FLOOR}}, "clips": clips}

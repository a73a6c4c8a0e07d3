"""Curation of 350,000 driving paths on this machine: seconds, and the picture of docs/curation.md.

    python benchmarks/curate.py [--paths 350000] [--clusters 256] [--suppression-m 1.0] [--seed 0]

A run with other options prints its numbers and leaves the stored files alone.
"""

import argparse
import json
import os
import resource
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from merope.curation.curate import Curation, Scope, curate, draw_curation, summary

PATHS, CLUSTERS, SUPPRESSION_M, SEED = 350_000, 256, 1.0, 0
POINTS, RATE_HZ = 49, 12.0
ROOT = Path(__file__).parents[1]


def unicycle_paths(count: int, seed: int) -> Tensor:  # [count, 49, 2] metres
    """Four seconds of driving each: mostly straight on, some turns, some standing; speed and yaw rate change midway."""
    random = np.random.default_rng(seed)
    turning = random.random(count) < 0.3
    start_m_s = random.gamma(3.0, 2.5, count) * (random.random(count) > 0.05)
    acceleration_m_s2 = random.normal(0.0, 1.0, count)
    yaw_rate_rad_s = random.normal(0.0, 1.0, (2, count)) * np.where(turning, 0.35, 0.03)
    time_s = np.arange(1, POINTS)[:, None] / RATE_HZ
    speed_m_s = np.clip(start_m_s + acceleration_m_s2 * time_s, 0.0, 25.0)
    blend = np.clip(time_s - 1.5, 0.0, 1.0)
    # Nobody turns at full rate and full speed: lateral acceleration stays below 4 m/s².
    limit_rad_s = 4.0 / np.maximum(speed_m_s, 4.0)
    yaw_rate = np.clip((1 - blend) * yaw_rate_rad_s[0] + blend * yaw_rate_rad_s[1], -limit_rad_s, limit_rad_s)
    yaw_rad = np.cumsum(yaw_rate / RATE_HZ, axis=0)
    steps = np.stack((np.sin(yaw_rad), np.cos(yaw_rad)), axis=-1) * (speed_m_s / RATE_HZ)[..., None]
    paths = np.concatenate((np.zeros((1, count, 2)), np.cumsum(steps, axis=0)))
    return torch.from_numpy(np.ascontiguousarray(paths.transpose(1, 0, 2)))


def measure(
    paths: Tensor, clusters: int, suppression_m: float, seed: int, scope: Scope
) -> tuple[Curation, dict[str, object]]:
    """One timed curation. The compiled kernels are warm, as in every run but the first on a machine."""
    curate(paths[:clusters], min(8, clusters), suppression_m, seed, scope)
    wall, cpu = time.perf_counter(), time.process_time()
    curation = curate(paths, clusters, suppression_m, seed, scope)
    row: dict[str, object] = {
        "scope": scope,
        "seconds": round(time.perf_counter() - wall, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "prototypes": summary(curation)["prototypes"],
        "occupied_clusters": summary(curation)["occupied_clusters"],
    }
    print(f"{scope:>8}: {row['seconds']} s, {row['cpu_seconds']} cpu-s, {row['prototypes']} prototypes")
    return curation, row


def main() -> None:
    """Run, print, and store what the page shows."""
    parser = argparse.ArgumentParser(description="curation of synthetic driving paths")
    parser.add_argument("--paths", type=int, default=PATHS)
    parser.add_argument("--clusters", type=int, default=CLUSTERS)
    parser.add_argument("--suppression-m", type=float, default=SUPPRESSION_M)
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    settings = (options.paths, options.clusters, options.suppression_m, options.seed)
    paths = unicycle_paths(options.paths, options.seed)
    by_cluster, first = measure(paths, *settings[1:], "cluster")
    _, second = measure(paths, *settings[1:], "global")
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"peak memory {peak_mib} MiB, of which the paths are {paths.numel() * 8 // 2**20} MiB")
    if settings != (PATHS, CLUSTERS, SUPPRESSION_M, SEED):
        return
    results = ROOT / "benchmarks" / "results" / "curate.json"
    results.parent.mkdir(exist_ok=True)
    names = ("paths", "clusters", "suppression_m", "seed")
    report = {**dict(zip(names, settings, strict=True)), "cores": os.cpu_count(), "peak_mib": peak_mib}
    results.write_text(json.dumps({**report, "rows": [first, second]}, indent=1) + "\n")
    print(f"wrote {results}")
    picture = ROOT / "docs" / "images" / "curation.png"
    draw_curation(by_cluster, paths, picture)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main()

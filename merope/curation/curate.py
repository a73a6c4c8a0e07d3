"""Curation of camera paths: clusters of similar motion, and prototypes that stand for near duplicates.

The paper groups candidate paths by k-means and filters them by non-maximum suppression at a Fréchet distance of 1 m;
training then draws uniformly across clusters (merope/datasets/sampler.py). It gives neither k nor the features nor the
order of suppression: docs/curation.md says what is chosen here and why.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from merope.draw.progress import ProgressLine
from merope.errors import invalid
from merope.formats.files import json_lines
from merope.formats.trajectory import Trajectory
from merope.formats.writing import replacing
from merope.geometry.poses import check_rigid, relative

if TYPE_CHECKING:  # numba and scikit-learn load only where paths are curated: manifests are read without them
    from merope.curation.frechet_distance import Floats, Indices

Scope = Literal["cluster", "global"]

FEATURE_STRIDE = 6  # every 6th point of a path is a feature of k-means: 9 of the paper's 49
KMEANS_STEPS = 400
KMEANS_BATCH = 4096


@dataclass(frozen=True, eq=False)
class Curation:
    """What became of N paths. A path is kept when it is its own prototype."""

    cluster: Tensor  # [N] int64, from 0
    prototype: Tensor  # [N] int64, index of a kept path closer than the suppression distance; its own where kept

    @property
    def kept(self) -> Tensor:  # [N] bool
        """Which paths are prototypes."""
        return self.prototype == torch.arange(len(self.prototype))


@dataclass(frozen=True, eq=False)
class Manifest:
    """A curation of named clips."""

    ids: tuple[str, ...]  # [N], all different
    curation: Curation


def ground_paths(world_from_camera: Tensor) -> Tensor:  # [N, T, 4, 4] -> [N, T, 2] float64, metres
    """Right and forward of the first camera, (R₀ᵀ(o_t − o_0))[x, z]: the path seen from above.

    "Above" is the first camera's own −y. One that is pitched by θ shortens forward motion by cos θ.
    """
    if not isinstance(world_from_camera, Tensor) or world_from_camera.ndim != 4 or 0 in world_from_camera.shape:
        got = list(world_from_camera.shape) if isinstance(world_from_camera, Tensor) else type(world_from_camera)
        raise invalid("world_from_camera", "a tensor [N, T, 4, 4]", got, "stack paths of equal length")
    poses = check_rigid(world_from_camera)
    return relative(poses[:, :1], poses)[..., [0, 2], 3]


def curate(
    paths: Tensor,  # [N, T, 2] metres
    clusters: int = 256,
    suppression_m: float = 1.0,
    seed: int = 0,
    scope: Scope = "cluster",
) -> Curation:
    """Cluster paths and suppress near duplicates, by discrete Fréchet distance below `suppression_m`.

    Suppression is greedy, in order of the distance to the cluster's centre (ties: the smaller index). Kept paths are
    pairwise at least `suppression_m` apart and every dropped one is closer than that to its prototype: within each
    cluster (paper), or for `scope="global"` among all paths, which keeps fewer because clusters have borders.
    The same paths and seed give the same result, whatever the number of threads.
    """
    points = _checked_paths(paths)
    _check_settings(len(points), clusters, suppression_m, seed, scope)
    cluster, distance_m = _kmeans(points, clusters, seed)
    from merope.curation.frechet_distance import suppress_all, suppress_groups

    progress = ProgressLine("suppressing near duplicates", len(points), "paths")
    if scope == "global":
        order = np.argsort(distance_m, kind="stable")
        prototype = suppress_all(points, order, suppression_m, progress.show)
    else:
        order = np.lexsort((distance_m, cluster))
        groups = np.split(order, np.cumsum(np.bincount(cluster, minlength=clusters))[:-1])
        prototype = suppress_groups(points, groups, suppression_m, progress.show)
    return Curation(torch.from_numpy(cluster), torch.from_numpy(prototype))


def _checked_paths(paths: Tensor) -> "Floats":
    if not isinstance(paths, Tensor) or paths.ndim != 3 or paths.shape[-1] != 2 or 0 in paths.shape:
        got = list(paths.shape) if isinstance(paths, Tensor) else type(paths)
        raise invalid("paths", "a tensor [N, T, 2] with N, T ≥ 1", got, "pass ground_paths(world_from_camera)")
    if not bool(torch.isfinite(paths).all()):
        first = int((~torch.isfinite(paths)).flatten(1).any(1).nonzero()[0])
        raise invalid("paths", "finite", f"NaN or inf in path {first}", "drop clips whose poses are not known")
    return np.ascontiguousarray(paths.detach().cpu().to(torch.float64).numpy())


def _check_settings(count: int, clusters: int, suppression_m: float, seed: int, scope: str) -> None:
    if not 1 <= clusters <= count:
        raise invalid("clusters", f"between 1 and the {count} paths", clusters, "ask for fewer clusters")
    if not (math.isfinite(suppression_m) and suppression_m > 0):
        raise invalid("suppression_m", "a positive distance in metres", suppression_m, "the paper takes 1.0")
    if not 0 <= seed < 2**32:
        raise invalid("seed", "an integer in [0, 2³²)", seed, "pick another")
    if scope not in get_args(Scope):
        raise invalid("scope", f"one of {get_args(Scope)}", repr(scope), "the paper suppresses within clusters")


def _kmeans(points: "Floats", clusters: int, seed: int) -> "tuple[Indices, Floats]":  # [N], [N] metres
    """Cluster of every path, and the distance of its features to the cluster's centre.

    A fixed number of mini-batch steps on one thread, so that rounding is the same everywhere, in a loop that shows
    progress and can be interrupted. No centre is re-seeded for being small: rare manoeuvres are what clusters are for.
    """
    from sklearn.cluster import MiniBatchKMeans
    from threadpoolctl import threadpool_limits

    steps = points.shape[1]
    columns = np.unique(np.append(np.arange(0, steps, FEATURE_STRIDE), steps - 1))
    features = points[:, columns].reshape(len(points), -1)
    batch = max(KMEANS_BATCH, 4 * clusters)
    model = MiniBatchKMeans(clusters, random_state=seed, n_init=1, compute_labels=False, reassignment_ratio=0.0)
    random = np.random.default_rng(seed)
    progress = ProgressLine("clustering", KMEANS_STEPS, "steps")
    with threadpool_limits(1):  # threads would not pay either: a step takes milliseconds, waiting for a busy core more
        for step in range(KMEANS_STEPS):
            rows = slice(None) if len(points) <= batch else random.integers(len(points), size=batch)
            model.partial_fit(features[rows])
            progress.show(step + 1)
        cluster = model.predict(features).astype(np.int64)
    return cluster, np.linalg.norm(features - model.cluster_centers_[cluster], axis=-1)


def write_manifest(file: Path, ids: Sequence[str], curation: Curation) -> None:
    """One JSON object a line and clip, in the given order: id, cluster, prototype (an id), is_prototype.

    The file appears complete or not at all.
    """
    if len(ids) != len(curation.cluster):
        raise invalid("ids", f"one for each of the {len(curation.cluster)} paths", len(ids), "name every clip")
    check_unique("ids", ids)
    rows = zip(ids, curation.cluster.tolist(), curation.prototype.tolist(), curation.kept.tolist(), strict=True)
    with replacing(file) as part, part.open("w", encoding="utf-8") as out:
        for clip, cluster, prototype, kept in rows:
            row = {"id": clip, "cluster": cluster, "prototype": ids[prototype], "is_prototype": kept}
            out.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_manifest(file: Path) -> Manifest:
    """What `write_manifest` wrote; further fields of a row are left to others. Errors name the file and the line."""
    ids, cluster, prototype_ids, flags = [], [], [], []
    for place, row in json_lines(file):
        _check_row(row, place)
        ids.append(row["id"])
        cluster.append(row["cluster"])
        prototype_ids.append(row["prototype"])
        flags.append(row["is_prototype"])
    if not ids:
        raise invalid(str(file), "a manifest with at least one clip", "an empty file", "run the curation again")
    check_unique(f"ids of {file}", ids)
    index_of = {clip: index for index, clip in enumerate(ids)}
    prototype = [index_of.get(clip, -1) for clip in prototype_ids]
    for index, (stands_for, flag) in enumerate(zip(prototype, flags, strict=True)):
        if stands_for < 0 or not flags[stands_for] or flag != (stands_for == index):
            got = f"{prototype_ids[index]!r} for clip {ids[index]!r}"
            fix = "keep all prototypes when you cut a manifest, or run the curation again"
            raise invalid(f"prototype in {file}", "a clip of the same file that is_prototype marks", got, fix)
    return Manifest(tuple(ids), Curation(torch.tensor(cluster), torch.tensor(prototype)))


MANIFEST_FIELDS = {"id": str, "cluster": int, "prototype": str, "is_prototype": bool}


def _check_row(row: dict[str, Any], place: str) -> None:
    fix = "restore the line or run the curation again"
    if any(type(row.get(name)) is not kind for name, kind in MANIFEST_FIELDS.items()):
        fields = ", ".join(f"{name} ({kind.__name__})" for name, kind in MANIFEST_FIELDS.items())
        raise invalid(place, f"an object with {fields}", str(row)[:120], fix)
    if row["cluster"] < 0:
        raise invalid(place, "a cluster from 0 on", row["cluster"], fix)


def check_unique(name: str, ids: Sequence[str]) -> None:
    """Refuse clips that share a name or have none."""
    seen: set[str] = set()
    for index, clip in enumerate(ids):
        if not clip or clip in seen:
            raise invalid(name, "different and not empty", f"{clip!r} at position {index}", "give each clip its own id")
        seen.add(clip)


def curate_trajectories(
    trajectories: Sequence[Trajectory],
    out: Path,
    clusters: int = 256,
    suppression_m: float = 1.0,
    seed: int = 0,
    scope: Scope = "cluster",
) -> Curation:
    """Curate named metric trajectories of equal length.

    Writes manifest.jsonl (`write_manifest`), curation.json (settings and `summary`) and curation.png to `out`.
    """
    from merope.curation.path_tables import PathTable, curate_table  # it stands on this module

    table = PathTable([trajectory.name for trajectory in trajectories], trajectories.__getitem__)
    return curate_table(table, out, clusters, suppression_m, seed, scope)


def summary(curation: Curation) -> dict[str, object]:
    """Numbers of clips, prototypes and occupied clusters, and both counts for every cluster."""
    sizes = torch.bincount(curation.cluster)
    kept = torch.bincount(curation.cluster[curation.kept], minlength=len(sizes))
    return {
        "clips": len(curation.cluster),
        "prototypes": int(kept.sum()),
        "occupied_clusters": int((sizes > 0).sum()),
        "clips_per_cluster": sizes.tolist(),
        "prototypes_per_cluster": kept.tolist(),
    }


def draw_curation(
    curation: Curation,
    paths: Tensor,  # [N, T, 2] metres
    file: Path,
) -> None:
    """Prototypes from above, coloured by cluster, beside the sizes of the clusters (paper, Figure 4)."""
    from matplotlib import colormaps
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    sizes, kept = torch.bincount(curation.cluster), curation.kept
    prototypes = torch.bincount(curation.cluster[kept], minlength=len(sizes))
    hue = _cluster_hues(curation.cluster, paths)
    figure = Figure(figsize=(9.5, 4.6), layout="constrained")
    above, histogram = figure.subplots(1, 2, width_ratios=(1.1, 1))
    colours = colormaps["turbo"](hue[curation.cluster[kept]].numpy())
    above.add_collection(LineCollection(list(paths[kept].cpu().numpy()), colors=colours, linewidths=0.5, alpha=0.6))
    above.autoscale()
    above.set(aspect="equal", xlabel="right of the first camera (m)", ylabel="ahead of the first camera (m)")
    above.set_title(f"{int(kept.sum()):,} prototypes of {len(kept):,} paths, by cluster")
    above.grid(alpha=0.3)
    by_size = sizes.argsort(descending=True, stable=True)[: int((sizes > 0).sum())]
    places = range(len(by_size))
    histogram.bar(places, sizes[by_size].numpy(), width=1.0, color="#c7c7c7")
    histogram.bar(places, prototypes[by_size].numpy(), width=1.0, color=colormaps["turbo"](hue[by_size].numpy()))
    histogram.set(yscale="log", ylim=(0.8, None), xlabel="cluster, largest first", ylabel="number")
    histogram.set_title(f"{len(by_size)} clusters: clips (grey) and prototypes (colour)")
    figure.savefig(file, dpi=130)


def _cluster_hues(cluster: Tensor, paths: Tensor) -> Tensor:  # [clusters] in [0, 1]
    """Clusters in order of where their paths end, from left to right, so that a colour means a kind of motion."""
    ends = torch.zeros(int(cluster.max()) + 1, 2, dtype=torch.float64)
    ends.index_add_(0, cluster, paths[:, -1].cpu().to(torch.float64))
    rank = torch.atan2(ends[:, 0], ends[:, 1]).argsort().argsort()
    return rank / max(len(rank) - 1, 1)

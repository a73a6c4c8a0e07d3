"""Curation of many paths: read one by one, if need be by several machines, and curated as one table."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from merope.curation.curate import (
    Curation,
    Scope,
    check_unique,
    curate,
    draw_curation,
    ground_paths,
    summary,
    write_manifest,
)
from merope.draw.progress import ProgressLine
from merope.errors import invalid
from merope.formats.parts import Part, forget_parts, note_finished, part_folder, say_lost_parts
from merope.formats.trajectory import Trajectory
from merope.formats.writing import replace_tensors, replace_text


@dataclass(frozen=True)
class PathTable:
    """Named camera paths that are read when they are wanted."""

    names: Sequence[str]
    read: Callable[[int], Trajectory]
    about: str = ""  # what else decides the paths: settings, states of files

    def fingerprint(self) -> str:
        """Paths that a part read of another table are not taken, nor those of files that changed since."""
        return hashlib.sha256("\0".join((self.about, *self.names)).encode()).hexdigest()[:16]


def states_of(files: Iterable[Path]) -> list[tuple[int, int]]:
    """Sizes of files and when they were changed, in seconds; zeros for those that are not on this machine's disks."""
    states = []
    for file in files:
        try:
            state = file.stat()
            states.append((state.st_size, int(state.st_mtime)))
        except OSError:
            states.append((0, 0))
    return states


def curate_table(
    table: PathTable,
    out: Path,
    clusters: int = 256,
    suppression_m: float = 1.0,
    seed: int = 0,
    scope: Scope = "cluster",
) -> Curation:
    """`curate_trajectories` of paths that are read one by one, or were by parts (`read_part`)."""
    say_lost_parts(out)
    paths = _read_paths(table, range(len(table.names)), _paths_of_parts(table, out))
    curation = curate(paths, clusters, suppression_m, seed, scope)
    write_manifest(out / "manifest.jsonl", table.names, curation)
    settings = {"clusters": clusters, "suppression_m": suppression_m, "seed": seed, "scope": scope}
    replace_text(out / "curation.json", json.dumps({**settings, **summary(curation)}, indent=1) + "\n")
    draw_curation(curation, paths, out / "curation.png")
    forget_parts(out)
    return curation


def read_part(table: PathTable, out: Path, part: Part) -> None:
    """Read a part of the paths, which takes the time where there are many files, and leave them for the whole."""
    rows = part.own(range(len(table.names)))
    paths = _read_paths(table, rows, {}) if rows else torch.zeros(0, 1, 2, dtype=torch.float64)
    file = part_folder(out) / f"paths-{table.fingerprint()}-{part.number}-{part.count}.safetensors"
    replace_tensors(file, {"rows": torch.tensor(rows, dtype=torch.long), "paths": paths.contiguous()})
    note_finished(out, part)


def _paths_of_parts(table: PathTable, out: Path) -> dict[int, Tensor]:  # row -> [T, 2]
    """What parts have read; a damaged file is read anew."""
    found: dict[int, Tensor] = {}
    for file in sorted(part_folder(out).glob(f"paths-{table.fingerprint()}-*.safetensors")):
        try:
            tensors = load_file(file)
        except (OSError, SafetensorError):
            continue
        found |= dict(zip(tensors["rows"].tolist(), tensors["paths"], strict=True))
    return found


def _read_paths(table: PathTable, rows: Sequence[int], known: Mapping[int, Tensor]) -> Tensor:  # [n, T, 2] metres
    """Paths from above. Each is computed by itself, so that it does not depend on what was read beside it."""
    if not table.names:
        raise invalid("trajectories", "at least one", 0, "check the folder or file they come from")
    check_unique("names of trajectories", table.names)
    progress = ProgressLine("reading paths", len(rows), "paths")
    paths: list[Tensor] = []
    for done, row in enumerate(rows, start=1):
        path = known.get(row)
        if path is None:
            trajectory = table.read(row)
            if not trajectory.is_metric:
                fix = "scale it to metres first; suppression is a distance in metres"
                raise invalid(f"trajectory {table.names[row]!r}", "metric", "one of unknown scale", fix)
            path = ground_paths(trajectory.world_from_camera[None])[0]
        if paths and len(path) != len(paths[0]):
            expected = f"{len(paths[0])} poses long like {table.names[rows[0]]!r}"
            fix = "cut or resample paths to one length"
            raise invalid(f"trajectory {table.names[row]!r}", expected, len(path), fix)
        paths.append(path)
        progress.show(done)
    return torch.stack(paths)

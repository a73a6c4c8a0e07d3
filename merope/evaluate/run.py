"""A folder of videos: poses recovered clip by clip, in parallel, so that an interrupted run goes on where it was.

Every finished clip is one file under `out`/clips. It is taken up again as long as the pose file, the video, the
estimator and the installed versions are the same. With an estimator that repeats itself the results depend neither on
how often a run was interrupted nor on the number of processes.
"""

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from merope.draw.progress import ProgressLine
from merope.errors import invalid
from merope.evaluate.discover import Job, match, read_commanded, without_other_json
from merope.evaluate.fidelity import Fidelity, read_fidelity
from merope.evaluate.record import Record, read_record, write_record
from merope.evaluate.recover import EstimatorChoice, built, recover, stopped
from merope.evaluate.report import write_report
from merope.evaluate.results import Results, measure, write_results
from merope.evaluate.workers import worker_pool
from merope.formats.parts import Part, forget_parts, note_finished, say_lost_parts

PACKAGES = ("merope", "torch", "numpy", "av", "opencv-python-headless", "pycolmap")


def versions() -> dict[str, str]:
    """What is installed of the packages that results depend on."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def evaluate(
    commanded: Path,  # a folder of pose files, or a manifest
    methods: Mapping[str, Path],  # name -> folder of videos
    choice: EstimatorChoice,
    out: Path,
    workers: int = 1,
    estimates: Path | None = None,
    seed: int = 0,
    fidelity: Path | None = None,  # fidelity.json of the same methods
    reader_options: Mapping[str, object] | None = None,  # of the commanded files' format, as `formats.read` takes them
    fov_deg: float | None = None,  # horizontal, of videos whose commanded files have no lens
    part: Part | None = None,
) -> Results | None:
    """Folders of videos against their commanded paths; writes results.json, clips.csv and report.html to `out`.

    estimates: for the estimator "precomputed" the folder of recovered paths, named like the videos; of several methods
        with a sub-folder for each. The call can be interrupted and repeated at any time.
    part: recover the poses of these clips alone and return None; a call without a part measures all.
    """
    _check_choice(choice, estimates)
    if fov_deg is not None and not 0 < fov_deg < 180:
        raise invalid("fov", "between 0 and 180 degrees", fov_deg, "pass the horizontal field of view of the videos")
    distances = None if fidelity is None else _fidelity_of(fidelity, methods)
    found = [replace(one, fov_deg=fov_deg) for one in read_commanded(commanded, reader_options)]
    paths = [path for path in found if not _is_output(path.poses, out, methods)]
    if commanded.is_dir():
        paths = without_other_json(paths, methods)
    if not paths:
        raise invalid("commanded", "at least one path", f"none in {commanded}", "put pose files there")
    jobs, strays = match(paths, methods, estimates)
    if part is not None:
        recover_all(part.own(jobs), choice, out, workers)
        note_finished(out, part)
        return None
    say_lost_parts(out)
    records = recover_all(jobs, choice, out, workers)
    print(f"measuring {len(records)} clips", file=sys.stderr)
    settings = {
        "commanded": str(commanded),
        "trajectory_options": dict(reader_options or {}),
        "fov_deg": fov_deg,
        "methods": {name: str(folder) for name, folder in methods.items()},
        "estimator": choice.name,
        "checked_by": None if choice.second is None else choice.second.name,
        "checkpoint": None if choice.checkpoint is None else str(choice.checkpoint),
        "weights_sha256": next((one.weights_sha256 for one in records if one.weights_sha256), None),
        "estimates": None if estimates is None else str(estimates),
        "fidelity": None if fidelity is None else str(fidelity),
        "seed": seed,
    }
    results = measure(records, strays, settings, versions(), seed, distances)
    write_results(results, out)
    write_report(results, out / "report.html")
    forget_parts(out)
    return results


def _is_output(file: Path, out: Path, methods: Iterable[str]) -> bool:
    """Whether an earlier run wrote a file: `out` may lie among the commanded paths, or be their folder."""
    file, out = file.resolve(), out.resolve()
    is_record = file.suffix == ".json" and any(_records(out, method) in file.parents for method in methods)
    return is_record or file in (out / "results.json", out / "clips.csv")


def _check_choice(choice: EstimatorChoice, estimates: Path | None) -> None:
    if choice.name == "render-anchored":
        fix = "call RenderAnchoredEstimator for each clip, write the poses, and evaluate them as precomputed"
        raise invalid("estimator", "one that needs nothing but the video", repr(choice.name), fix)
    if choice.second is not None and choice.second.name == choice.name:
        raise invalid("check", "another estimator", f"{choice.name} for itself", "pass opencv, colmap or none")
    if (choice.name == "precomputed") != (estimates is not None):
        expected = "a folder with estimator precomputed, and not otherwise"
        raise invalid("estimates", expected, f"{estimates} with {choice.name}", "pass both or neither")
    if estimates is not None and not estimates.is_dir():
        raise invalid("estimates", "a folder", f"{estimates}, which is none", "check the path")


def _fidelity_of(file: Path, methods: Mapping[str, Path]) -> Fidelity:
    """FID and FVD of methods that are evaluated; one without them has a dash, one that nobody evaluates is refused."""
    fidelity = read_fidelity(file)
    if not fidelity.methods.keys() <= methods.keys():
        expected, got = f"of methods among {', '.join(methods)}", ", ".join(fidelity.methods)
        raise invalid(f"fidelity {file}", expected, got, "give methods the same names in both commands")
    return fidelity


def recover_all(jobs: Sequence[Job], choice: EstimatorChoice, out: Path, workers: int = 1) -> list[Record]:
    """The record of every job, in their order, from earlier runs where possible.

    workers: processes; 1 works in this one. Raises before any work if the estimator cannot be built.
    """
    if workers < 1:
        raise invalid("workers", "at least 1", workers, "pass the number of processes")
    _check_estimators(jobs, choice)
    prints = _fingerprints(jobs, choice)
    files = [_record_file(out, job) for job in jobs]
    records = [read_record(file, fingerprint) for file, fingerprint in zip(files, prints, strict=True)]
    tasks = [
        Task(index, jobs[index], choice, files[index], prints[index])
        for index, record in enumerate(records)
        if record is None
    ]
    before, failures = len(jobs) - len(tasks), 0
    _say_what_is_left(before, len(jobs), sum(task.file.exists() for task in tasks))
    progress = ProgressLine("recovering poses", len(jobs), before=before)
    alone = ((task.index, _run(task)) for task in tasks)
    finished = alone if workers == 1 else _in_processes(tasks, min(workers, max(len(tasks), 1)))
    for done, (index, record) in enumerate(finished, start=before + 1):
        records[index] = record
        failures += not bool(record.valid.any())
        progress.show(done, f"{failures} failed")
    return [replace(record, video=job.video) for job, record in zip(jobs, records, strict=True) if record is not None]


def _check_estimators(jobs: Sequence[Job], choice: EstimatorChoice) -> None:
    """Refuse what cannot be built or imported now, not after minutes of work."""
    if not any(job.video is not None for job in jobs):
        return
    needed = [choice] if any(job.video is not None and job.estimate is None for job in jobs) else []
    for one in [*needed, *([] if choice.second is None else [choice.second])]:
        built(one)
    for package in ("av", "PIL"):
        importlib.import_module(package)


def _say_what_is_left(finished: int, clips: int, outdated: int) -> None:
    if finished:
        print(f"{finished} of {clips} clips are finished from an earlier run", file=sys.stderr)
    if outdated:
        why = "their files, the estimators or the installed versions have changed"
        print(f"{outdated} of {clips} clips are done again: {why}", file=sys.stderr)


@dataclass(frozen=True)
class Task:
    """A job with where its record goes."""

    index: int
    job: Job
    choice: EstimatorChoice
    file: Path
    fingerprint: str


def _records(out: Path, method: str) -> Path:
    """Folder of a method's records."""
    return out / "clips" / _readable(method)


def _record_file(out: Path, job: Job) -> Path:
    """Names of clips may hold slashes and anything else; a digest keeps different ones apart."""
    name = str(job.clip)
    digest = hashlib.sha256(os.fsencode(f"{job.method}\0{name}")).hexdigest()[:8]
    return _records(out, job.method) / f"{_readable(name)}-{digest}.json"


def _readable(name: str) -> str:
    """A name as part of a file's."""
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name)[:80]


def _fingerprints(jobs: Sequence[Job], choice: EstimatorChoice) -> list[str]:
    """For every job a digest of all that its record follows from."""
    shared = json.dumps([choice.fingerprint(), versions()])
    sources = {
        source for job in jobs for source in (job.commanded.poses, job.video, job.estimate) if source is not None
    }
    digests = {source: _content_digest(source) for source in sources}  # methods share commanded paths
    prints = []
    for job in jobs:
        path, files = job.commanded, (job.commanded.poses, job.video, job.estimate)
        parts = [shared, job.method, str(path.clip), path.start, path.stride, path.frames, str(job.refusal)]
        parts += [repr(path.options), *([] if path.fov_deg is None else [path.fov_deg])]
        contents = [None if source is None else digests[source] for source in files]
        prints.append(hashlib.sha256(json.dumps([*parts, *contents]).encode()).hexdigest())
    return prints


def _content_digest(source: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(source.rglob("*")) if source.is_dir() else [source]:
        if file.is_file():
            digest.update(os.fsencode(file.name))
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _in_processes(tasks: Sequence[Task], workers: int) -> Iterator[tuple[int, Record]]:
    """Tasks in processes of their own. A process that dies takes the pool with it; those in flight are tried alone."""
    waiting = list(reversed(tasks))
    while waiting:
        flying: dict[Future[Record], Task] = {}
        pool = worker_pool(workers)
        try:
            while waiting or flying:
                while waiting and len(flying) < workers:
                    flying[pool.submit(_run, waiting[-1])] = waiting[-1]
                    waiting.pop()
                for future in wait(flying, return_when=FIRST_COMPLETED).done:
                    record = future.result()
                    yield flying.pop(future).index, record
        except BrokenProcessPool:
            yield from ((task.index, _run_alone(task)) for task in flying.values())
        finally:
            pool.shutdown(cancel_futures=True)


def _run_alone(task: Task) -> Record:
    with worker_pool(1) as pool:
        try:
            return pool.submit(_run, task).result()
        except BrokenProcessPool:
            return stopped(task.job, "its process died, for want of memory or by a fault inside")


def _run(task: Task) -> Record:
    """Recover a clip and leave its file, also when the parent is gone by then."""
    record = recover(task.job, task.choice)
    if record.is_final:
        write_record(record, task.file, task.fingerprint)
    return record

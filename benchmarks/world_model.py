"""How well a model follows commanded paths in unseen worlds, and what a stranger can make of its pictures.

    python benchmarks/world_model.py [--model FOLDER] [--worlds 24] [--steps N]
        [--kinds generated] [--out benchmarks/results/world-model.json]

Three paths in each of some worlds that no model was trained on. Two rulers measure every generated clip:

* the render-anchored estimator, which knows the world: errors in metres, frames without a pose, PSNR;
* COLMAP, which knows the pictures and the lens only: how many frames it registers. The same of the true renders is the
  most that it can find. Of a model with a VAE the reconstructed true renders are measured, too.

Clips below 144 pixels are enlarged for COLMAP, so that models of all sizes are measured alike.

The work has three stages. `--only generate` wants a GPU, and writes latents to the folder `--work`, in files of at most
15 MB. `--only renders` measures true and reconstructed renders, and `--only score` the rest: both want CPU cores and
pycolmap. Renders need no generated clips, and their rows serve every model with the same VAE. A stopped stage goes on
where it was.

    python benchmarks/world_model.py --against benchmarks/results/world-model-few-steps.json

generates nothing. It prints what the rows of `--out` gained on the same clips of another file, with 95 % intervals over
worlds.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from merope.bench.generated import about_videos, generate_clips
from merope.bench.intervals import Grid, difference
from merope.bench.run_facts import weights_digest
from merope.bench.scores import COLMAP_ROWS
from merope.demo.drive import SHIPPED_MODEL, loaded
from merope.demo.pictures import enlarged
from merope.draw.progress import ProgressLine
from merope.evaluate.seen_before import seen_before
from merope.evaluate.summary import Interval
from merope.evaluate.workers import pool_or_this_process
from merope.evaluate.world_scores import colmap_score, psnr_db, score_clip
from merope.formats.video import as_bytes
from merope.formats.writing import replace_text, replacing
from merope.generate.camera_video import CameraVideoPipeline
from merope.train.provenance import commit, device_name
from merope.train.vae_model import squared_steps
from merope.world.clips import WorldClips
from merope.world.clips_file import read_clips
from merope.world.commanded import FIRST_TEST_SEED, MANOEUVRES, CommandedClip, WorldTest, clips_of_world

CPU = torch.device("cpu")
FILE_BYTES = 15_000_000
KINDS = ("generated", "true", "vae")
PAPER_FRAMES = 49
"""Of a clip in the paper. A causal model makes whole blocks, and so a few frames more."""
SHARES_PERCENT = (0, 5, 10, 20, 40, 60, 80, 101)

Row = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """A model and what it is asked for; processes that score share it."""

    model: Path
    work: Path
    worlds: int
    steps: int

    @property
    def clips(self) -> WorldClips:
        return read_clips(self.model)[0]

    @cached_property
    def about(self) -> dict[str, str]:
        """What generated clips depend on. Scores of other weights, steps or clips are not mixed with these."""
        return {"weights": weights_digest(self.model), "steps": str(self.steps), "clips": repr(self.clips)}

    @cached_property
    def about_kind(self) -> dict[str, dict[str, str]]:
        """What the rows of a kind depend on: those of the renders are the same for every model, or for every VAE."""
        clips = {"clips": repr(self.clips)}
        about = {"generated": self.about, "true": clips}
        return about | {"vae": clips | {"weights": weights_digest(self.model / "vae")}} if self.has_vae else about

    @property
    def has_vae(self) -> bool:
        return (self.model / "vae").is_dir()

    def commanded(self, seed: int, device: torch.device) -> list[CommandedClip]:
        return clips_of_world(WorldTest().paths(self.clips, seed), self.clips, seed, device)


def latent_files(trial: Trial, clip_bytes: int) -> dict[Path, range]:
    """The files of all worlds, and the seeds of each."""
    at_once = max(FILE_BYTES // (3 * clip_bytes), 1)
    firsts = range(0, trial.worlds, at_once)
    seeds = [range(FIRST_TEST_SEED + k, FIRST_TEST_SEED + min(k + at_once, trial.worlds)) for k in firsts]
    return {trial.work / f"latents-{k:04d}.safetensors": group for k, group in zip(firsts, seeds, strict=True)}


def clip_bytes(trial: Trial, pipeline: CameraVideoPipeline) -> int:
    """Of a clip's latents in float16."""
    clips, strides = trial.clips, pipeline.strides
    rows, columns = strides.latent_size(clips.height, clips.width)
    return 2 * pipeline.transformer.config.in_channels * strides.latent_frames(clips.frames) * rows * columns


def generate(trial: Trial) -> None:
    """Latents of all clips. Files of the same model, steps and clips are kept."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pipeline = loaded(trial.model, device)
    about, test = trial.about, WorldTest(trial.worlds, steps=trial.steps)
    files = latent_files(trial, clip_bytes(trial, pipeline))
    progress = ProgressLine("generating", len(files), "files")
    for done, (file, seeds) in enumerate(files.items(), start=1):
        wanted = about | {"seeds": f"{seeds.start}–{seeds.stop}"}
        if not wanted.items() <= about_videos(file).items():
            began_s = time.perf_counter()
            commanded = [clip for seed in seeds for clip in trial.commanded(seed, device)]
            made = generate_clips(pipeline, commanded, test, trial.clips.prefix_frames, True, output_type="latent")
            took = {"generated_s": f"{time.perf_counter() - began_s:.1f}", "generated_on": device_name(device)}
            with replacing(file) as part:
                save_file(made, part, wanted | took)
        progress.show(done)


@lru_cache(maxsize=1)
def model_of_process(folder: Path) -> CameraVideoPipeline:
    return loaded(folder, CPU)


def stranger(video: Tensor, clip: CommandedClip) -> Row:  # uint8 [T, H, W, 3]
    """What COLMAP finds in a clip, given its lens and nothing else."""
    began_s = time.perf_counter()
    found = colmap_score(clip, enlarged(video, COLMAP_ROWS))
    registered = round((found.pop("percent") or 0.0) / 100.0 * len(video))
    return {"registered": registered, "s": round(time.perf_counter() - began_s, 1)} | found


@torch.no_grad()
def measured(trial: Trial, kind: str, clip: CommandedClip, latents: Tensor | None) -> Row:  # [C, T, h, w]
    """The row of one clip. `latents`: the generated ones."""
    pipeline, prefix = model_of_process(trial.model), trial.clips.prefix_frames
    began_s, row = time.perf_counter(), Row()
    video = clip.true
    if kind == "vae":
        latents = pipeline.encode_frames(clip.true[None])[0]
    if latents is not None and kind != "true":
        video = as_bytes((pipeline.decode_latents(latents[None].float())[0].movedim(0, -1) + 1.0) / 2.0)
        made, true = video[prefix:], clip.true[prefix:]
        row = {"psnr_db": psnr_db(made, true), "sharpness": sharpness(made, true)}
    if kind == "generated":
        found = score_clip(clip, video, prefix)
        shares = seen_before(clip.seen, clip.cameras, prefix)[prefix:]
        row |= found.metrics.as_dict() | {"lost_frames": (~found.valid).nonzero().flatten().tolist()}
        row["seen_before_percent"] = [round(100 * share) for share in shares.tolist()]  # of every generated frame
    row |= {"frames": len(video), "colmap": stranger(video, clip)}
    return row | {"kind": kind, "clip": clip.name, "s": round(time.perf_counter() - began_s, 1)}


def sharpness(video: Tensor, true: Tensor) -> float:  # uint8 [T, H, W, 3] twice
    """Squared steps from a pixel to its neighbours, over those of the true frames."""
    made, wanted = (squared_steps(x.movedim(-1, 0)[None].float()) for x in (video, true))
    return float(made / wanted)


def measured_world(trial: Trial, file: Path | None, seed: int, missing: Sequence[tuple[str, str]]) -> list[Row]:
    """The rows of a world that are still missing: pairs of kind and clip. Those of renders need no file."""
    rows = []
    for clip in trial.commanded(seed, CPU):
        latents = None if file is None else latents_in(file, clip.name)
        rows += [measured(trial, kind, clip, latents) for kind, name in missing if name == clip.name]
    return rows


def latents_in(file: Path, name: str) -> Tensor:  # [C, T, h, w]
    with safe_open(file, "pt") as kept:
        return kept.get_tensor(name)


def score(trial: Trial, kinds: Sequence[str], workers: int) -> list[Row]:
    """Rows of all clips of some kinds; those that an earlier run measured of the same pictures are read."""
    kept, wanted = trial.work / "rows.jsonl", range(FIRST_TEST_SEED, FIRST_TEST_SEED + trial.worlds)
    lines = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {(row["kind"], row["clip"]): row for row in lines if row.pop("about") == trial.about_kind.get(row["kind"])}
    files = files_of_worlds(trial, wanted) if "generated" in kinds else {}
    jobs = dict[int, list[tuple[str, str]]]()
    for seed in wanted:
        names = [f"world-{seed}-{name}" for name in WorldTest().paths(trial.clips, seed)]
        missing = [(kind, name) for kind in kinds for name in names if (kind, name) not in done]
        jobs |= {seed: missing} if missing else {}
    kept.parent.mkdir(parents=True, exist_ok=True)
    progress, count = ProgressLine("scoring", len(jobs), "worlds"), 0
    with pool_or_this_process(workers) as pool, kept.open("a") as stream:
        waiting = [pool.submit(measured_world, trial, files.get(seed), seed, jobs[seed]) for seed in jobs]
        for count, finished in enumerate(as_completed(waiting), start=1):
            for row in finished.result():
                done[row["kind"], row["clip"]] = row
                stream.write(json.dumps(row | {"about": trial.about_kind[row["kind"]]}) + "\n")
            stream.flush()
            progress.show(count)
    asked = (row for (kind, _), row in done.items() if kind in kinds and int(row["clip"].split("-")[1]) in wanted)
    return sorted(asked, key=_kind_and_clip)


def files_of_worlds(trial: Trial, wanted: range) -> dict[int, Path]:
    """Where the latents of each world are."""
    every = sorted(trial.work.glob("latents-*.safetensors"))
    files = {seed: file for file in every for seed in seeds_in(file, trial.about)}
    if not set(wanted) <= set(files):
        short = f"{len(set(wanted) & set(files))} of {len(wanted)} worlds of this model and {trial.steps} steps"
        raise SystemExit(f"{trial.work} holds {short}; run --only generate first, with the same --model and --steps")
    return files


def _kind_and_clip(row: Row) -> tuple[int, str]:
    return KINDS.index(row["kind"]), row["clip"]


def seeds_in(file: Path, about: Mapping[str, str]) -> Iterable[int]:
    """Worlds whose latents a file holds; none if they are of another model or other steps."""
    found = about_videos(file)
    if not about.items() <= found.items():
        return ()
    return range(*(int(end) for end in found["seeds"].split("–")))


def means(rows: Sequence[Row], prefix_frames: int) -> Row:
    """Of one kind: over the clips that have a number. A clip without one has too few recovered poses."""
    frames = sum(row["frames"] for row in rows)
    result = {"clips": len(rows), "frames": frames}
    for name in ("psnr_db", "sharpness"):  # rows of earlier files have no sharpness
        if all(name in row for row in rows):
            result[name] = statistics.mean(row[name] for row in rows)
    if "rot_deg" in rows[0]:
        found = [row for row in rows if row["rot_deg"] is not None]
        result |= {"measured_clips": len(found), "generated_frames": frames - len(rows) * prefix_frames}
        for name in ("rot_deg", "metric_tr_percent"):
            result[name] = statistics.mean(row[name] for row in found) if found else None
        result["frames_without_pose"] = sum(row["frames"] - row["valid_frames"] for row in rows)
        if "seen_before_percent" in rows[0]:
            lost = sum(frame < PAPER_FRAMES for row in rows for frame in row["lost_frames"])
            made = sum(min(row["frames"], PAPER_FRAMES) - prefix_frames for row in rows)
            result["of_the_first_49_frames"] = {"generated_frames": made, "frames_without_pose": lost}
            result |= lost_by_share(rows, prefix_frames)
    registered = [row["colmap"]["registered"] for row in rows]
    result["colmap_registered_percent"] = 100.0 * sum(registered) / frames
    result["colmap_whole_clips"] = sum(row["frames"] == count for row, count in zip(rows, registered, strict=True))
    return result


def lost_by_share(rows: Sequence[Row], prefix_frames: int) -> Row:
    """Frames, and those without a pose, by the share of their surface that the given frames had shown, in percent."""
    shares = [
        (share, frame in row["lost_frames"])
        for row in rows
        for frame, share in enumerate(row["seen_before_percent"], prefix_frames)
    ]
    table = {}
    for low, high in pairwise(SHARES_PERCENT):
        lost = [is_lost for share, is_lost in shares if low <= share < high]
        table[f"{low}-{min(high, 100)}"] = {"frames": len(lost), "without_pose": sum(lost)}
    return {"by_percent_seen_before": table}


def gains(rows: Sequence[Row], before: Sequence[Row]) -> dict[str, Interval]:
    """Mean difference on the same generated clips, of every metric."""
    now, then = ({row["clip"]: row for row in some if row["kind"] == "generated"} for some in (rows, before))
    if now.keys() != then.keys():
        raise SystemExit("--against has other generated clips than --out; compare runs of the same worlds")
    worlds = sorted({clip.rsplit("-", 1)[0] for clip in now})

    def values(found: Mapping[str, Row], metric: str) -> Grid:  # a clip without a number has None, which becomes NaN
        table = [[found[f"{world}-{name}"][metric] for name in MANOEUVRES] for world in worlds]
        return Grid((0,), np.array([table], dtype=np.float64))

    metrics = ("psnr_db", "rot_deg", "metric_tr_percent")
    found = {metric: difference(values(now, metric), values(then, metric)) for metric in metrics}
    return {metric: gain for metric, gain in found.items() if gain is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description="how well a model follows commanded paths in unseen worlds")
    parser.add_argument("--model", type=Path, default=SHIPPED_MODEL, help="pipeline folder (the one in the package)")
    parser.add_argument("--worlds", type=int, default=24)
    parser.add_argument("--steps", type=int, help="of denoising (what the model's clips.json names)")
    parser.add_argument("--workers", type=int, default=2, help="processes that score (2)")
    parser.add_argument("--work", type=Path, default=Path("outputs/world-model-test"), help="for latents and rows")
    parser.add_argument("--only", choices=("generate", "renders", "score"), help="one stage (all)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="of clips that are scored (all that the model has)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/world-model.json"))
    parser.add_argument("--against", type=Path, help="rows to compare those of --out with; nothing is generated")
    options = parser.parse_args()
    if options.against is not None:
        rows, before = (json.loads(file.read_text())["rows"] for file in (options.out, options.against))
        for metric, gain in gains(rows, before).items():
            print(f"{metric:18} {gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]")
        return
    trial = Trial(options.model, options.work, options.worlds, options.steps or read_clips(options.model)[1])
    if options.only in (None, "generate"):
        generate(trial)
    if options.only == "renders":
        score(trial, [kind for kind in trial.about_kind if kind != "generated"], options.workers)
    if options.only in ("generate", "renders"):
        return
    kinds = [kind for kind in trial.about_kind if kind in (options.kinds or KINDS)]
    rows = score(trial, kinds, options.workers)
    by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in kinds}
    summary = {kind: means(own, trial.clips.prefix_frames) for kind, own in by_kind.items()}
    where = [about_videos(file) for file in sorted(trial.work.glob("latents-*.safetensors"))]
    about = trial.about | {"generated_on": sorted({one["generated_on"] for one in where}), "steps": trial.steps}
    about |= {"commit": commit(), "torch": torch.__version__, "clips": asdict(trial.clips)}
    replace_text(options.out, json.dumps({**about, "means": summary, "rows": rows}, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()

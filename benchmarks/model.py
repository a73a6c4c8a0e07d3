"""What a camera branch costs at full size: Wan2.2 TI2V-5B with random weights on one GPU (paper, Table 6).

    python benchmarks/model.py [--what branch forward denoise-49 denoise-121 train] [--compile]

`--what`, and about how long each takes on an H200:

branch       one camera branch by itself, 13 × 9×16 and 31 × 22×40 tokens, C = 2, 4, 8                           40 s
forward      one forward of the base model: timesteps per token or one per clip, guidance passes one by one or
             as a batch                                                                                          10 s
denoise-49   the pipeline's loop with guidance and a clean prefix of 9 frames, 49 frames of 288×512; also C = 2,
             C = 8, every block, blocks 11 and 13                                                                60 s
denoise-121  the same for 121 frames of 704×1280                                                                 90 s
train        training steps of 49 × 288×512, the branch alone and all weights                                    60 s

`--compile` adds rows of denoise-* in which the blocks went through `transformer.compile_repeated_blocks`; some 10 s for
every kind of block. The base model is built once; branches are attached and detached in turn, on the same latents,
text and cameras. "merope, paper's way" materialises keys and values for every query camera in plain PyTorch. Before
anything is timed, its latents and ours must agree. Methods take turns in rounds, so that drifting clocks hit all alike.

Of the loop's 50 steps only some are run: seconds of a clip are those of the first step, in which the plan is made, plus
49 times the median of the others. The file is written after every visit; parts that were measured before stay in it.
"""

import argparse
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from attention import machine
from model_branch import branch_rows
from model_scenes import (
    CLIPS,
    METHODS,
    NO_BRANCH,
    OURS,
    UCPE,
    Clip,
    Method,
    Row,
    Scene,
    Visit,
    branch_attention,
    forget_peak,
    gate,
    identity,
    peak_gib,
    spread,
    timed,
    visit,
    with_ratios,
)
from torch import _dynamo
from train_step import (
    WAN22_5B,
    Trainable,
    kernels_of_step,
    random_examples,
    random_model,
    random_pipeline,
    timed_steps,
    train_config,
    trainable_branch,
)

from merope.adapters.attachment import detach
from merope.train.model import Model
from merope.train.provenance import commit

LOOP_STEPS = 50
COMPRESSIONS = (2, 4, 8)
BRANCH_REPEATS = {"denoise-49": 20, "denoise-121": 6}
FORWARD_REPEATS = {"denoise-49": 10, "denoise-121": 2}
TRAIN_ROUNDS, TRAIN_WARM_UP, TRAIN_STEPS = 5, 1, 4  # rounds, and steps in each
TRAINED: dict[Trainable, tuple[Method, ...]] = {"branch": METHODS[1:], "all": (NO_BRANCH, UCPE, OURS)}
PARTS = ("branch", "forward", *CLIPS, "train")


def denoise(scene: Scene, methods: tuple[Method, ...], compiled: bool) -> Iterator[list[Row]]:
    """All rows of a clip so far, after every visit. A method that does not compile runs eagerly, and says so."""
    visits: dict[Method, list[Visit]] = {}
    notes: dict[Method, str] = {}
    for _ in range(scene.clip.rounds):
        for method in methods:
            seen = None
            if compiled and method not in notes:
                try:
                    seen = visit(scene, method, scene.clip.steps)
                except Exception as error:  # whatever a compiler throws
                    notes[method] = f"not compiled: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
                    print(method.name, notes[method], flush=True)
            if seen is None:
                with torch.compiler.set_stance("force_eager"):
                    seen = visit(scene, method, scene.clip.steps)
            visits.setdefault(method, []).append(seen)
            rows = [denoise_row(scene.clip, m, v, compiled and m not in notes) for m, v in visits.items()]
            yield with_ratios([{**row, "note": notes.get(m, "")} for m, row in zip(visits, rows, strict=True)])


def denoise_row(clip: Clip, method: Method, visits: list[Visit], compiled: bool) -> Row:
    steps_s = [seconds for seen in visits for seconds in seen.steps_s]
    timing, first_s = spread("step", steps_s), visits[-1].first_s  # kernels were built in the first step of all
    clip_s = first_s + (LOOP_STEPS - 1) * timing["step_s"]
    return {
        **identity(clip.name, method),
        "compiled": compiled,
        "steps_run": len(steps_s),
        "first_step_s": first_s,
        **timing,
        "clip_s": clip_s,
        "clips_per_s": 1 / clip_s,
        "peak_memory_gib": max(seen.peak_gib for seen in visits),
    }


def train(model: Model, trainable: Trainable, clip: Clip, methods: tuple[Method, ...]) -> Iterator[list[Row]]:
    """All rows of training steps so far, after every visit."""
    config = train_config(trainable, "merope")  # names the optimiser's settings; branches are attached here
    examples = random_examples(model.device, clip.frames, clip.height, clip.width)
    steps_s: dict[Method, list[float]] = {}
    rows: dict[Method, Row] = {}
    for _ in range(TRAIN_ROUNDS):
        for method in methods:
            with training(model, method):
                times, _ = timed_steps(config, model, examples, TRAIN_WARM_UP, TRAIN_STEPS)
                steps_s.setdefault(method, []).extend(times)
                rows[method] = train_row(trainable, method, steps_s[method], model)
            yield with_ratios(list(rows.values()))
    for method in methods:  # last: a profiler that was loaded slows what is timed
        with training(model, method):
            kernels_s, count = kernels_of_step(config, model, examples)
        rows[method] |= {"kernels_s": kernels_s, "kernels": count}
        yield with_ratios(list(rows.values()))


@contextmanager
def training(model: Model, method: Method) -> Iterator[None]:
    """The model with a method's branch, to be trained."""
    has_branch = method.encoding != "none"
    if has_branch:
        trainable_branch(model, method.config)
    forget_peak(model.device)
    with branch_attention(method.attention):
        yield
    if has_branch:
        detach(model.transformer)
    model.transformer.zero_grad(set_to_none=True)


def train_row(trainable: Trainable, method: Method, steps_s: list[float], model: Model) -> Row:
    timing = spread("step", steps_s)
    trained, total = model.parameter_counts()
    return {
        **identity("train", method),
        "trained": trainable,
        "trained_parameters": trained,
        "parameters": total,
        "compiled": False,
        "steps_run": len(steps_s),
        **timing,
        "clips_per_s": 1 / timing["step_s"],
        "peak_memory_gib": peak_gib(model.device),
    }


@torch.no_grad()
def forward_rows(scene: Scene, repeats: int, samples: tuple[int, ...]) -> list[Row]:
    """One forward of the base model: per-token timesteps or one per clip, one sample or the two of guidance at once."""
    transformer, rows = scene.pipeline.transformer, []
    frames, height, width = scene.clip.grid
    for count in samples:
        for kind, per_sample in (("per token", frames * height * width), ("per clip", 1)):
            inputs = {
                "hidden_states": scene.noise.to(transformer.dtype).expand(count, -1, -1, -1, -1).contiguous(),
                "timestep": torch.full((count, per_sample), 500.0, device=scene.device),
                "encoder_hidden_states": scene.text[:count],
            }
            transformer(**inputs)
            forget_peak(scene.device)
            times = [timed(partial(transformer, **inputs), scene.device) for _ in range(repeats)]
            row = {"what": "forward", "method": NO_BRANCH.name, "clip": scene.clip.name, "timesteps": kind}
            rows.append(
                {**row, "samples": count, **spread("forward", times), "peak_memory_gib": peak_gib(scene.device)}
            )
    return rows


class Results:
    """The result file: what was measured before of other parts stays, and every change is written at once."""

    def __init__(self, path: Path, parts: list[str], about: Row) -> None:
        self.path, self.about = path, about
        before = json.loads(path.read_text()) if path.exists() else {}
        same = before.get("machine") == about
        self.commits = {commit()}
        self.gate: Row | None = before.get("gate") if same else None
        self.kept: list[Row] = [row for row in before.get("rows", []) if same and row["what"] not in parts]
        self.commits |= set(before["commit"].split(", ")) if self.kept else set()
        self.rows: dict[tuple[object, ...], list[Row]] = {}

    def put(self, key: tuple[object, ...], rows: list[Row]) -> None:
        """Rows of one group, in place of its earlier ones."""
        self.rows[key] = rows
        self.path.parent.mkdir(parents=True, exist_ok=True)
        everything = self.kept + [row for group in self.rows.values() for row in group]
        commits = ", ".join(sorted(self.commits))
        whole = {"machine": self.about, "commit": commits, "gate": self.gate, "rows": everything}
        beside = self.path.with_suffix(".tmp")
        beside.write_text(json.dumps(whole, indent=1))
        beside.replace(self.path)


def measure_branches(results: Results, device: torch.device) -> None:
    for clip in CLIPS.values():
        for compression in COMPRESSIONS:
            for backward in (False, True):
                rows = branch_rows(clip, compression, backward, WAN22_5B, device, BRANCH_REPEATS[clip.name])
                results.put(("branch", clip.name, compression, backward), rows)
                show(rows)
                release()


def measure_denoising(results: Results, parts: list[str], compile_blocks: bool, device: torch.device) -> None:
    """The parts that run the base model without training it."""
    pipeline = random_pipeline(WAN22_5B, torch.bfloat16, device)
    pipeline.transformer.eval().requires_grad_(False)
    results.gate = gate(Scene.random(pipeline, CLIPS["denoise-49"]))
    if "forward" in parts:
        for clip in CLIPS.values():
            samples = (1, 2) if clip.name == "denoise-49" else (1,)
            rows = forward_rows(Scene.random(pipeline, clip), FORWARD_REPEATS[clip.name], samples)
            results.put(("forward", clip.name), rows)
            show(rows)
    if compile_blocks:
        _dynamo.config.recompile_limit = 64  # every method is another graph of the same code
        pipeline.transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
    for clip in (CLIPS[name] for name in parts if name in CLIPS):
        for compiled in (False, True)[: 1 + compile_blocks]:
            rows = []
            for rows in denoise(Scene.random(pipeline, clip), METHODS if compiled else clip.methods, compiled):
                results.put((clip.name, compiled), rows)
            show(rows)
            release()


def measure_training(results: Results, device: torch.device) -> None:
    for trainable, methods in TRAINED.items():
        rows = []
        for rows in train(random_model(trainable, device), trainable, CLIPS["denoise-49"], methods):
            results.put(("train", trainable), rows)
        show(rows)
        release()


def show(rows: list[Row]) -> None:
    """Print rows as they are written."""
    for row in rows:
        words = (
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in row.items()
        )
        print(*words, flush=True)


def release() -> None:
    """Give back what the last measurement held."""
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    """Measure the chosen parts and write the rows."""
    parser = argparse.ArgumentParser(description="what a camera branch costs at full size")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/model-h200.json"))
    parser.add_argument("--what", nargs="+", default=list(PARTS), choices=[*PARTS, "all"])
    parser.add_argument("--compile", action="store_true", help="also denoise with compiled blocks")
    options = parser.parse_args()
    parts, device = list(PARTS) if "all" in options.what else options.what, torch.device("cuda")
    about = {name: value for name, value in machine().items() if name != "commit"}
    results = Results(options.out, parts, about)
    if "branch" in parts:
        measure_branches(results, device)
    if {"forward", *CLIPS} & set(parts):
        measure_denoising(results, parts, options.compile, device)
        release()
    if "train" in parts:
        measure_training(results, device)


if __name__ == "__main__":
    main()

"""Is a model that was distilled to few steps better than its teacher in as few? A tiny one, on a CPU.

    python benchmarks/few_steps.py --runs /tmp/few-steps [--out benchmarks/results/few-steps-cpu.json]

A causal model of pixels is trained on the procedural world, and distilled. Then both drive worlds that neither has
seen, block by block after their own blocks. A row is a sampler, and has mean squared errors of the generated frames

- against what the teacher makes of the same noise in 16 steps after the true blocks, of all and of every block,
- against the true frames,

and how sharp they are: the mean squared difference of neighbouring pixels over that of the true frames. A mean of many
futures is near to the true one, but is not sharp. Runs that are there go on.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from merope.adapters.attachment import load_branch
from merope.adapters.causal_wan import attach_causal
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.conditions import latent_cameras
from merope.train.build import build_stream
from merope.train.config import TrainConfig
from merope.train.few_steps import BlockClips, rolled_out, taught_states
from merope.train.loop import train
from merope.train.model import build_model
from merope.train.objective import noise_levels
from merope.train.parallel import Ranks
from merope.train.provenance import commit, steps_done
from merope.train.toml_config import read_config

CPU = torch.device("cpu")
SIZES = (
    *("model.architecture.patch_size=[1,4,4]", "model.architecture.num_attention_heads=2"),
    *("model.architecture.attention_head_dim=48", "model.architecture.ffn_dim=192", "branch.compression=1"),
    "branch.encoding_options={partition=[12,12,12,12], native_split=[4,4,4], fractions=[0.0,1.0]}",
    *("data.frames=8", "data.height=12", "data.width=16", "data.frame_rate_hz=8.0"),
    *("data.worlds=512", "data.first_worlds=512"),
    *("objective.causal_block_frames=2", "objective.prefix_frames=2", "objective.text_dropout=0.0"),
    *("run.batch_size=8", "run.micro_batch=8", "run.sample_every=0", "run.validation_clips=0", "run.log_every=100"),
    *("run.checkpoint_every=100", "optimiser.matrices=muon"),
)


def teacher_config(runs: Path, steps: int) -> TrainConfig:
    own = (f"run.out={runs / 'causal'}", f"run.steps={steps}", "optimiser.learning_rate=3e-3")
    return read_config(
        TrainConfig, Path("tiny"), [*SIZES, *own, "optimiser.ema_decay=0.99", f"optimiser.decay_steps={3 * steps // 8}"]
    )


def student_config(runs: Path, steps: int, few: int) -> TrainConfig:
    trained = runs / "causal" / "trained"
    own = (f"run.out={runs / f'few-{few}'}", f"run.steps={steps}", "optimiser.learning_rate=5e-4")
    start = (f"model.pretrained={trained}", f"model.pretrained_branch={trained / 'branch'}")
    taught = (f"distillation.steps={few}", "distillation.teacher_steps=8", "optimiser.ema_decay=0.9")
    return read_config(
        TrainConfig, Path("tiny"), [*SIZES, *own, *start, *taught, f"optimiser.decay_steps={2 * steps // 3}"]
    )


def read_model(folder: Path) -> CameraVideoPipeline:
    pipe: CameraVideoPipeline = CameraVideoPipeline.from_pretrained(folder)
    load_branch(pipe.transformer, folder / "branch")
    return pipe


def held_out_clips(config: TrainConfig, count: int) -> BlockClips:
    """Clips of unseen worlds, with noise that is the same for all samplers."""
    model = build_model(config, CPU, sharded=False)
    config = replace(config, run=replace(config.run, micro_batch=count, batch_size=count, validation_clips=count))
    examples = next(iter(build_stream(config, model, Ranks(0, 1, CPU)).held_out(count)))
    noise = torch.randn(examples.clean.shape, generator=torch.Generator().manual_seed(0))
    cameras = latent_cameras(examples.cameras, model.pipeline.strides.frames)
    block = config.objective.causal_block_frames or 1
    return BlockClips(examples.clean, noise, examples.text, cameras, model.prefix, block)


def by_teacher(config: TrainConfig, clips: BlockClips, levels: list[float]) -> Tensor:  # [B, C, T, H, W]
    """What the teacher of a run makes after the true blocks; a latent frame of this model is a frame."""
    model = build_model(config, CPU, sharded=False)
    assert clips.cameras is not None
    return taught_states(model, clips, clips.cameras, clips.clean, 0.0, levels)[-1]


def measured(
    pipe: CameraVideoPipeline,
    clips: BlockClips,
    taught: Tensor,  # [B, C, T, H, W]
    levels: list[float],
) -> dict[str, object]:
    """Errors of a rollout at these noise levels."""
    attach_causal(pipe.transformer)
    own = slice(clips.prefix, None)
    made = rolled_out(pipe.transformer, clips, levels)[-1][:, :, own].clamp(-1, 1)
    true, error = clips.clean[:, :, own], (made - taught[:, :, own]).square()
    of_blocks = error.mean(dim=(0, 1, 3, 4)).unflatten(0, (-1, clips.block)).mean(1)
    return {
        "levels": [round(level, 4) for level in levels],
        "error_to_teacher": round(float(error.mean()), 5),
        "of_blocks": [round(float(each), 5) for each in of_blocks],
        "error_to_truth": round(float((made - true).square().mean()), 5),
        "sharpness": round(float(contrast(made) / contrast(true)), 3),
    }


def contrast(video: Tensor) -> Tensor:  # [B, C, T, H, W] -> []
    return video.diff(dim=-1).square().mean() + video.diff(dim=-2).square().mean()


def main() -> None:
    """Train what is not trained yet, measure, print and write."""
    parser = argparse.ArgumentParser(description="few-step students against their teacher")
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--teacher-steps", type=int, default=800)
    parser.add_argument("--student-steps", type=int, default=60)
    parser.add_argument("--few", type=int, nargs="+", default=[4])
    parser.add_argument("--clips", type=int, default=32)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    configs = {"teacher": teacher_config(options.runs, options.teacher_steps)}
    configs |= {f"student-{few}": student_config(options.runs, options.student_steps, few) for few in options.few}
    for config in configs.values():
        if steps_done(config) < config.run.steps:
            train(config)
    clips = held_out_clips(configs["teacher"], options.clips)
    pipes = {name: read_model(config.run.out / "trained") for name, config in configs.items()}
    many = noise_levels(16, configs["teacher"].objective.shift)
    taught = by_teacher(configs[f"student-{options.few[0]}"], clips, many).clamp(-1, 1)
    rows = {"teacher, 16 steps": measured(pipes["teacher"], clips, taught, many)}
    for few in options.few:
        scheduler, levels = pipes["teacher"].scheduler, pipes[f"student-{few}"].denoising_levels
        assert levels is not None
        scheduler.set_timesteps(few)
        usual: list[float] = scheduler.sigmas[:-1].tolist()
        rows[f"teacher, {few} steps of its scheduler"] = measured(pipes["teacher"], clips, taught, usual)
        rows[f"teacher, {few} steps of the student"] = measured(pipes["teacher"], clips, taught, levels)
        rows[f"student, {few} steps"] = measured(pipes[f"student-{few}"], clips, taught, levels)
    for name, row in rows.items():
        print(f"{name:36} {json.dumps(row)}")
    if options.out is not None:
        about = {"clips": options.clips, "teacher_steps": options.teacher_steps, "student_steps": options.student_steps}
        report = {"about": about | {"torch": torch.__version__, "commit": commit()}, "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    began_s = time.perf_counter()
    main()
    print(f"{time.perf_counter() - began_s:.0f} s")

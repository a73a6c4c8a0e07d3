"""Videos of a row: the clips of a test, generated once from its trained weights and kept in its folder.

Those of a model with a VAE are kept as latents, which are a fraction of the size.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from merope.adapters.attachment import load_branch
from merope.bench.references import history_of
from merope.bench.run_facts import facts_of_run, vae_digest, weights_digest
from merope.draw.progress import ProgressLine
from merope.errors import invalid
from merope.formats.video import as_bytes
from merope.formats.writing import replacing
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.causal_clips import streamed_clip, streamed_latents
from merope.generate.frame_coding import VaeCoding
from merope.geometry.cameras import Cameras
from merope.geometry.lens_batches import stacked
from merope.train.build import world_clips
from merope.train.config import TrainConfig
from merope.train.provenance import device_name, provenance
from merope.world.commanded import CommandedClip, WorldTest, commanded_clips
from merope.world.revisits import EarlierDrives

CLIPS_ON_GPU, CLIPS_ON_CPU = 48, 3
"""Clips that are generated together; a clip's noise does not depend on it. On a CPU more would only hide progress."""

UNSAID_PRECISION = "fp32"
"""That of videos and results which do not say theirs."""

RUN = "run"
"""Where videos keep what results say of their run."""


def benchmark_tests(worlds: int, stretches: Sequence[float] = ()) -> list[WorldTest]:
    """The benchmark's own test, then one for every other stretch, in half as many worlds."""
    others = sorted(set(stretches) - {1.0})
    return [WorldTest(worlds), *(WorldTest((worlds + 1) // 2, stretch=stretch) for stretch in others)]


def generate_clips(
    pipeline: CameraVideoPipeline,
    commanded: Sequence[CommandedClip],
    test: WorldTest,
    prefix_frames: int,
    cameras: bool,
    output_type: Literal["pt", "latent"] = "pt",
    earlier: EarlierDrives | None = None,  # what they are shown of; for a model that takes history
) -> dict[str, Tensor]:  # name -> uint8 [T, H, W, 3], or for "latent" float16 [C, T', h, w], a fraction of its size
    """Generate every clip from its prefix; the noise of a clip depends on its world alone. Causal models stream."""
    pipeline.set_progress_bar_config(disable=True)
    device, videos = pipeline.transformer.device, dict[str, Tensor]()
    progress = ProgressLine("generating", len(commanded))
    if pipeline.causal_block_frames is not None:
        for clip in commanded:
            videos[clip.name] = _streamed(pipeline, clip, test, prefix_frames, cameras, output_type)
            progress.show(len(videos))
        return videos
    at_once = CLIPS_ON_CPU if device.type == "cpu" else CLIPS_ON_GPU
    for start in range(0, len(commanded), at_once):
        part = commanded[start : start + at_once]
        poses = torch.stack([clip.cameras.world_from_camera for clip in part])
        lens = stacked([clip.cameras.lens for clip in part])
        prefix = torch.stack([clip.true[:prefix_frames] for clip in part])
        frames = pipeline(
            cameras=Cameras(poses, lens, plan_dtype=torch.float32) if cameras else None,
            prefix=prefix,
            history=None if earlier is None else history_of(part, earlier),
            height=prefix.shape[2],
            width=prefix.shape[3],
            num_frames=poses.shape[1],
            num_inference_steps=test.steps,
            guidance_scale=1.0,
            generator=[torch.Generator(device).manual_seed(clip.seed) for clip in part],
            output_type=output_type,
            return_dict=False,
        )[0]
        made = (as_bytes(frames.movedim(2, -1)) if output_type == "pt" else frames.half()).cpu()
        videos |= {clip.name: video for clip, video in zip(part, made, strict=True)}
        progress.show(len(videos))
    return videos


def _streamed(
    pipeline: CameraVideoPipeline,
    clip: CommandedClip,
    test: WorldTest,
    prefix_frames: int,
    cameras: bool,
    output_type: Literal["pt", "latent"],
) -> Tensor:
    """A clip of `generate_clips` by a causal model."""
    streamed = streamed_clip if output_type == "pt" else streamed_latents
    given, prefix = clip.cameras if cameras else None, clip.true[:prefix_frames]
    options: dict[str, Any] = {"num_inference_steps": test.steps, "guidance_scale": 1.0, "seed": clip.seed}
    made = streamed(pipeline, clip.cameras.count, given, prefix, **options)
    return made if output_type == "pt" else made.half()


def pipeline_folder(config: TrainConfig) -> Path:
    """Of the model that a finished run drives: what it wrote, or what it began with if only a branch was trained."""
    is_whole = config.model.trainable == "all" or config.model.pretrained is None
    return config.run.out / "trained" if is_whole else Path(str(config.model.pretrained))


def load_trained(config: TrainConfig, device: torch.device) -> CameraVideoPipeline:
    """The pipeline of a finished run with its branch. The row without cameras has no branch."""
    folder = config.run.out / "trained"
    if not folder.is_dir():
        raise invalid(str(folder), "what a finished run wrote", "nothing", "train it first: merope bench world CONFIG")
    pipeline = CameraVideoPipeline.from_pretrained(pipeline_folder(config))
    if (folder / "branch").is_dir():
        load_branch(pipeline.transformer, folder / "branch")
    return pipeline.to(device)


def generated_file(config: TrainConfig, test: WorldTest) -> Path:
    """Where the videos of a row lie; those of a stretched test have their own file."""
    name = "generated" if test.stretch == 1.0 else f"generated-x{test.stretch:g}"
    return config.run.out / f"{name}.safetensors"


@torch.no_grad()
def kept_video(
    file: Path, name: str, vae: Path | None, device: torch.device
) -> Tensor:  # uint8 [T, H, W, 3], on the CPU
    """A clip of a file of `generate_row`."""
    with safe_open(file, "pt") as videos:
        kept: Tensor = videos.get_tensor(name)
    if vae is None:
        if kept.dtype != torch.uint8:
            fix = "run from the root of the checkout, with model.pretrained as a folder"
            raise invalid(f"{file}: {name}", "frames, or latents of a model whose VAE is in a folder", kept.dtype, fix)
        return kept
    with _without_tf32():
        frames = _coding(vae, device).decode_latents(kept[None].float())[0]
    return as_bytes((frames.movedim(0, -1) + 1.0) / 2.0).cpu()


@lru_cache(maxsize=1)
def _coding(vae: Path, device: torch.device) -> VaeCoding:
    """One for all clips of a row that a process decodes."""
    coding = VaeCoding(vae)
    coding.vae.to(device)
    return coding


@contextmanager
def _without_tf32() -> Iterator[None]:
    """As on a CPU, or scores would depend on the machine. Training in the same process keeps what it has."""
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def generate_row(config: TrainConfig, test: WorldTest, device: torch.device, rows_at_once: int = 1) -> Path:
    """Generate the test clips of a trained row into its folder. Videos of the same test, clips and weights are kept.

    They say what results say of the run; of that, `rows_at_once` is how many were trained side by side.
    """
    file, clips = generated_file(config, test), world_clips(config)
    precision, prefix = sampled_precision(config, device), config.objective.prefix_frames
    about = _made_from(config, test) | {"precision": precision}
    kept = about_videos(file)
    if kept and about.items() <= ({"precision": UNSAID_PRECISION, "vae": about["vae"]} | kept).items():
        if RUN not in kept:  # of an earlier version: said now, where weights and log are
            _write_videos(load_file(file), file, kept | about, config, rows_at_once)
        return file
    pipeline = load_trained(config, device)
    began_s = time.perf_counter()
    commanded = commanded_clips(test, clips, device, prefix)
    output: Literal["pt", "latent"] = "pt" if pipeline.vae is None else "latent"
    history = config.history
    earlier = None if history is None else EarlierDrives(clips, history.frames, pipeline.strides.frames)
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        videos = generate_clips(pipeline, commanded, test, prefix, config.branch != "none", output, earlier)
    about |= {"generated_s": f"{time.perf_counter() - began_s:.1f}", "gpu": device_name(device)}
    _write_videos(videos, file, about, config, rows_at_once)
    return file


def _write_videos(
    videos: dict[str, Tensor], file: Path, about: dict[str, str], config: TrainConfig, rows_at_once: int
) -> None:
    """Videos with what they are made from, and what results say of their run."""
    with replacing(file) as part:
        save_file(videos, part, about | {RUN: json.dumps(facts_of_run(config, rows_at_once))})


def _made_from(config: TrainConfig, test: WorldTest) -> dict[str, str]:
    """What the videos of a test must say, or they are of another test or of other weights."""
    about = {"test": json.dumps(vars(test)), "clips": repr(world_clips(config)), "vae": vae_digest(config)}
    return about | {"trained": weights_of(config)}


def is_generated(config: TrainConfig, test: WorldTest) -> bool:
    """Whether the videos of a test are there, made from what the config and its folder say."""
    about = about_videos(generated_file(config, test))
    return bool(about) and _made_from(config, test).items() <= about.items()


def check_generated(config: TrainConfig, test: WorldTest) -> None:
    """Refuse videos that cannot be scored as this row's without its weights."""
    file, about = generated_file(config, test), about_videos(generated_file(config, test))
    fix = "generate them where the weights are: merope bench world CONFIG --until generated"
    if not about:
        raise invalid(str(file), "what a row generated", "nothing", fix)
    if RUN not in about:
        raise invalid(str(file), "videos that say of which run they are", "some of an earlier version", fix)
    for what, wanted in _made_from(config, test).items():
        if about[what] != wanted:
            raise invalid(f"{what} of {file}", wanted, about[what], f"{fix}, from a checkout of the same commit")
    run, of_config = json.loads(about[RUN]), json.loads(json.dumps(provenance(config)))
    for key in ("row", "seed", "steps", "batch_size", "pretrained", "trainable", "branch"):
        if run[key] != of_config[key]:
            same = "name the config, the changes and the seed that it was made with"
            raise invalid(f"{key} of {file}", str(of_config[key]), run[key], same)


def weights_of(config: TrainConfig) -> str:
    """Digest of a row's weights. If they are not on this machine, its videos say it."""
    trained = config.run.out / "trained"
    return weights_digest(trained) if trained.is_dir() else _about_own_test(config).get("trained", "")


def known_facts(config: TrainConfig) -> dict[str, Any]:
    """What results say of a run: as its videos have it. Those of an earlier version do not; then its folder does."""
    said = _about_own_test(config).get(RUN)
    return facts_of_run(config, None) if said is None else json.loads(said)


def _about_own_test(config: TrainConfig) -> dict[str, str]:
    """What the videos of the benchmark's own test say."""
    return about_videos(generated_file(config, WorldTest()))


def sampled_precision(config: TrainConfig, device: torch.device) -> Literal["bf16", "fp32"]:
    """Of the transformer's arithmetic: on a GPU as in training, where fp32 takes many times as long. CPUs keep to fp32.

    Weights are fp32 under autocast, as in training. A VAE encodes in its own.
    """
    return config.model.precision if device.type == "cuda" else "fp32"


def about_videos(file: Path) -> dict[str, str]:
    """From what, on what and in what time videos were generated; empty if their file is missing or incomplete."""
    try:
        with safe_open(file, "pt") as videos:
            return videos.metadata() or {}
    except (OSError, SafetensorError):
        return {}

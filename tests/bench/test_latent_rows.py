"""Rows of a model with a VAE: kept as latents, decoded where they are scored, and shown to COLMAP."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file
from tiny_pipelines import miniature_vae

from merope.adapters.attachment import attach
from merope.bench import scores
from merope.bench.generated import generated_file, load_trained
from merope.bench.groups import MINIATURE
from merope.bench.rows import run_rows
from merope.bench.run_facts import vae_digest, weights_digest
from merope.bench.scorer import Scorer
from merope.bench.scores import COLMAP_ROWS, with_seed
from merope.bench.stills import read_stills, stills_file
from merope.evaluate.workers import InThisProcess
from merope.evaluate.world_scores import psnr_db
from merope.formats.video import as_bytes
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.frame_coding import VaeCoding
from merope.train.build import world_clips
from merope.train.config import TrainConfig
from merope.train.latent_pool import encoder_digest
from merope.train.toml_config import read_config
from merope.world.clips_file import read_clips
from merope.world.commanded import FIRST_TEST_SEED, MANOEUVRES, WorldTest, clips_of_world
from tests.train.tiny_runs import tiny_config

CPU = torch.device("cpu")
CONFIGS = Path(__file__).parents[2] / "configs" / "miniature"
TEST = WorldTest(worlds=1, steps=1)
BASE = "benchmarks/miniature_base"


def latent_config(folder: Path, *changes: str) -> TrainConfig:
    """Two given latent frames and one that is generated."""
    miniature_vae().save_pretrained(folder / "vae")
    sizes = ["model.architecture.in_channels=4", "model.architecture.out_channels=4"]
    clips = [
        "data.frames=9",
        "data.height=32",
        "data.width=64",
        "data.frame_rate_hz=16.0",
        "data.worlds=8",
        "data.first_worlds=8",
    ]
    patches = "model.architecture.patch_size=[1,2,2]"
    given = ["objective.prefix_frames=5", "run.steps=1", f"model.vae={folder / 'vae'}", patches]
    return with_seed(tiny_config(folder / "row", *sizes, *clips, *given, *changes), 0)


def test_a_row_of_latents_is_scored_by_both_estimators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "COLMAP_ROWS", 32)
    config = latent_config(tmp_path)
    scorer = Scorer(InThisProcess(), tmp_path / "results")
    assert run_rows([config], [TEST], scorer)
    kept = load_file(generated_file(config, TEST))
    assert {tensor.dtype for tensor in kept.values()} == {torch.float16}
    (result,) = scorer.written
    assert result == json.loads((tmp_path / "results" / "row-seed0.json").read_text())
    pipe, clips = load_trained(config, CPU), world_clips(config)
    stills = read_stills(stills_file(config, tmp_path / "results"))
    for clip in clips_of_world(TEST.paths(clips, FIRST_TEST_SEED), clips, FIRST_TEST_SEED, CPU):
        assert kept[clip.name].shape == (4, 3, 4, 8)
        decoded = pipe.decode_latents(kept[clip.name][None].float())[0]
        video = as_bytes((decoded.movedim(0, -1) + 1) / 2)
        shown = stills.pictures[0, MANOEUVRES.index(clip.manoeuvre)]
        greys = torch.stack([frames.float().mean(-1).flatten() for frames in (shown, video[stills.frames])])
        assert greys.corrcoef()[0, 1] > 0.9  # decoded noise, of which WebP loses the colours
        said = result["clips"][clip.name]
        assert said["psnr_db"] == pytest.approx(psnr_db(video[5:], clip.true[5:]), abs=1e-3)
        assert 0.0 <= said["colmap_percent"] <= 100.0
        assert {"colmap_rot_deg", "colmap_tr_percent"} <= set(said)
    assert 0.0 <= result["rows"]["floor"]["all"]["colmap_percent"] <= 100.0
    monkeypatch.setattr(scores, "COLMAP_WORLDS", 0)
    (job,) = scores.world_jobs(config, TEST, generated_file(config, TEST))
    assert {score.colmap for score in scores.scores_of([scores.score_world(job)])} == {None}


def test_a_row_of_which_the_branch_alone_is_trained(tmp_path: Path) -> None:
    base = latent_config(tmp_path)
    assert run_rows([base], [TEST], Scorer(InThisProcess(), None), until="trained")
    whole = base.run.out / "trained"
    start = replace(base.model, pretrained=str(whole), architecture=None, vae=None, trainable="branch")
    branch = replace(base, model=start, run=replace(base.run, out=tmp_path / "branch"))
    scorer = Scorer(InThisProcess(), tmp_path / "results")
    assert run_rows([branch], [TEST], scorer)
    assert {folder.name for folder in (branch.run.out / "trained").iterdir()} == {"branch"}
    assert len(scorer.written[0]["clips"]) == 3
    assert scorer.written[0]["trainable"] == "branch"
    assert scorer.written[0]["vae"] == weights_digest(whole / "vae") == vae_digest(base)


def test_the_base_model_fits_its_rows() -> None:
    pipe = CameraVideoPipeline.from_pretrained(CONFIGS.parents[1] / BASE, dtype=torch.float32)
    made, row = (read_config(TrainConfig, CONFIGS / f"{name}.toml", []) for name in ("base", "merope"))
    assert made.branch == "none"
    assert made.model.architecture is not None
    sizes = {name: tuple(v) if isinstance(v, list) else v for name, v in made.model.architecture.items()}
    assert sizes == {name: tuple(v) if isinstance(v := pipe.transformer.config[name], list) else v for name in sizes}
    assert read_clips(CONFIGS.parents[1] / BASE)[0] == world_clips(row) == world_clips(made)
    assert made.model.vae is not None
    assert encoder_digest(pipe.vae) == encoder_digest(VaeCoding(CONFIGS.parents[1] / made.model.vae).vae)
    assert pipe.causal_block_frames is None


def test_rows_of_compression_narrow_the_branch() -> None:
    """The numbers of docs/miniature-benchmark.md."""
    narrowed = {}
    for row in ("merope", *MINIATURE["Width of the branch"]):
        config = read_config(TrainConfig, CONFIGS / f"{row}.toml", [])
        assert config.branch != "none"
        with torch.device("meta"):
            sizes = WanTransformer3DModel.load_config(CONFIGS.parents[1] / BASE / "transformer")
            branch = attach(WanTransformer3DModel.from_config(sizes), config.branch)
        (heads,) = {(block.heads, block.encoding.head_dim) for block in branch.processors().values()}
        narrowed[config.branch.compression] = (*heads, sum(weight.numel() for weight in branch.parameters()))
    assert narrowed == {1: (3, 128, 2_365_440), 2: (1, 192, 1_183_488), 3: (1, 128, 789_504), 6: (1, 64, 395_520)}


@pytest.mark.parametrize("row", [row for rows in MINIATURE.values() for row in rows])
def test_rows_of_the_miniature_differ_in_their_cameras_alone(row: str) -> None:
    config, merope = (read_config(TrainConfig, CONFIGS / f"{name}.toml", []) for name in (row, "merope"))
    assert config.run.out == Path("outputs/miniature-rows") / row
    assert config.model.pretrained == BASE
    assert (config.run.steps, config.run.batch_size) == (merope.run.steps, merope.run.batch_size)
    assert (config.objective, config.optimiser) == (merope.objective, merope.optimiser)
    assert config.data.height >= COLMAP_ROWS
    if "mixed-lenses" not in row:
        assert config.data == merope.data

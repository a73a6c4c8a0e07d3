"""Training of a VAE: it learns, goes on exactly, ends in time, and what it writes is an AutoencoderKLWan."""

import json
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file

from merope.cli import main
from merope.generate.whole_clips import encode_clips
from merope.train.clip_pool import ClipPool
from merope.train.toml_config import read_config
from merope.train.vae_config import PoolSection, VaeTrainConfig
from merope.train.vae_loop import export_vae_checkpoint, train_vae
from merope.train.vae_model import build_vae, loss_terms, reconstructed
from merope.world.clips import HELD_OUT_SEEDS

CONFIGS = Path(__file__).parents[2] / "configs"
CPU = torch.device("cpu")


def tiny(out: Path, *changes: str) -> VaeTrainConfig:
    return read_config(VaeTrainConfig, CONFIGS / "tiny-vae.toml", [f"run.out={out}", *changes])


def logged(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "trained" / "vae" / "diffusion_pytorch_model.safetensors")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("vae") / "run"
    assert main(["train", str(CONFIGS / "tiny-vae.toml"), "--set", f"run.out={out}"]) == 0
    return out


def test_the_loss_falls_and_psnr_rises(trained: Path) -> None:
    rows = logged(trained)
    assert rows[-1]["step"] == 60
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    psnr = [row["psnr_db"] for row in rows if "psnr_db" in row]
    assert len(psnr) == 2
    assert psnr[1] > psnr[0]
    assert rows[-1]["learning_rate"] < 0.01 * rows[0]["learning_rate"]


def test_what_is_written_is_a_vae_with_the_statistics_of_its_latents(trained: Path) -> None:
    vae: Any = AutoencoderKLWan.from_pretrained(trained / "trained" / "vae")
    assert {value.dtype for value in weights(trained).values()} == {torch.bfloat16}
    vae.eval()
    config = tiny(trained)
    pool = ClipPool(config.data.world_clips(), 2, HELD_OUT_SEEDS, CPU)
    pool.fill(2)
    with torch.no_grad():
        latents = torch.cat([vae.encode(video).latent_dist.mode() for video in pool.videos(1)])
    torch.testing.assert_close(torch.tensor(vae.config.latents_mean), latents.mean((0, 2, 3, 4)), rtol=1e-3, atol=1e-4)
    std = latents.std((0, 2, 3, 4), correction=0)
    torch.testing.assert_close(torch.tensor(vae.config.latents_std), std, rtol=1e-3, atol=1e-4)


def test_the_report_is_measured_on_unseen_worlds(trained: Path) -> None:
    report = json.loads((trained / "trained" / "vae-report.json").read_text())
    vae: Any = AutoencoderKLWan.from_pretrained(trained / "trained" / "vae").float().eval()
    unseen = ClipPool(tiny(trained).data.world_clips(), 2, 0, CPU)
    unseen.fill(2)
    (video,) = unseen.videos(2)
    with torch.no_grad():
        error = vae.decode(vae.encode(video).latent_dist.mode()).sample - video
    expected = 10 * torch.log10(4.0 / error.square().mean((1, 2, 3, 4)))
    torch.testing.assert_close(torch.tensor(report["psnr_db_of_worlds"]), expected, rtol=0.0, atol=1e-2)
    assert report["steps"] == 60
    assert (trained / "trained" / "vae-sheet.png").is_file()


def test_a_run_goes_on_exactly(tmp_path: Path) -> None:
    growing = ("run.steps=6", "data.clips=3", "data.first_clips=1", "data.clips_per_step=4.0", "run.log_every=1")
    assert train_vae(tiny(tmp_path / "whole", *growing))
    half = tiny(tmp_path / "parts", *growing, "run.checkpoint_every=4", "run.keep_checkpoints=9")
    assert train_vae(half)
    for newer in ("checkpoints/step-00000006", "trained"):  # as if it had ended after step 4
        (tmp_path / "parts" / newer).rename(tmp_path / newer.replace("/", "-"))
    assert train_vae(half)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=0.0, atol=0.0)
    assert [row["step"] for row in logged(tmp_path / "parts")] == [1, 2, 3, 4, 5, 6]


def test_a_stopped_run_says_so_and_goes_on(tmp_path: Path) -> None:
    def stop_after_the_first_logged_step() -> None:
        while not (tmp_path / "log.jsonl").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    command = ["train", str(CONFIGS / "tiny-vae.toml"), "--set", f"run.out={tmp_path}", "--set", "run.log_every=1"]
    stopper = threading.Thread(target=stop_after_the_first_logged_step)
    stopper.start()
    assert main([*command, "--set", "run.steps=1000000"]) == 130
    stopper.join()
    assert not (tmp_path / "trained").exists()
    (place,) = (tmp_path / "checkpoints").iterdir()
    done = json.loads((place / "progress.json").read_text())["step"]
    assert main([*command, "--set", f"run.steps={done + 1}"]) == 0
    assert [row["step"] for row in logged(tmp_path)] == list(range(1, done + 2))
    assert (tmp_path / "trained" / "vae").is_dir()


def test_minutes_end_a_run_with_everything_written(tmp_path: Path) -> None:
    config = tiny(tmp_path, "run.steps=1000000", "run.minutes=0.05")
    assert train_vae(config)
    assert (tmp_path / "trained" / "vae" / "config.json").is_file()
    last = logged(tmp_path)[-1]
    assert last["minutes"] >= 0.05
    assert last["learning_rate"] < config.optimiser.learning_rate


def test_training_goes_on_from_a_saved_vae(trained: Path, tmp_path: Path) -> None:
    config = tiny(tmp_path, f"vae.pretrained={trained / 'trained' / 'vae'}")
    for name, value in build_vae(config, CPU).state_dict().items():
        torch.testing.assert_close(value, weights(trained)[name].float(), rtol=0.0, atol=0.0)
    with pytest.raises(ValueError, match=r"vae\.pretrained must be a VAE with z_dim = 6, got 4"):
        build_vae(tiny(tmp_path, f"vae.pretrained={trained / 'trained' / 'vae'}", "vae.architecture.z_dim=6"), CPU)


def test_a_checkpoint_is_exported(trained: Path) -> None:
    place = trained / "checkpoints" / "step-00000060"
    command = ["train", str(CONFIGS / "tiny-vae.toml"), "--set", f"run.out={trained}", "--export", str(place)]
    assert main(command) == 0
    exported = load_file(trained / "trained-00000060" / "vae" / "diffusion_pytorch_model.safetensors")
    for name, value in weights(trained).items():
        torch.testing.assert_close(exported[name], value, rtol=0.0, atol=0.0)


def test_a_checkpoint_without_its_time_is_refused(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints")
    place = tmp_path / "checkpoints" / "step-00000060"
    progress = json.loads((place / "progress.json").read_text())
    (place / "progress.json").write_text(json.dumps(progress | {"data": {}}))
    (place / "sha256-0.json").unlink()
    with pytest.raises(ValueError, match=r"elapsed_s in progress\.json must be a number of seconds, got None"):
        export_vae_checkpoint(tiny(tmp_path), place)


def test_other_settings_are_refused_in_the_same_folder(trained: Path) -> None:
    with pytest.raises(ValueError, match=r"a run with the same settings.*objective\.edges: 0\.5 before, 0\.1 now"):
        train_vae(tiny(trained, "objective.edges=0.1"))


def test_terms_of_the_loss() -> None:
    vae = build_vae(tiny(Path("unused")), CPU)
    vae.decoder.conv_out.weight.data *= 0.1  # decoding clamps nothing
    video = torch.rand(1, 3, 5, 32, 48, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.no_grad():
        terms = loss_terms(reconstructed(vae, video, torch.zeros(1, 4, 2, 4, 6)))
        posterior = vae.encode(video).latent_dist
        error = vae.decode(posterior.mode()).sample - video
        torch.testing.assert_close(encode_clips(vae, video), posterior.mode(), rtol=1e-4, atol=1e-5)
    right = (error[..., 1:] - error[..., :-1]).abs().mean()
    down = (error[..., 1:, :] - error[..., :-1, :]).abs().mean()
    expected = {"absolute": error.abs().mean(), "squared": error.square().mean(), "edges": right + down}
    for name, value in expected.items():
        torch.testing.assert_close(terms[name], value, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(terms["kl"], posterior.kl().sum() / posterior.mean.numel(), rtol=1e-4, atol=1e-6)


def test_crops_are_pieces_of_clips() -> None:
    data = replace(tiny(Path("unused")).data, clips=3)
    pool = ClipPool(data.world_clips(), 3, HELD_OUT_SEEDS, CPU)
    pool.fill(2)
    whole = torch.cat(list(pool.videos(1)))
    crops = pool.crops(2, 12, 5, torch.Generator().manual_seed(0))
    pieces = [whole[clip, :, start : start + 5] for clip in range(2) for start in range(5)]
    pieces += [piece.flip(-1) for piece in pieces]
    found = [[n for n, piece in enumerate(pieces) if torch.equal(piece, crop)] for crop in crops]
    assert all(len(places) == 1 for places in found)
    assert len({places[0] for places in found}) > 6
    assert {places[0] < len(pieces) // 2 for places in found} == {True, False}


def test_pools_grow_by_as_many_clips_as_are_rendered_at_once() -> None:
    data = PoolSection(clips=300, first_clips=256, clips_per_step=0.5)
    assert [data.growth.at(step) for step in (0, 31, 32, 64, 10_000)] == [256, 256, 272, 288, 300]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("vae.architecture.scale_factor_spatial=4", r"vae\.scale_factor_spatial must be 8, .*, got 4"),
        ("vae.architecture.scale_factor_temporal=8", r"vae\.scale_factor_temporal must be 4, .*, got 8"),
        ("vae.architecture.depth=3", r"vae\.architecture must be sizes of an AutoencoderKLWan"),
        ("vae.pretrained=nowhere", r"vae\.pretrained must be the folder of a saved VAE, got nowhere"),
        ("data.height=36", r"data\.height must be a multiple of 8, got 36"),
        ("data.crop_frames=8", r"data\.crop_frames must be 4k \+ 1 frames"),
        ("data.first_clips=3", r"data\.first_clips must be in \[1, data\.clips = 2\], got 3"),
        ("run.minutes=0", r"run\.minutes must be positive"),
        ("objective.half_size=2", r"objective\.half_size must be in \[0, 1\], got 2"),
        ("optimiser.matrices=muon", r"optimiser\.matrices must be \"adamw\" for a VAE, got 'muon'"),
        ("optimiser.decay_steps=5", r"optimiser\.decay_steps must be 0 for a VAE, got 5"),
    ],
)
def test_refusals(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_vae(tiny(tmp_path, change), CPU)


def test_the_vae_of_the_miniature() -> None:
    config = read_config(VaeTrainConfig, CONFIGS / "miniature-vae.toml")
    with torch.device("meta"):
        vae: Any = AutoencoderKLWan(**config.vae.architecture)
    assert sum(parameter.numel() for parameter in vae.parameters()) <= 10_000_000
    assert (config.data.frames, config.data.height, config.data.width) == (49, 144, 256)


def test_a_decoder_alone_is_trained_without_a_change_of_the_latents(trained: Path, tmp_path: Path) -> None:
    before = trained / "trained" / "vae"
    train_vae(tiny(tmp_path, f"vae.pretrained={before}", "vae.trainable=decoder", "run.steps=3"))
    old, new = weights(trained), weights(tmp_path)
    changed = {name.split(".")[0] for name in old if not torch.equal(old[name], new[name])}
    assert changed == {"decoder", "post_quant_conv"}
    configs = [json.loads((folder / "config.json").read_text()) for folder in (before, tmp_path / "trained" / "vae")]
    for name in ("latents_mean", "latents_std"):
        assert configs[0][name] == configs[1][name]


def test_a_decoder_alone_needs_a_vae_to_begin_with(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'vae\.pretrained must be given with trainable = "decoder", got None'):
        tiny(tmp_path, "vae.trainable=decoder")


def test_half_size_asks_for_latents_that_may_be_shrunk(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    vae = build_vae(config, CPU)
    pool = ClipPool(config.data.world_clips(), 2, HELD_OUT_SEEDS, CPU)
    pool.fill(2)
    (video,) = pool.videos(2)
    with torch.no_grad():
        mean = encode_clips(vae, video)
        terms = loss_terms(reconstructed(vae, video, torch.zeros_like(mean), half_size=True))
        shrunk = torch.nn.functional.interpolate(mean.flatten(0, 1), scale_factor=0.5, mode="area")
        decoded = vae.decode(shrunk.unflatten(0, mean.shape[:2])).sample
        small = torch.nn.functional.interpolate(video.flatten(0, 1), scale_factor=0.5, mode="area")
    expected = (decoded - small.unflatten(0, video.shape[:2])).abs().mean()
    torch.testing.assert_close(terms["absolute"], expected, rtol=1e-2, atol=0)  # but for what `decode` clamps
    train_vae(tiny(tmp_path, "objective.half_size=1", "run.steps=2"))
    with pytest.raises(ValueError, match=r"data\.height must be a multiple of 16, got 40"):
        train_vae(tiny(tmp_path, "objective.half_size=1", "data.height=40"))

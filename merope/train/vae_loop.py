"""Training of a VAE, from a config to a folder. Run the same command again to go on after any stop."""

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from merope.errors import invalid
from merope.train import checkpoint
from merope.train.clip_pool import ClipPool
from merope.train.log import TrainingLog
from merope.train.loop import check_same_run, due, hold, non_finite, stop_requests
from merope.train.optimisers import begin_step, build_optimisers, moving_average, update_average
from merope.train.picture_judge import PictureJudge, aim_of_sharpness, judged_pictures
from merope.train.vae_config import VaeTrainConfig
from merope.train.vae_model import (
    AT_ONCE,
    Reconstruction,
    build_vae,
    export_vae,
    loss_terms,
    mean_worth,
    reconstructed,
    worth,
)
from merope.world.clips import HELD_OUT_SEEDS

Reconstruct = Callable[[Any, Tensor, Tensor, bool], Reconstruction]


@dataclass(frozen=True, eq=False)
class VaeRun:
    """What a run works with."""

    config: VaeTrainConfig
    device: torch.device
    vae: Any  # AutoencoderKLWan
    optimisers: list[Optimizer]
    average: dict[str, Tensor]
    pool: ClipPool  # trained on
    unseen: ClipPool
    reconstructed: Reconstruct
    judge: PictureJudge | None = None

    @classmethod
    def of(cls, config: VaeTrainConfig) -> "VaeRun":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.backends.cudnn.benchmark = True  # sizes never change
        vae = build_vae(config, device)
        judge = None if config.adversary is None else PictureJudge().to(device)
        optimisers, average = build_optimisers(config, learner(vae, judge)), moving_average(config, vae)
        clips, data = config.data.world_clips(), config.data
        pool = ClipPool(clips, data.clips, HELD_OUT_SEEDS + config.run.seed * data.clips, device)
        unseen = ClipPool(clips, data.held_out_worlds, 0, device)
        make: Reconstruct = torch.compile(reconstructed, fullgraph=True) if config.vae.compile else reconstructed
        return cls(config, device, vae, optimisers, average, pool, unseen, make, judge)

    @property
    def learner(self) -> nn.Module:
        return learner(self.vae, self.judge)

    def averaged_vae(self) -> Any:
        """A copy with the averaged weights."""
        copy = deepcopy(self.vae).eval()
        copy.load_state_dict(self.average, strict=False)  # empty where no average is wanted
        return copy

    def latent_shape(self, clips: int) -> tuple[int, ...]:  # [B, C, T', H', W']
        """Of the latents of a step."""
        sizes, data = self.vae.config, self.config.data
        pixels, frames = sizes["scale_factor_spatial"], sizes["scale_factor_temporal"]
        grid = (data.crop_frames - 1) // frames + 1, data.height // pixels, data.width // pixels
        return clips, sizes["z_dim"], *grid

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.vae.precision == "bf16")


def learner(vae: Any, judge: PictureJudge | None) -> nn.Module:
    """All that is trained: the VAE, and its judge where there is one."""
    return vae if judge is None else nn.ModuleDict({"vae": vae, "judge": judge})


def train_vae(config: VaeTrainConfig) -> bool:
    """Train to the end of the run; then its folder `trained` has the VAE. Returns False if it was stopped before."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise invalid("WORLD_SIZE", "1 for a VAE", os.environ["WORLD_SIZE"], "start it without torchrun")
    with ExitStack() as held:
        hold(config.run.out, held)
        return _train(config)


def _train(config: VaeTrainConfig) -> bool:
    began_s, out, data = time.perf_counter(), config.run.out, config.data
    run = VaeRun.of(config)
    begun, before_s = resume(run)
    (out / "config.json").write_text(json.dumps(asdict(config), default=str, indent=1))
    log = TrainingLog(out, config.run.steps, begun, config.run.batch_size, enabled=True)
    count = sum(parameter.numel() for parameter in run.vae.parameters())
    log.say(f"{count:,} parameters; {begun} steps are done in {before_s / 60:.1f} minutes")
    run.unseen.fill(data.held_out_worlds)
    done = begun

    def elapsed_s() -> float:
        return before_s + time.perf_counter() - began_s

    share, last = config.share_done(done, elapsed_s()), False
    if share < 1.0:
        run.pool.fill(data.growth.at(done))  # a signal ends this at once: there is nothing new to save yet
    with stop_requests() as stop_wanted:
        while share < 1.0 and not last:
            rate = config.learning_rate(done, share)
            terms, norm = train_step(run, done, rate)
            done += 1
            share = config.share_done(done, elapsed_s())
            last = share >= 1.0 or stop_wanted()
            saving = due(done, config.run.checkpoint_every) or last
            validating = due(done, config.run.validate_every) or last
            if not (saving or validating or due(done, config.run.log_every)):
                continue
            numbers = {name: float(value) for name, value in (terms | {"gradient_norm": norm}).items()}
            if bad := [name for name, value in numbers.items() if not abs(value) < float("inf")]:
                raise non_finite(config, done - 1, ", ".join(bad))
            numbers |= {"learning_rate": rate, "minutes": elapsed_s() / 60}
            if validating:
                numbers |= validate(run)
            log.steps = max(done, round(done / share))  # as many as the minutes allow
            log.step(done, numbers, show=True)
            if saving:
                progress = checkpoint.Progress(done, {"elapsed_s": elapsed_s()}, config.learnt())
                keep = config.run.keep_checkpoints
                checkpoint.save(out / "checkpoints", progress, run.learner, run.optimisers, run.average, keep)
    log.close()
    if share < 1.0:
        log.say(f"stopped after step {done}; the same command goes on from there")
        return False
    log.say(_exported(run, done, elapsed_s(), out / "trained"))
    return True


def train_step(run: VaeRun, step: int, rate: float) -> tuple[dict[str, Tensor], Tensor]:
    """One step of the optimiser: the loss and its terms, and the gradient's norm before clipping. Waits for nothing."""
    config, data, size = run.config, run.config.data, run.config.run.batch_size
    clips = data.growth.at(step)
    run.pool.fill(clips)
    seed = int(np.random.SeedSequence((config.run.seed, step)).generate_state(1, np.uint64)[0] >> 1)
    drawn = torch.Generator().manual_seed(seed)
    video = run.pool.crops(clips, size, data.crop_frames, drawn)
    half_size = bool(torch.rand((), generator=drawn) < config.objective.half_size)
    dice = torch.Generator(run.device).manual_seed(seed)
    noise = torch.randn(run.latent_shape(size), device=run.device, generator=dice)
    begin_step(run.optimisers, rate)
    with run.autocast():
        clip = run.reconstructed(run.vae, video, noise, half_size)
    terms = loss_terms(clip)
    loss = torch.stack([getattr(config.objective, name) * term for name, term in terms.items()]).sum()
    numbers = {"loss": loss.detach(), **{name: term.detach() for name, term in terms.items()}}
    if run.judge is None:
        loss.backward()
    else:
        numbers |= judged_step(run, run.judge, clip, loss, step, dice)
    norm = nn.utils.clip_grad_norm_(run.vae.parameters(), config.optimiser.clip_norm)
    for optimiser in run.optimisers:
        optimiser.step()
    update_average(run.average, run.vae, config.optimiser.ema_decay, step)
    return numbers, norm


def judged_step(
    run: VaeRun, judge: PictureJudge, clip: Reconstruction, loss: Tensor, step: int, dice: torch.Generator
) -> dict[str, Tensor]:
    """Gradients of both aims of the VAE, and of its judge's; what the judge is worth."""
    assert run.config.adversary is not None
    aim = aim_of_sharpness(judge, loss, clip.decoded, clip.video, run.config.adversary.weight_at(step))
    (loss + aim).backward()
    judged = judged_pictures(judge, clip.decoded, clip.video, dice)
    judged.loss.mean().backward()
    norm = nn.utils.clip_grad_norm_(judge.parameters(), run.config.optimiser.clip_norm)
    told_apart = judged.told_apart.mean()
    return {"judge_loss": judged.loss.detach().mean(), "told_apart": told_apart, "judge_gradient_norm": norm}


@torch.no_grad()
def validate(run: VaeRun) -> dict[str, float]:
    """What the averaged weights are worth on clips of unseen worlds."""
    with run.autocast():
        return mean_worth(worth(run.averaged_vae(), run.unseen.videos(AT_ONCE)))


def resume(run: VaeRun) -> tuple[int, float]:  # steps that are done, seconds that they took
    """Go on from the newest checkpoint that can be read. A run that learnt something else is refused."""
    config, parts = run.config, (run.learner, run.optimisers, run.average)
    folder = config.run.out / "checkpoints"
    progress = checkpoint.resume(folder, lambda before: check_same_run(before.learnt, config), *parts)
    return (0, 0.0) if progress is None else (progress.step, _elapsed_s(progress))


@checkpoint.naming_a_whole_one()
def export_vae_checkpoint(config: VaeTrainConfig, place: Path) -> Path:
    """Write the VAE of a checkpoint of a run that has not ended."""
    progress = checkpoint.read_progress(place)
    check_same_run(progress.learnt, config)
    elapsed_s = _elapsed_s(progress)
    run = VaeRun.of(config)
    checkpoint.load(place, run.learner, run.optimisers, run.average)
    run.unseen.fill(config.data.held_out_worlds)
    folder = config.run.out / f"trained-{progress.step:08d}"
    print(_exported(run, progress.step, elapsed_s, folder))
    return folder


def _elapsed_s(progress: checkpoint.Progress) -> float:
    value = progress.data.get("elapsed_s")
    if not isinstance(value, int | float):
        raise invalid("elapsed_s in progress.json", "a number of seconds", repr(value), "write the number there")
    return float(value)


def _exported(run: VaeRun, step: int, elapsed_s: float, folder: Path) -> str:
    run.pool.fill(run.config.data.first_clips)
    about = {"steps": step, "minutes": elapsed_s / 60, "unseen_worlds": len(run.unseen.frames)}
    means = export_vae(run.averaged_vae(), run.pool, run.unseen, about, folder)
    worlds = f"{len(run.unseen.frames)} unseen worlds"
    return f"{means['psnr_db']:.2f} dB and {means['sharpness']:.2f} of the sharpness on {worlds}"

"""The training loop, from a config to a trained adapter. Run the same command again to go on after any stop."""

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from merope.errors import invalid
from merope.formats.writing import replace_text, require_writable
from merope.train import checkpoint, parallel
from merope.train.adversary import LOSS, Part
from merope.train.build import build_stream
from merope.train.config import TrainConfig
from merope.train.context import ContextParallel
from merope.train.export import export
from merope.train.latent_pool import PooledStream
from merope.train.log import TrainingLog, stall_notice
from merope.train.losses import loss_parts
from merope.train.model import Model, build_model
from merope.train.objective import VALIDATION
from merope.train.optimisers import (
    begin_step,
    build_optimisers,
    learning_rate,
    moving_average,
    update_average,
)
from merope.train.parallel import Ranks
from merope.train.samples import check_packages, write_sample
from merope.train.streams import Stream
from merope.train.vae_config import VaeTrainConfig


class NonFiniteLoss(ValueError):
    """Training cannot go on: the weights of the last checkpoint are the last good ones."""


def train(config: TrainConfig) -> Path:
    """Train to config.run.steps. Returns the run's folder; what was trained is in its folder `trained`."""
    ranks = parallel.start(config.parallel)
    try:
        with ExitStack() as held:
            return _train(config, ranks, held)
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
        if "No space left on device" not in str(error) or str(config.run.out) in str(error):
            raise
        kept = "checkpoints stay as they are; make room and run the same command again"
        raise OSError(f"no space is left to write {config.run.out}: {kept}") from None
    finally:
        parallel.stop()


def _train(config: TrainConfig, ranks: Ranks, held: ExitStack) -> Path:
    out = config.run.out
    config.data.check_files()
    if config.run.sample_every:
        check_packages()
    is_new = not out.exists()
    if ranks.is_first:  # before minutes of loading
        require_writable("run.out", out)
        if not is_new:
            hold(out, held)
    model = build_model(config, ranks.device, sharded=ranks.world_size > 1)
    stream = build_stream(config, model, ranks)
    if config.parallel.context > 1:
        model = replace(model, context=ContextParallel(model.transformer, ranks.context_group()))
    for transformer in (*model.transformers.values(), *([] if model.teacher is None else [model.teacher])):
        parallel.shard_model(transformer, ranks, config.model.precision)
    optimisers = build_optimisers(config, model.learner)
    average = moving_average(config, model.learner)
    if ranks.is_first and is_new:  # not before: a model that is refused leaves no folder
        hold(out, held)
    done = resume(config, model, optimisers, average, stream)
    if ranks.is_first:
        replace_text(out / "config.json", json.dumps(asdict(config), default=str, indent=1))
    log = TrainingLog(out, config.run.steps, done, config.run.batch_size, ranks.is_first)
    trained, all_parameters = model.parameter_counts()
    log.say(f"{trained:,} of {all_parameters:,} parameters are trained; {done} of {config.run.steps} steps are done")
    if isinstance(stream, PooledStream) and done < config.run.steps:
        stream.fill(done)  # a signal ends this at once: there is nothing new to save yet
    with stop_requests() as stop_wanted, stall_notice(ranks.rank) as begin:
        for step in range(done, config.run.steps):
            begin(f"step {step + 1}")
            loss, norm, others = train_step(config, model, stream, optimisers, ranks, step)
            update_average(average, model.learner, config.optimiser.ema_decay, step)
            numbers = {"loss": loss, "gradient_norm": norm, "learning_rate": learning_rate(config, step), **others}
            done = step + 1
            if due(done, config.run.validate_every) and config.run.validation_clips:
                numbers |= validate(config, model, stream, ranks)
            log.step(done, numbers, show=due(done, config.run.log_every) or done == config.run.steps)
            if due(done, config.run.sample_every):
                file = out / "samples" / f"step-{done:08d}.mp4"
                write_sample(model, stream.example(), config.sample_steps, file, write=ranks.is_first)
            stopping = bool(ranks.sum([stop_wanted()])[0])
            if due(done, config.run.checkpoint_every) or stopping or done == config.run.steps:
                progress = checkpoint.Progress(done, stream.state_dict(), _plain(config.learnt()))
                keep = config.run.keep_checkpoints
                checkpoint.save(out / "checkpoints", progress, model.learner, optimisers, average, keep)
            if stopping:
                log.say(f"stopped after step {done}; the same command goes on from there")
                break
    log.close()
    if done == config.run.steps:
        export(model, config, average, out / "trained")
    return out


def hold(out: Path, held: ExitStack) -> None:
    """Lock the run's folder. A folder that another run writes to is refused: each would delete the other's files.

    This happens when a job goes back into a queue and begins again while its last checkpoint is still being written.
    """
    out.mkdir(parents=True, exist_ok=True)
    try:
        held.enter_context(FileLock(out / "run.lock", timeout=0))
    except Timeout:
        fix = f"wait for it to end, use another run.out, or delete {out / 'run.lock'} if no run is left"
        raise invalid("run.out", "a folder that no other run is writing to", str(out), fix) from None
    except (OSError, NotImplementedError):  # a file system without locks: runs go on as if alone
        return


@checkpoint.naming_a_whole_one()
def export_checkpoint(config: TrainConfig, place: Path) -> Path:
    """Write the trained folders of a checkpoint, whatever ranks wrote it, in one process."""
    progress = checkpoint.read_progress(place)
    check_same_run(progress.learnt, config)
    model = build_model(config, torch.device("cpu"), sharded=False)
    checkpoint.load_weights(place, model.learner, averaged=config.optimiser.ema_decay is not None)
    folder = config.run.out / f"trained-{progress.step:08d}"
    export(model, config, {}, folder)
    return folder


def train_step(
    config: TrainConfig, model: Model, stream: Stream, optimisers: Sequence[Optimizer], ranks: Ranks, step: int
) -> tuple[float, float, dict[str, float]]:
    """One step of the optimiser: mean loss of the global batch, the gradient's norm before clipping, and the numbers
    of a mixture's sources or of a judge."""
    begin_step(optimisers, learning_rate(config, step))
    names: list[str] = []
    losses: list[Tensor] = []
    sources: list[int] = []
    judged: dict[str, Tensor] = {}
    for examples in stream.step(step):
        clip_loss = torch.zeros(len(examples.names), device=model.device)
        for name, part in loss_parts(config, model, examples, step):
            # FSDP takes the mean of all ranks' gradients; the sum over clips divided by their number is wanted.
            if part.requires_grad:
                (part.sum() * (ranks.world_size / config.run.batch_size)).backward()
            if name == LOSS:
                clip_loss = clip_loss + part.detach()
            else:
                judged[name] = judged.get(name, 0.0) + part.detach().sum() / config.run.batch_size
        names += examples.names
        sources += examples.sources
        losses.append(clip_loss)
    # Read after the losses: one wait for all.
    norm_here = nn.utils.clip_grad_norm_(model.denoiser.parameters(), config.optimiser.clip_norm)
    if model.judge is not None:  # its gradients are of another size
        judged["judge_gradient_norm"] = nn.utils.clip_grad_norm_(model.judge.parameters(), config.optimiser.clip_norm)
    per_clip = torch.cat(losses).tolist()
    bad = [name for name, loss in zip(names, per_clip, strict=True) if not loss < float("inf")]
    loss, failures, *of_sources = ranks.sum([sum(per_clip), len(bad), *_source_sums(config, sources, per_clip)])
    if failures:
        raise non_finite(config, step, "the loss of " + ", ".join(ranks.gather_names(bad)))
    norm, others = parallel.as_number(norm_here), {name: float(number) for name, number in judged.items()}
    for name, number in {"the gradient": norm, **others}.items():
        if not number < float("inf"):
            raise non_finite(config, step, name)
    for optimiser in optimisers:
        optimiser.step()
    return loss / config.run.batch_size, norm, _source_numbers(config, "loss", of_sources) | others


def validate(config: TrainConfig, model: Model, stream: Stream, ranks: Ranks) -> dict[str, float]:
    """Mean loss of the held-out clips, of all and of each source of a mixture, with the same noise every time."""
    per_clip, sources = list[float](), list[int]()
    model.learner.zero_grad()  # what a graph keeps takes the place of the last step's gradients
    with torch.set_grad_enabled(config.model.compile and ranks.world_size == 1):  # or it would be compiled once more
        for examples in stream.held_out(config.run.validation_clips):
            parts = map(_without_graph, loss_parts(config, model, examples, VALIDATION))
            per_clip += torch.stack(list(parts)).sum(0).tolist()
            sources += examples.sources
    total, count, *of_sources = ranks.sum([sum(per_clip), len(per_clip), *_source_sums(config, sources, per_clip)])
    loss = total / (count / config.parallel.context)  # ranks that share a clip have counted it each
    return {"validation_loss": loss, **_source_numbers(config, "validation_loss", of_sources)}


def _without_graph(part: Part) -> Tensor:  # so that the graph of one part is gone before the next is made
    return part[1].detach()


def _source_sums(config: TrainConfig, sources: Sequence[int], per_clip: Sequence[float]) -> list[float]:
    """For every source of a mixture the sum of its clips' losses, then for each how many there are, on this rank."""
    names = config.data.source_names
    losses, counts = [0.0] * len(names), [0.0] * len(names)
    for source, loss in zip(sources, per_clip, strict=bool(names)):
        losses[source] += loss
        counts[source] += 1.0
    return losses + counts


def _source_numbers(config: TrainConfig, what: str, sums: Sequence[float]) -> dict[str, float]:
    """Mean loss and number of clips of every source that had any."""
    names, clips = config.data.source_names, "clips" if what == "loss" else "validation_clips"
    numbers: dict[str, float] = {}
    for name, loss, count in zip(names, sums[: len(names)], sums[len(names) :], strict=True):
        if count:
            clips_of_all = count / config.parallel.context
            numbers |= {f"{what}/{name}": loss / clips_of_all, f"{clips}/{name}": clips_of_all}
    return numbers


def resume(
    config: TrainConfig, model: Model, optimisers: Sequence[Optimizer], average: dict[str, Tensor], stream: Stream
) -> int:  # steps that are done
    """Go on from the newest checkpoint that can be read. A run that learnt something else is refused."""

    def check(before: checkpoint.Progress) -> None:
        check_same_run(before.learnt, config)
        if before.step > config.run.steps:
            fix = "ask for more steps, or use another run.out"
            raise invalid("run.steps", f"at least the {before.step} that {config.run.out} has", config.run.steps, fix)

    progress = checkpoint.resume(config.run.out / "checkpoints", check, model.learner, optimisers, average)
    if progress is None:
        return 0
    stream.load_state_dict(progress.data)
    return progress.step


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM or Ctrl-C has come; the loop then ends after its step. A second Ctrl-C ends it at once.

    Handlers that were set before are called when the loop has ended: one of them may end the program. A program that
    trains several models thus learns of a signal that came in the last step of one, and does not begin the next.
    """
    asked: list[int] = []

    def note(number: int, frame: object) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number, handler in before.items():
            if number in asked and callable(handler) and handler is not signal.default_int_handler:
                handler(number, None)


def due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens after this one."""
    return every > 0 and step % every == 0


def check_same_run(before: dict[str, Any], config: TrainConfig | VaeTrainConfig) -> None:
    now = _flat(_plain(config.learnt()))
    before = {key: value for key, value in _plain(_defaults(config)).items() if key in now} | _flat(before)
    keys = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    if keys:
        got = "; ".join(f"{key}: {before.get(key)} before, {now.get(key)} now" for key in keys)
        fix = "use another run.out, or the old config"
        raise invalid(str(config.run.out), "a run with the same settings", got, fix)


def _defaults(config: TrainConfig | VaeTrainConfig) -> dict[str, Any]:
    """Of the keys of all sections: what a run did before there was such a key."""
    sections = {part.name: getattr(config, part.name) for part in fields(config)}
    return {
        f"{name}.{key.name}": key.default
        for name, section in sections.items()
        if is_dataclass(section)
        for key in fields(section)
        if key.default is not MISSING
    }


def non_finite(config: TrainConfig | VaeTrainConfig, step: int, what: str) -> NonFiniteLoss:
    places = checkpoint.complete(config.run.out / "checkpoints")
    last = f"the last good checkpoint is {places[-1]}" if places else "no checkpoint was written yet"
    return NonFiniteLoss(f"step {step + 1}: {what} is not finite; {last}; nothing was overwritten")


def _plain(table: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from JSON."""
    return json.loads(json.dumps(table, default=str))


def _flat(table: dict[str, Any], section: str = "") -> dict[str, Any]:
    """Nested tables by dotted keys, as `--set` names them."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{section}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return flat

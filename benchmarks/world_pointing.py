"""How sharply attention points at what a token is going to show: by geometry alone, and in trained branches.

    python benchmarks/world_pointing.py [--rows raynova "merope KEY=VALUE" ...] [--models NAME=FOLDER ...]
        [--out benchmarks/results/world-pointing.json]

For tokens of later frames of a drive through the procedural world, the renderer knows which token of the last given
frame shows the same point of a surface. Measured is the mean of −log(attention on that token) among those of its frame,
in nats; exp of it is "as if spread evenly over so many tokens", 144 is chance.

Rows: one attention head without content, its query and its key the same for all tokens, is fitted on some drives and
measured on others. What it can reach depends on the lengths of query and key, which are fixed: their entries have an
rms of `gain`. Encodings and lenses are those of configs/world, with changes behind a row's name where wanted.

Models: folders of trained rows (`outputs/world/ucpe-seed0/trained`); the one in the package is the default. Every head
of their camera branches, on true frames of unseen drives with noise, and the share of its attention that goes to the
last given frame. What was measured before of other rows, gains and models stays in the file.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import merope
from merope import AttentionPlan, Cameras
from merope.adapters.branch_config import make_encoding
from merope.adapters.camera_attention import CameraAttention
from merope.demo.drive import loaded
from merope.errors import invalid
from merope.train.build import world_clips
from merope.train.config import TrainConfig
from merope.train.provenance import commit, device_name
from merope.train.toml_config import read_config
from merope.world.clips import WorldClips, as_video
from merope.world.render import correspondences, render
from merope.world.scene import World

CONFIGS = Path(__file__).parents[1] / "configs" / "world"
ROWS = ("none", "gta", "prope", "ucpe", "raynova", "urope", "merope", "direction-phases")
"""Encodings that are functions of cameras alone. A head without content has nothing for the others to read."""
GRID, HEAD_DIM = (9, 16), 128
LAST_GIVEN, LATER = 2, (4, 6, 8, 10, 12)  # frames
CLIPS, STARTS, STEPS = 16, 4, 150
MEASURED_ON, FITTED_ON = range(CLIPS), range(CLIPS, 2 * CLIPS)  # seeds of drives
NOISE = (0.3, 0.7, 0.95)  # share of noise in the frames to be generated

Row = dict[str, Any]


@dataclass(frozen=True)
class Pairs:
    """Tokens of later frames and where the last given frame shows the same points."""

    queries: Cameras  # [B, len(LATER)]
    keys: Cameras  # [B, 1]
    target: Tensor  # int64 [B, query tokens], key tokens
    visible: Tensor  # bool [B, query tokens]


def pairs_of(clips: WorldClips, seeds: range) -> Pairs:
    """The drives of some seeds, with the surfaces behind the centres of their tokens."""
    cameras = clips.cameras(list(seeds))
    poses, lens = cameras.world_from_camera, cameras.lens
    found = []
    for seed, path in zip(seeds, poses, strict=True):
        own = clips.lens(seed)
        later, given = Cameras(path[list(LATER)], own), Cameras(path[[LAST_GIVEN] * len(LATER)], own)
        seen = render(World(seed).cleared(path), later, *GRID, samples=1)  # a pixel for every token
        found.append(correspondences(seen, later, given))
    pixels, visible = (torch.stack(parts) for parts in zip(*found, strict=True))
    size = pixels.new_tensor([lens.width / GRID[1], lens.height / GRID[0]])
    column, row = (pixels / size).long().unbind(-1)
    target = row.clamp(0, GRID[0] - 1) * GRID[1] + column.clamp(0, GRID[1] - 1)
    return Pairs(
        Cameras(poses[:, list(LATER)], lens, plan_dtype=torch.float32),
        Cameras(poses[:, [LAST_GIVEN]], lens, plan_dtype=torch.float32),
        target.flatten(1),
        visible.flatten(1),
    )


def config_of(row: str) -> TrainConfig:
    """A row of configs/world with the changes behind its name."""
    name, *changes = row.split()
    if name not in ROWS:
        raise invalid(
            "--rows", f"one of {', '.join(ROWS)}, with changes behind it", repr(row), "the others read content"
        )
    return read_config(TrainConfig, CONFIGS / f"{name}.toml", changes)


def plan_of(config: TrainConfig, pairs: Pairs) -> AttentionPlan:
    """The plan of a row's encoding; values stay as they are, because here they are marks."""
    branch = config.branch
    if branch == "none":
        encoding = merope.encoding("none", head_dim=HEAD_DIM)
    else:
        encoding = make_encoding(branch.encoding, HEAD_DIM, branch.encoding_options, branch.translation_scale)
    times, key_times = [float(frame) for frame in LATER], [float(LAST_GIVEN)]
    plan = encoding.plan(pairs.queries, GRID, key=pairs.keys, times=times, key_times=key_times)
    return replace(plan, transform_values=False)


def marked(
    q: Tensor,  # [B, H, Nq, d]
    k: Tensor,  # [B, H, Nk, d]
    plan: AttentionPlan,
    first_key: int,
) -> Tensor:  # [B, H, Nq, tokens of a frame]
    """Attention weights on the key tokens of one frame: values are marks, as many at a time as a head has channels."""
    width, last_key = q.shape[-1], first_key + GRID[0] * GRID[1]
    parts = []
    for first in range(first_key, last_key, width):
        marks = torch.arange(plan.key_tokens, device=q.device)[:, None] == torch.arange(
            first, first + width, device=q.device
        )
        parts.append(merope.attend(q, k, marks.to(q.dtype).expand(*q.shape[:2], -1, -1).contiguous(), plan))
    return torch.cat(parts, dim=-1)[..., : last_key - first_key]


def missed(weights: Tensor, pairs: Pairs) -> Tensor:  # [B, H, query tokens, key tokens of a frame] -> [H] nats
    """Mean −log(weight on the right token) of every head."""
    target = pairs.target[:, None, :, None].expand(-1, weights.shape[1], -1, -1)
    right = weights.gather(-1, target).squeeze(-1) / weights.sum(dim=-1)
    visible = pairs.visible[:, None]
    return (-right.clamp_min(1e-12).log() * visible).sum(dim=(0, 2)) / visible.sum()


def fitted(row: str, gain: float, train: Pairs, test: Pairs) -> Row:
    """The best of some heads, fitted from random starts."""
    dice = torch.Generator().manual_seed(0)
    free = [torch.randn(STARTS, HEAD_DIM, generator=dice).requires_grad_() for _ in range(2)]
    optimiser = torch.optim.Adam(free, lr=0.05)
    plans = {id(pairs): plan_of(config_of(row), pairs) for pairs in (train, test)}

    def nats(pairs: Pairs) -> Tensor:  # [STARTS]
        plan, batch = plans[id(pairs)], len(pairs.target)
        query, key = (gain * math.sqrt(HEAD_DIM) * torch.nn.functional.normalize(x, dim=-1) for x in free)
        q = query[None, :, None].expand(batch, -1, plan.query_tokens, -1)
        k = key[None, :, None].expand(batch, -1, plan.key_tokens, -1)
        return missed(marked(q, k, plan, 0), pairs)

    for _ in range(STEPS):
        optimiser.zero_grad()
        nats(train).sum().backward()
        optimiser.step()
    with torch.no_grad():
        best = int(nats(train).argmin())
        reached = float(nats(test)[best])
    return {"row": row, "gain": gain, "nats": reached, "tokens": math.exp(reached)}


@torch.no_grad()
def trained_heads(name: str, folder: Path, clips: WorldClips, device: torch.device) -> list[Row]:
    """Every head of the camera branches of a trained model."""
    transformer, seeds = loaded(folder, device).transformer, list(MEASURED_ON)
    pairs, cameras = pairs_of(clips, MEASURED_ON), clips.cameras(seeds, device)
    pairs = replace(pairs, target=pairs.target.to(device), visible=pairs.visible.to(device))
    true = as_video(clips.pictures(seeds, cameras)).to(device)
    noise = torch.randn(true.shape, generator=torch.Generator().manual_seed(0)).to(device)
    given, tokens = clips.prefix_frames, GRID[0] * GRID[1]
    inside: dict[int, Tensor] = {}

    def note(block: int, processor: CameraAttention, arguments: tuple[Any, ...]) -> None:
        _, hidden, _, _, rotary = arguments
        q, k, _ = processor.projected(hidden)
        plan = replace(processor.plan(hidden, rotary.condition), transform_values=False)
        inside[block] = marked(q, k, plan, LAST_GIVEN * tokens)

    for index, block in enumerate(transformer.blocks):
        if isinstance(block.attn1.processor, CameraAttention):
            block.attn1.processor.register_forward_hook(lambda m, args, out, index=index: note(index, m, args))
    rows = []
    for share in NOISE:
        noised = torch.cat((true[:, :, :given], true[:, :, given:].lerp(noise[:, :, given:], share)), dim=2)
        timestep = (torch.arange(clips.frames, device=device) >= given).repeat_interleave(tokens) * (1000.0 * share)
        text = torch.zeros(CLIPS, 1, transformer.config.text_dim, device=device)
        transformer(noised, timestep.expand(CLIPS, -1), text, attention_kwargs={"cameras": cameras})
        for index, weights in inside.items():
            later = weights.unflatten(2, (clips.frames, tokens))[:, :, list(LATER)].flatten(2, 3)
            for head, (nats, mass) in enumerate(zip(missed(later, pairs), later.sum(-1).mean((0, 2)), strict=True)):
                about = {"model": name, "noise": share, "block": index, "head": head}
                rows.append({**about, "nats": float(nats), "tokens": math.exp(nats), "mass": float(mass)})
    return rows


def what(row: Row) -> tuple[object, ...]:
    """What a row of the file measures: a row of the benchmark with a gain, or a model with all of its heads."""
    return (row["row"], row["gain"]) if "row" in row else (row["model"],)


def main() -> None:
    """Measure what is named, and put each in place of what the file had of it, as soon as it is measured."""
    parser = argparse.ArgumentParser(description="how sharply attention points at the same place in another frame")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), metavar="ROW", help='"ROW KEY=VALUE …" with changes')
    parser.add_argument("--gains", nargs="+", type=float, default=[1.0, 3.0])
    parser.add_argument("--models", nargs="*", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/world-pointing.json"))
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    configs = {row: config_of(row) for row in options.rows}
    models = dict(model.split("=", 1) for model in options.models)

    def put(new: Sequence[Row], where: torch.device) -> None:
        about = {"commit": commit(), "device": device_name(where), "torch": torch.__version__}
        measured = {what(row) for row in new}
        before = json.loads(options.out.read_text()) if options.out.exists() else []
        rows = [row for row in before if what(row) not in measured] + [{**row, **about} for row in new]
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
        best = min(new, key=lambda row: row["nats"])
        print(*(f"{key} {value:.3g}" if isinstance(value, float) else value for key, value in best.items()), flush=True)

    for name, folder in models.items():
        put(trained_heads(name, Path(folder), world_clips(config_of("merope")), device), device)
    for row, config in configs.items():
        train, test = (pairs_of(world_clips(config), seeds) for seeds in (FITTED_ON, MEASURED_ON))
        for gain in options.gains:
            put([fitted(row, gain, train, test)], torch.device("cpu"))


if __name__ == "__main__":
    main()

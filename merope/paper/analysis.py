"""What a camera branch does inside a transformer: how strongly it moves every block, and which frames look at which.

    with recording(pipe.transformer) as record:
        pipe("a street at night", cameras=cameras)
    analysis = record.analysis()

Amplitude of a block: ‖camera residual‖ / ‖self-attention output‖ over all tokens of a forward, both before the gate
(paper, figure "Per-block camera modulation amplitude"). Attention mass: the share of its attention that a query frame
gives to each key frame, mean over heads, samples and the tokens of the query frame; in the branch and in the backbone's
own self-attention of the same blocks. Both are means over the recorded forwards.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merope.adapters.camera_attention import CameraAttention
from merope.adapters.conditioning import CameraRotary
from merope.adapters.rerope import rotated
from merope.adapters.wan import attached_branch, load_branch
from merope.attention.dispatch import attend
from merope.draw.progress import ProgressLine
from merope.errors import invalid
from merope.formats.writing import replace_text
from merope.generate.conditions import check_finite, latent_cameras
from merope.generate.preflight import check_branch, outline_model
from merope.geometry.cameras import Cameras

SHIFT = 5.0
"""Of the noise levels of the short sampling that `analyse_model` watches, as in Wan2.2."""

BLUE, RED = "#2166ac", "#b2182b"


@dataclass(frozen=True, eq=False)
class Analysis:
    """Means over the recorded forwards. With history "sa" the references are the last frames."""

    blocks: tuple[int, ...]  # with a camera branch
    layers: int  # of the transformer
    amplitude: Tensor  # [blocks]
    branch_mass: Tensor  # [blocks, query frames, key frames], rows sum to 1
    backbone_mass: Tensor  # [blocks, query frames, key frames]
    forwards: int

    @property
    def share(self) -> Tensor:  # [blocks]
        """The blocks' parts of the summed amplitude."""
        return self.amplitude / self.amplitude.sum().clamp_min(torch.finfo(self.amplitude.dtype).tiny)

    def as_table(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        columns = {"amplitude": self.amplitude, "share": self.share}
        by_block = {name: dict(zip(self.blocks, values.tolist(), strict=True)) for name, values in columns.items()}
        masses = {"branch_mass": self.branch_mass.tolist(), "backbone_mass": self.backbone_mass.tolist()}
        return {"forwards": self.forwards, "layers": self.layers, "blocks": list(self.blocks), **by_block, **masses}


class Record:
    """Sums over forwards, filled by the hooks of `recording`."""

    def __init__(self, blocks: tuple[int, ...], layers: int) -> None:
        self.blocks, self.layers = blocks, layers
        self._self_norm: dict[int, Tensor] = {}
        self._camera_norm: dict[int, Tensor] = {}
        self._amplitudes: dict[int, list[Tensor]] = {block: [] for block in blocks}
        self._masses: dict[int, list[tuple[Tensor, Tensor]]] = {block: [] for block in blocks}

    def analysis(self) -> Analysis:
        """The means so far."""
        forwards = len(self._amplitudes[self.blocks[0]])
        if forwards == 0:
            raise invalid("the record", "at least one forward", "none", "run the model inside `recording`")
        amplitude = torch.stack([torch.stack(self._amplitudes[block]).mean() for block in self.blocks])
        for block, value in zip(self.blocks, amplitude, strict=True):
            check_finite(f"the amplitude of block {block}", value)
        branch, backbone = (
            torch.stack([torch.stack([pair[side] for pair in self._masses[b]]).mean(0) for b in self.blocks])
            for side in (0, 1)
        )
        return Analysis(self.blocks, self.layers, amplitude, branch, backbone, forwards)

    def note_self_attention(self, block: int, output: Tensor) -> None:
        """The norm of what the backbone's attention gives to the block."""
        self._self_norm[block] = _norm(output)

    def note_camera(self, block: int, output: Tensor) -> None:
        """The norm of what the branch adds to it."""
        self._camera_norm[block] = _norm(output)

    @torch.no_grad()
    def note_attention(self, block: int, processor: CameraAttention, args: tuple[Any, ...]) -> None:
        """Amplitude and attention mass of a block that has just run on these arguments."""
        attn, hidden, _, _, rotary = args
        assert isinstance(rotary, CameraRotary)
        self._amplitudes[block].append((self._camera_norm.pop(block) / self._self_norm.pop(block)).cpu())
        rows, columns = rotary.condition.grid
        masses = (
            branch_mass(processor, hidden, rotary, rows * columns),
            backbone_mass(attn, hidden, rotary, rows * columns),
        )
        self._masses[block].append((masses[0].cpu(), masses[1].cpu()))


@contextmanager
def recording(transformer: Any) -> Iterator[Record]:
    """Watch every forward of a WanTransformer3DModel with a parallel camera branch, until the block ends.

    Outputs are not changed. Costs about one more attention per camera block.
    """
    processors = _camera_attentions(transformer)
    record = Record(tuple(processors), len(transformer.blocks))
    hooks = []
    for index, processor in processors.items():
        last = transformer.blocks[index].attn1.to_out[-1]
        hooks += [
            last.register_forward_hook(lambda m, a, out, block=index: record.note_self_attention(block, out)),
            processor.cam_out.register_forward_hook(lambda m, a, out, block=index: record.note_camera(block, out)),
            processor.register_forward_hook(lambda m, args, out, block=index: record.note_attention(block, m, args)),
        ]
    try:
        yield record
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def analyse(transformer: Any, **inputs: Any) -> Analysis:
    """Amplitudes and attention masses of one forward with these arguments."""
    with recording(transformer) as record:
        transformer(**inputs)
    return record.analysis()


def branch_mass(
    processor: CameraAttention,
    hidden: Tensor,  # [B, N, width]
    rotary: CameraRotary,
    tokens_per_frame: int,
) -> Tensor:  # [frames, frames]
    """Attention mass between frames in a camera branch."""
    x = hidden.to(processor.cam_qkv.weight.dtype)
    q, k, _ = processor.projected(x)
    plan = replace(processor.plan(x, rotary.condition), transform_values=False)  # values here are marks, not features
    return _frame_mass(lambda marks: attend(q.float(), k.float(), marks, plan), q, tokens_per_frame)


def backbone_mass(
    attn: Any,  # WanAttention
    hidden: Tensor,  # [B, N, width]
    rotary: CameraRotary,
    tokens_per_frame: int,
) -> Tensor:  # [frames, frames]
    """Attention mass between frames in the backbone's own self-attention."""
    query, key = attn.norm_q(attn.to_q(hidden)), attn.norm_k(attn.to_k(hidden))
    q, k = (rotated(x.unflatten(2, (attn.heads, -1)), *rotary.native).transpose(1, 2).float() for x in (query, key))
    return _frame_mass(lambda marks: torch.nn.functional.scaled_dot_product_attention(q, k, marks), q, tokens_per_frame)


def _frame_mass(attention: Any, q: Tensor, tokens_per_frame: int) -> Tensor:  # [B, H, N, d] -> [frames, frames]
    """Attention applied to marks: channel f of a key token's value is 1 if the token is of frame f.

    So the weights themselves are never held; frames go through in portions of the head's width.
    """
    batch, heads, tokens, width = q.shape
    frame = torch.arange(tokens, device=q.device) // tokens_per_frame
    count = tokens // tokens_per_frame
    portions = []
    for first in range(0, count, width):
        marks = (frame[:, None] == first + torch.arange(width, device=q.device)).to(torch.float32)
        portions.append(attention(marks.expand(batch, heads, -1, -1).contiguous()).mean(dim=(0, 1)))
    mass = torch.cat(portions, dim=-1)[:, :count]
    return mass.unflatten(0, (count, tokens_per_frame)).mean(1)


def _norm(x: Tensor) -> Tensor:  # []
    return torch.linalg.vector_norm(x.detach().float())


def _camera_attentions(transformer: Any) -> dict[int, CameraAttention]:
    branch = attached_branch(transformer)
    if branch is None:
        raise invalid("transformer", "with a camera branch", "without one", "call merope.attach or load_branch")
    processors = {i: p for i, p in branch.processors().items() if isinstance(p, CameraAttention)}
    if not processors:
        fix = "only a parallel branch has a residual of its own"
        raise invalid("the branch", 'of integration "parallel"', repr(branch.config["integration"]), fix)
    return processors


@dataclass(frozen=True)
class AnalyseConfig:
    """A short sampling to watch: latents from noise, no text, so that the model's folder is all it takes."""

    model: str  # folder or hub id in diffusers' layout
    branch: str  # folder or hub id
    out: Path
    height: int = 288
    width: int = 512
    steps: int = 8
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    transformer: str | None = None  # one that was trained whole, in place of the model's


def analyse_model(config: AnalyseConfig, cameras: Cameras) -> Analysis:  # [RGB frames]
    """Sample a clip along these cameras and write analysis.json, amplitude.png and attention-mass.png."""
    import_module("matplotlib")  # which draws at the end
    outline = outline_model(config.model, config.transformer)
    strides = outline.strides
    strides.check(config.height, config.width, cameras.count, "--frames")
    check_branch(config.branch, outline, cameras)
    transformer = _loaded(config)
    of_latents = latent_cameras(cameras, strides.frames).to(config.device)
    size = strides.latent_size(config.height, config.width)
    shape = (1, transformer.config.in_channels, of_latents.count, *size)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(config.seed)).to(config.device)
    analysis = watch_sampling(transformer, of_latents, noise, config.steps)
    about = {name: getattr(config, name) for name in ("model", "transformer", "branch", "steps")}
    write_analysis(analysis, config.out, about)
    return analysis


@torch.no_grad()
def watch_sampling(
    transformer: Any,
    cameras: Cameras,  # [latent frames]
    noise: Tensor,  # [B, C, T, h, w]
    steps: int,
) -> Analysis:
    """The analysis of all steps of an Euler sampling from noise, with the zero vector for text."""
    uniform = torch.linspace(1.0, 0.0, steps + 1)
    levels = (SHIFT * uniform / (1.0 + (SHIFT - 1.0) * uniform)).tolist()
    latents, dtype = noise.float(), transformer.dtype
    text = torch.zeros(len(noise), 1, transformer.config.text_dim, device=noise.device, dtype=dtype)
    branch = attached_branch(transformer)
    assert branch is not None
    ready = branch.prepare(cameras, latents.to(dtype))
    progress = ProgressLine("watching", steps, "steps")
    with recording(transformer) as record:
        for step, (level, next_level) in enumerate(pairwise(levels), start=1):
            timestep = torch.full((len(noise),), 1000.0 * level, device=noise.device)
            kwargs = {"attention_kwargs": {"cameras": ready}, "return_dict": False}
            velocity = transformer(latents.to(dtype), timestep, text, **kwargs)[0]
            latents = latents + (next_level - level) * velocity.float()
            progress.show(step)
    return record.analysis()


def _loaded(config: AnalyseConfig) -> Any:
    """The transformer with its branch, on its device."""
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    place = (config.model, "transformer") if config.transformer is None else (config.transformer, None)
    transformer = WanTransformer3DModel.from_pretrained(
        place[0], subfolder=place[1], torch_dtype=getattr(torch, config.dtype)
    ).to(config.device)
    load_branch(transformer, config.branch)
    _camera_attentions(transformer)
    return transformer.eval()


def write_analysis(analysis: Analysis, folder: Path, about: dict[str, Any]) -> None:
    """Both pictures and, last, the numbers behind them."""
    folder.mkdir(parents=True, exist_ok=True)
    draw_amplitude(analysis, folder / "amplitude.png")
    draw_attention_mass(analysis, folder / "attention-mass.png")
    replace_text(folder / "analysis.json", json.dumps({**about, **analysis.as_table()}, indent=1) + "\n")


def draw_amplitude(analysis: Analysis, file: Path) -> None:
    """Bars over all blocks, the two largest in red (paper, figure "Per-block camera modulation amplitude")."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    largest = set(analysis.amplitude.argsort(descending=True)[:2].tolist())
    colours = [RED if place in largest else BLUE for place in range(len(analysis.blocks))]
    axes.bar(analysis.blocks, analysis.amplitude.tolist(), color=colours)
    axes.set_xlim(-0.7, analysis.layers - 0.3)
    axes.set_xticks(analysis.blocks[:: -(-len(analysis.blocks) // 15)])
    axes.set_xlabel("block")
    axes.set_ylabel("‖camera residual‖ / ‖self-attention‖", fontsize=8)
    top = float(analysis.share[sorted(largest)].sum())
    axes.set_title(f"Camera modulation; the two largest blocks have {top:.0%} of it", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)


def draw_attention_mass(analysis: Analysis, file: Path) -> None:
    """Who looks at whom, mean over the camera blocks: the branch, the backbone, and mass against frames apart."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    masses = {"camera branch": analysis.branch_mass.mean(0), "backbone": analysis.backbone_mass.mean(0)}
    figure = Figure(figsize=(11.0, 3.4), dpi=150, layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    highest = max(float(mass.max()) for mass in masses.values())
    for axes, (name, mass) in zip((left, middle), masses.items(), strict=True):
        image = axes.imshow(mass.numpy(), vmin=0.0, vmax=highest, cmap="viridis")
        axes.set(title=name, xlabel="key frame", ylabel="query frame")
    figure.colorbar(image, ax=[left, middle], label="share of attention")
    for (name, mass), colour in zip(masses.items(), (RED, BLUE), strict=True):
        right.plot(_by_distance(mass).tolist(), marker="o", markersize=3, color=colour, label=name)
    right.axhline(1.0 / len(mass), color="0.6", linewidth=0.8, linestyle="--", label="uniform")
    right.set(xlabel="frames apart", ylabel="share of attention on a frame", ylim=(0.0, None))
    right.legend(frameon=False, fontsize=8)
    right.spines[["top", "right"]].set_visible(False)
    for axis in (left.xaxis, left.yaxis, middle.xaxis, middle.yaxis, right.xaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(file)


def _by_distance(mass: Tensor) -> Tensor:  # [F, F] -> [F]
    """Mean mass on a key frame that is 0, 1, 2, … frames before or after the query frame."""
    frame = torch.arange(len(mass))
    apart = (frame[:, None] - frame).abs()
    return torch.stack([mass[apart == distance].mean() for distance in range(len(mass))])

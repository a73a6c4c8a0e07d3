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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from merope.adapters.attachment import attached_branch, load_branch
from merope.adapters.camera_attention import CameraAttention
from merope.adapters.conditioning import taken_off
from merope.adapters.families import family_of
from merope.adapters.families.facts import Family
from merope.adapters.families.noise import FLOW_MATCHING, Noising
from merope.draw.progress import ProgressLine
from merope.errors import invalid
from merope.formats.writing import replace_text
from merope.generate.conditions import check_finite, latent_cameras
from merope.generate.inputs import versions
from merope.generate.preflight import ModelOutline, check_branch, check_model_weights, outline_model
from merope.geometry.cameras import Cameras
from merope.paper.frame_mass import WatchedProcessor, backbone_mass, branch_mass

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

    def __init__(self, blocks: tuple[int, ...], layers: int, text_first: bool) -> None:
        self.blocks, self.layers, self.text_first = blocks, layers, text_first
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

    @torch.no_grad()
    def note(self, block: int, processor: CameraAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Amplitude and attention mass of a block that has just run on these arguments."""
        hidden = args[1] if len(args) > 1 else kwargs["hidden_states"]
        cameras, watched = taken_off(args, kwargs)[0], processor.base
        assert cameras is not None
        rows, columns = cameras.condition.grid
        self._amplitudes[block].append((self._camera_norm.pop(block) / _norm(watched.output)).cpu())
        masses = (
            branch_mass(processor, hidden, cameras.condition),
            backbone_mass(watched, hidden.shape[1], rows * columns, self.text_first),
        )
        self._masses[block].append((masses[0].cpu(), masses[1].cpu()))

    def note_camera(self, block: int, output: Tensor) -> None:
        """The norm of what the branch adds to self-attention."""
        self._camera_norm[block] = _norm(output)


@contextmanager
def recording(transformer: Any) -> Iterator[Record]:
    """Watch every forward of a transformer with a parallel camera branch, until the block ends.

    Outputs are not changed. Costs about two more attentions per camera block.
    """
    processors, family = _camera_attentions(transformer), family_of(transformer)
    record = Record(tuple(processors), len(transformer.get_submodule(family.blocks)), family.text_first)
    hooks = []
    for index, processor in processors.items():
        processor.base = WatchedProcessor(processor.base)
        hooks += [
            processor.cam_out.register_forward_hook(lambda m, a, out, block=index: record.note_camera(block, out)),
            processor.register_forward_hook(
                lambda m, args, kwargs, out, block=index: record.note(block, m, args, kwargs), with_kwargs=True
            ),
        ]
    try:
        yield record
    finally:
        for hook in hooks:
            hook.remove()
        for processor in processors.values():
            processor.base = processor.base.base


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
    trajectory: str | None = None  # where the cameras come from, for the record
    fps: float | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise invalid("steps", "at least 1", self.steps, "8 is the default")


def analyse_model(config: AnalyseConfig, cameras: Cameras) -> dict[str, Analysis]:  # [RGB frames]
    """Sample a clip along these cameras and write analysis.json, amplitude.png and attention-mass.png.

    A model of two transformers has a folder of them for each.
    """
    import_module("matplotlib")  # which draws at the end
    outline = outline_model(config.model, config.transformer, own_pipeline=True)
    strides, family = outline.strides, outline.family
    reason = family.not_trained or ("it wants an image" if family.image_channels(outline.transformer.config) else "")
    if reason:
        fix = f"{reason}; run its own pipeline inside of merope.paper.analysis.recording(pipe.transformer)"
        raise invalid("--model", "of a family that merope can sample from", family.models, fix)
    strides.check(config.height, config.width, cameras.count, "--frames")
    check_branch(config.branch, outline, cameras)
    check_model_weights(outline)
    experts = {name: _loaded(config, outline, name) for name in outline.transformers}
    size = strides.latent_size(config.height, config.width)
    channels = family.latent_channels(outline.transformer.config)
    shape = (1, channels, strides.latent_frames(cameras.count), *size)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(config.seed)).to(config.device)
    sampling = Sampling(config.steps, _noising(config, family), strides.pixels, _boundary(config))
    analyses = sampling.watched(experts, latent_cameras(cameras, strides.of_cameras).to(config.device), noise)
    settings = {name: value for name, value in asdict(config).items() if name != "out"}
    about = settings | {"frames": cameras.count, "versions": versions()}
    for name, analysis in analyses.items():
        write_analysis(analysis, config.out / name if len(analyses) > 1 else config.out, about)
    return analyses


@dataclass(frozen=True)
class Sampling:
    """Straight steps from noise to no noise, without text. Of two experts each has the levels on its side."""

    steps: int
    noising: Noising = FLOW_MATCHING
    pixels: int = 8  # per latent one
    boundary: float = 0.0  # the first expert denoises levels from here on

    @torch.no_grad()
    def watched(
        self,
        experts: Mapping[str, Any],
        cameras: Cameras,  # [token frames]
        noise: Tensor,  # [B, C, T, h, w]
    ) -> dict[str, Analysis]:
        """The analyses of the experts over their steps."""
        uniform = torch.linspace(1.0, 0.0, self.steps + 1, device=noise.device)
        levels, latents = SHIFT * uniform / (1.0 + (SHIFT - 1.0) * uniform), noise.float()
        progress = ProgressLine("watching", self.steps, "steps")
        with ExitStack() as watching:
            records = {name: watching.enter_context(recording(expert)) for name, expert in experts.items()}
            for step, (level, below) in enumerate(pairwise(levels), start=1):
                expert = list(experts.values())[0 if level >= self.boundary else -1]
                predicted = self._predicted(expert, cameras, latents, level)
                latents = self.noising.towards_data(latents, predicted.float(), level, below)
                progress.show(step)
        return {name: record.analysis() for name, record in records.items()}

    def _predicted(self, transformer: Any, cameras: Cameras, latents: Tensor, level: Tensor) -> Tensor:
        config, family, dtype = transformer.config, family_of(transformer), transformer.dtype
        branch = attached_branch(transformer)
        assert branch is not None
        text = family.no_text(config).to(latents.device, dtype).expand(len(latents), -1, -1)
        times = self.noising.timesteps(level.expand(len(latents)))
        inputs = family.video_inputs(config, latents.to(dtype), times, self.pixels) | family.text_inputs(config, text)
        ready = branch.prepare(cameras, latents.to(dtype), sees=family.sees(config, cameras.moments))
        made = transformer(**inputs, attention_kwargs={"cameras": ready}, return_dict=False)[0]
        return family.video({**inputs, "hidden_states": made})


def _noising(config: AnalyseConfig, family: Family) -> Noising:
    index = DiffusionPipeline.load_config(config.model)
    scheduler = getattr(diffusers, index["scheduler"][1]).from_pretrained(config.model, subfolder="scheduler")
    return family.noising(scheduler)


def _boundary(config: AnalyseConfig) -> float:
    return DiffusionPipeline.load_config(config.model).get("boundary_ratio") or 0.0


def _loaded(config: AnalyseConfig, outline: ModelOutline, name: str) -> Any:
    """A transformer with its branch, on its device."""
    place = (config.model, name) if config.transformer is None else (config.transformer, None)
    kind: Any = type(outline.transformers[name])
    dtype = getattr(torch, config.dtype)
    transformer = kind.from_pretrained(place[0], subfolder=place[1], torch_dtype=dtype).to(config.device)
    load_branch(transformer, config.branch, **({} if len(outline.transformers) == 1 else {"subfolder": name}))
    _camera_attentions(transformer)
    return transformer.eval()


def write_analysis(analysis: Analysis, folder: Path, about: dict[str, Any]) -> None:
    """Both pictures and, last, the numbers behind them."""
    folder.mkdir(parents=True, exist_ok=True)
    draw_amplitude(analysis, folder / "amplitude.png")
    draw_attention_mass(analysis, folder / "attention-mass.png")
    replace_text(folder / "analysis.json", json.dumps({**about, **analysis.as_table()}, indent=1) + "\n")


def draw_amplitude(analysis: Analysis, file: Path) -> None:
    """Bars over the camera blocks (paper, figure "Per-block camera modulation amplitude").

    Of more than two, the two largest are red.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    largest = set(analysis.amplitude.argsort(descending=True)[:2].tolist()) if len(analysis.blocks) > 2 else set()
    colours = [RED if place in largest else BLUE for place in range(len(analysis.blocks))]
    axes.bar(analysis.blocks, analysis.amplitude.tolist(), color=colours)
    first, last = analysis.blocks[0], analysis.blocks[-1]
    margin = max(0.7, 2.0 - (last - first) / 2)  # a few bars stay narrow
    axes.set_xlim(first - margin, last + margin)
    axes.set_xticks(analysis.blocks[:: -(-len(analysis.blocks) // 15)])
    axes.set_xlabel("block")
    axes.set_ylabel("‖camera residual‖ / ‖self-attention‖", fontsize=8)
    top = f"; the two largest blocks have {float(analysis.share[sorted(largest)].sum()):.0%} of it" if largest else ""
    axes.set_title(f"Camera modulation{top}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)


def draw_attention_mass(analysis: Analysis, file: Path) -> None:
    """Who looks at whom, mean over the camera blocks: the branch, the backbone, and mass against frames apart."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    masses = {"camera branch": analysis.branch_mass.mean(0), "backbone": analysis.backbone_mass.mean(0)}
    spaced = ConstrainedLayoutEngine(w_pad=0.12)  # inches: the colour bar has a label, and the panel beside it
    figure = Figure(figsize=(11.0, 3.4), dpi=150, layout=spaced)
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

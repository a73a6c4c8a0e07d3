"""Retrieved history in a Wan transformer: clean frames of the same place, seen before, with cameras of their own.

Two ways in (paper, Appendix "Real-World Grounding with Retrieved History"), a choice of the branch's config:

"sa"  reference frames stand behind the video's latent frames, at noise level 0, and take part in all self-attention,
      of the backbone and of the branch; what comes out for them is dropped. No new parameters.
"ca"  video tokens look at the references' keys and values through one more attention in every camera block, whose
      output projection starts at zero.

Either way a reference has the time of the frame that it was matched with plus 100, and its camera stands in the same
world as the video's, so that the encoding relates the two in metres.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor, nn

from merope.adapters.batching import matched_batch
from merope.attention.dispatch import attend
from merope.attention.plan import AttentionPlan
from merope.encodings.tokens import Times
from merope.errors import invalid
from merope.geometry.cameras import Cameras
from merope.geometry.lens_batches import kind

HistoryPath = Literal["sa", "ca"]

Patch = tuple[int, int, int]  # latent frames, rows, columns of a token
NORM_EPS = 1e-6


@dataclass(frozen=True, eq=False)
class HistoryReferences:
    """R clean frames of one clip's place, or of every clip's in a batch of b. R = 0 is no history.

    latents: every frame encoded by itself, as an image; of the video's size. The pipeline also takes RGB bytes and
        encodes them (`merope.HistoryFrames`).
    cameras: in the same world as the video's cameras. None exactly when R = 0.
    times: latent-frame index of the matched frames plus 100, as `merope.curation.retrieve.History.time`.
    """

    latents: Tensor  # [b, C, R, h, w], or uint8 [b, 3, R, H, W]
    cameras: Cameras | None  # [R] or [b, R]
    times: Times  # [R] or [b, R]

    def __post_init__(self) -> None:
        if not isinstance(self.latents, Tensor) or self.latents.ndim != 5 or self.latents.shape[0] == 0:
            got = list(self.latents.shape) if isinstance(self.latents, Tensor) else type(self.latents).__name__
            raise invalid("history.latents", "[batch, channels, references, height, width]", got, "add the batch")
        object.__setattr__(self, "times", torch.as_tensor(self.times, dtype=torch.float64))
        batch, count = self.latents.shape[0], self.count
        known = 0 if self.cameras is None else self.cameras.count
        if known != count:
            fix = "pass one per reference" if count else "pass None where nothing was found"
            raise invalid("history.cameras", f"of {count} references", known, fix)
        clips = () if self.cameras is None else self.cameras.world_from_camera.shape[:-3]
        fitting = {"cameras": (clips, ((), (1,), (batch,))), "times": (self.moments.shape[:-1], ((), clips))}
        for name, (lead, leads) in fitting.items():
            if lead not in leads:
                fix = "give all parts of the history one batch size"
                raise invalid(f"history.{name}", f"of one clip or of a batch {list(leads[-1])}", list(lead), fix)
        if self.moments.shape[-1:] != (count,) or not bool(torch.isfinite(self.moments).all()):
            expected = f"finite, one for each of {count} references"
            raise invalid("history.times", expected, self.moments.tolist(), "see merope.curation.retrieve.History.time")

    @property
    def count(self) -> int:
        """Number of references R of a clip."""
        return self.latents.shape[2]

    @property
    def posed(self) -> Cameras:
        """The cameras of references that exist."""
        assert self.cameras is not None
        return self.cameras

    @property
    def moments(self) -> Tensor:  # [R] or [b, R] float64
        """The times as a tensor."""
        assert isinstance(self.times, Tensor)
        return self.times

    @property
    def is_encoded(self) -> bool:
        """Whether the latents are latents, not yet images."""
        return self.latents.dtype != torch.uint8

    def encoded(
        self,
        encode: Callable[[Tensor], Tensor],  # uint8 [B, T, H, W, 3] -> [B, C, T_latent, h, w]
    ) -> Self:
        """The references as latents, each image encoded as a video of one frame."""
        if self.is_encoded:
            return self
        images = self.latents.permute(0, 2, 3, 4, 1)  # [b, R, H, W, 3]
        latents = encode(images.flatten(0, 1)[:, None])  # [b·R, C, 1, h, w]
        return replace(self, latents=latents.squeeze(2).unflatten(0, images.shape[:2]).transpose(1, 2))

    def to(self, device: torch.device | str) -> Self:
        """The same references on another device."""
        cameras = None if self.cameras is None else self.cameras.to(device)
        return replace(self, latents=self.latents.to(device), cameras=cameras, times=self.moments.to(device))

    def serving(
        self,
        video: Tensor,  # [B, C, T, h, w]
    ) -> Self:
        """The references of every sample of a batch: shared, one set a sample, or each set for n neighbours."""
        if not self.is_encoded:
            fix = "call history.encoded(pipe.encode_frames)"
            raise invalid("history.latents", "latents", "images", fix)
        batch, clips = video.shape[0], self.latents.shape[0]
        size, expected = self.latents.shape[1::2] + self.latents.shape[4:], video.shape[1::2] + video.shape[4:]
        if size != expected:
            fix = "scale the frames to the video's size and encode them alike"
            raise invalid("history.latents", f"channels, rows, columns {list(expected)}", list(size), fix)
        if batch % clips:
            fix = "pass one history for all samples or one per sample"
            raise invalid("history.latents", f"of a batch that divides the video's {batch}", clips, fix)
        moments = self.moments[0] if self.moments.shape[:-1] == (1,) else self.moments  # one clip's are all samples'
        cameras, times = matched_batch(self.posed.to(video.device), moments.to(video.device), batch)
        latents = self.latents.to(video.device).repeat_interleave(batch // clips, dim=0)
        return replace(self, latents=latents, cameras=cameras, times=moments if times is None else times)


def existing(history: HistoryReferences | None) -> HistoryReferences | None:
    """A history with at least one reference, or None."""
    if history is not None and not isinstance(history, HistoryReferences):
        expected = "merope.adapters.history.HistoryReferences"
        raise invalid("history", expected, type(history).__name__, "see docs/history.md")
    return history if history is not None and history.count else None


def check_rotary_times(history: HistoryReferences, limit: int) -> None:
    """Refuse times that the backbone's rotary table, one row per latent frame, does not hold."""
    times = history.moments
    if bool((times != times.round()).any()) or float(times.min()) < 0:
        fix = "match references with latent frames: n + 100"
        raise invalid("history.times", 'whole latent frames for history "sa"', times.tolist(), fix)
    if float(times.max()) >= limit:
        fix = "load the transformer with a larger rope_max_seq_len"
        raise invalid("history.times", f"below the model's rope_max_seq_len = {limit}", float(times.max()), fix)


def joint_times(times: Times | None, frames: int, history: HistoryReferences) -> Tensor:  # [(B,) T + R]
    """Times of the video's latent frames, 0, 1, 2, … by default, and behind them those of the references."""
    of_references = history.moments
    own = torch.arange(frames) if times is None else torch.as_tensor(times)
    own = own.to(of_references)
    lead = torch.broadcast_shapes(own.shape[:-1], of_references.shape[:-1])
    return torch.cat([t.expand(*lead, t.shape[-1]) for t in (own, of_references)], dim=-1)


def joined(video: Cameras, references: Cameras) -> Cameras:  # [(B,) V], [(B,) R] -> [(B,) V + R]
    """All cameras of a joint self-attention."""
    if kind(video.lens) != kind(references.lens):
        got = f"{kind(video.lens)} and {kind(references.lens)}"
        fix = 'undistort and scale the references, or use history "ca", whose two sides may differ'
        raise invalid("history.cameras.lens", 'of the video\'s kind and size for history "sa"', got, fix)
    return video.joined(references)


def with_references(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], history: HistoryReferences, patch: Patch, before: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a Wan forward with the references as further frames, whose tokens are at noise level 0.

    They stand behind the video or before it.
    """
    names = ("hidden_states", "timestep")  # the first arguments, with or without their names
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    video, timestep = given["hidden_states"], given["timestep"]
    tokens = tokens_per_frame(video, patch)
    if timestep.ndim == 1:
        timestep = timestep[:, None].expand(-1, video.shape[2] * tokens)
    timestep = timestep.expand(video.shape[0], -1)  # Wan takes one of all samples, too
    clean = timestep.new_zeros(video.shape[0], history.count * tokens)
    pairs = ((video, history.latents.to(video), 2), (timestep, clean, 1))
    changed = tuple(torch.cat((new, own) if before else (own, new), dim) for own, new, dim in pairs)
    by_name = dict(zip(names[len(args) :], changed[len(args) :], strict=True))
    return (*changed[: len(args)], *args[len(names) :]), {**kwargs, **by_name}


def tokens_per_frame(latents: Tensor, patch: Patch) -> int:
    """Tokens of one latent frame [..., h, w]."""
    return (latents.shape[-2] // patch[1]) * (latents.shape[-1] // patch[2])


def tagged_phases(
    rope: Any,  # Wan's rotary embedding
    native: tuple[Tensor, Tensor],  # cos, sin [1, N, 1, head_dim] of all frames in a row
    history: HistoryReferences,
) -> tuple[Tensor, Tensor]:  # [1 or B, N, 1, head_dim] each
    """The rotary embedding with the references' own times; rows and columns stay."""
    times = history.moments.long().reshape(-1, history.count)  # [1 or B, R]
    tokens = tokens_per_frame(history.latents, rope.patch_size)

    def tagged(table: Tensor, of_frames: Tensor) -> Tensor:  # [1, N, 1, d], [frames, d]
        video = table.shape[1] - history.count * tokens
        time = of_frames[times.to(of_frames.device), : rope.t_dim].to(table)
        time = time.repeat_interleave(tokens, dim=1)[:, :, None]
        table = table.expand(len(times), -1, -1, -1)
        return torch.cat((table[:, :video], torch.cat((time, table[:, video:, :, rope.t_dim :]), dim=-1)), dim=1)

    return tagged(native[0], rope.freqs_cos), tagged(native[1], rope.freqs_sin)


def without_references(output: Any, count: int, before: bool = False) -> Any:
    """What a Wan forward returned, less its last (or first) `count` frames."""
    video = slice(count, None) if before else slice(-count)
    if isinstance(output, Transformer2DModelOutput):
        return Transformer2DModelOutput(sample=output.sample[:, :, video])
    return (output[0][:, :, video], *output[1:])


class HistoryAttention(nn.Module):
    """History "ca" of one block: attention from video tokens to references, under the camera encoding's operator.

    References come as the base model's patch embeddings, normalised without parameters like everything that enters an
    attention of Wan. Like the branch it has narrower heads, and names that share no suffix with Wan's layers.
    """

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        inner = heads * head_dim
        self.heads = heads
        self.ref_norm = nn.LayerNorm(width, elementwise_affine=False, eps=NORM_EPS)
        self.ref_q = nn.Linear(width, inner)
        self.ref_kv = nn.Linear(width, 2 * inner)  # rows of k, then v
        self.ref_out = nn.Linear(inner, width)
        nn.init.zeros_(self.ref_out.weight)
        nn.init.zeros_(self.ref_out.bias)

    def forward(
        self,
        x: Tensor,  # [B, N, width]
        references: Tensor | None,  # [B, R·P, width]
        plan: AttentionPlan | None,
    ) -> Tensor:  # [B, N, width]
        """What references add to the block; nothing where there are none."""
        if references is None or plan is None:
            return self._nothing(x)
        seen = self.ref_norm(references.to(x.dtype)).to(x.dtype)
        q, (k, v) = self.ref_q(x), self.ref_kv(seen).chunk(2, dim=-1)
        q, k, v = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        return self.ref_out(attend(q, k, v, plan).transpose(1, 2).flatten(2))

    def _nothing(self, x: Tensor) -> Tensor:  # [B, N, width]
        """Zeros. In training they depend on every parameter: sharded ranks must all have gradients to add up."""
        zeros = torch.zeros_like(x)
        if not torch.is_grad_enabled():
            return zeros
        return zeros + 0.0 * torch.stack([parameter.sum() for parameter in self.parameters()]).sum().to(x.dtype)

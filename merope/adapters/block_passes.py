"""A block of latent frames that looks at a stream's cache, and the pass of a transformer over it."""

from dataclasses import dataclass, replace
from typing import Any, Self

from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor

from merope.adapters.conditioning import PAST, CameraCondition
from merope.adapters.key_cache import KeyCache, KeyReader
from merope.attention.plan import AttentionPlan
from merope.geometry.cameras import Cameras


@dataclass(frozen=True, eq=False)
class BlockCondition:
    """A block of latent frames made ready to look at a cache: for all steps, and for both passes of guidance."""

    plan: AttentionPlan  # of the base model
    cameras: CameraCondition | None  # of the camera branch
    given: Cameras | None
    reader: KeyReader

    def reading(self, cache: KeyCache, keep: bool = False) -> Self:
        """The same block before another cache of as many frames, such as that of another text, or once more."""
        reader = KeyReader(cache, keep, self.reader.turned if cache is self.reader.cache else None)
        cameras = None if self.cameras is None else replace(self.cameras, past=reader)
        return replace(self, reader=reader, cameras=cameras)


def block_pass(
    transformer: WanTransformer3DModel,
    block: BlockCondition,
    latents: Tensor,  # [B, C, block, h, w]
    timestep: Tensor,  # [B]
    text: Tensor,  # [B, L, text_dim]
    **options: Any,
) -> Tensor:  # [B, C, block, h, w]
    """What a transformer predicts for a block that was made ready; in its own precision."""
    return transformer(
        hidden_states=latents.to(transformer.dtype),
        timestep=timestep,
        encoder_hidden_states=text,
        attention_kwargs={PAST: block},
        return_dict=False,
        **options,
    )[0]


def finished_block(cache: KeyCache, block: BlockCondition, reader: KeyReader, latents: Tensor) -> KeyCache:
    """The cache with a block whose keys a reader kept in a pass over its finished latents [B, C, block, h, w]."""
    given = None if block.given is None else block.given.to("cpu")
    return cache.after(reader.kept(latents.shape[2], given))

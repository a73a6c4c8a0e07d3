"""Family: what the camera branch must know of a class of video transformers. Tokens are frame-major in all of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from merope.adapters.conditioning import CameraArgument, CameraCondition, CameraRotary, Carrier
from merope.attention.visible_cameras import Visibility
from merope.geometry.cameras import LATENT_STRIDE

WIDE = 128
"""Channels of a head for which the fast kernels are made."""


@dataclass(frozen=True)
class Family:
    """Facts of one transformer class. Where a fact depends on more than a name, a family overrides a method.

    transformer: name of the class; subclasses belong to the family, too.
    models: what people call it.
    blocks, attention, query: attributes of the model, of a block and of its self-attention: the list of blocks, the
        self-attention, its layer that makes queries. In joint attention, text has an argument of its own.
    rope: module whose output goes to the self-attention of every block. Cameras travel on it.
    argument: in its place, an argument of the forward that goes to the self-attention of every block as it is.
    latent_stride: RGB frames per latent frame.
    doubles_batch: its pipelines put both passes of guidance into one batch, one after the other.
    integrations, has_history: what of `CameraBranchConfig` its attention supports.
    recorded: fields of the model's config that a saved branch finds again in the model it is loaded into.
    """

    transformer: str
    models: str
    blocks: str = "transformer_blocks"
    attention: str = "attn1"
    query: str = "to_q"
    rope: str = "rope"
    argument: str = ""
    latent_stride: int = LATENT_STRIDE
    doubles_batch: bool = False
    integrations: tuple[str, ...] = ("parallel",)
    has_history: bool = False
    recorded: tuple[str, ...] = ("in_channels", "out_channels")

    def base(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What must agree between a branch and its base model. The first five are known to every branch."""
        return {
            "transformer": self.transformer,
            "num_layers": config["num_layers"],
            "num_attention_heads": config["num_attention_heads"],
            "attention_head_dim": config["attention_head_dim"],
            "patch_size": list(self.patch(config)),
            **{name: config[name] for name in self.recorded},
        }

    def patch(self, config: Mapping[str, Any]) -> tuple[int, int, int]:
        """Latent frames, rows and columns of a token."""
        size = config["patch_size"]
        return (config.get("patch_size_t") or 1, size, size) if isinstance(size, int) else tuple(size)

    def heads(self, base: Mapping[str, Any], compression: int) -> tuple[int, int]:
        """Number and channels of the heads in which a branch counts the width: wide ones, where they fill it."""
        count, dim = base["num_attention_heads"], base["attention_head_dim"]
        return (count, dim) if count * dim % (WIDE * compression) else (count * dim // WIDE, WIDE)

    def token_stride(self, config: Mapping[str, Any]) -> int:
        """RGB frames per frame of tokens: its camera is that of RGB frame `token_stride` · n."""
        return self.latent_stride * self.patch(config)[0]

    def video(self, arguments: Mapping[str, Any]) -> Tensor:  # [B, channels, T, H, W]
        """The latents among the arguments of a forward."""
        latents: Tensor = arguments["hidden_states"]
        return latents

    def sees(self, config: Mapping[str, Any], frames: int) -> Visibility | None:
        """Which frames of tokens each one sees in self-attention; None: all."""
        return None

    def carried(self, native: Any, condition: CameraCondition) -> Carrier:
        """Cameras put on the argument that carries them."""
        return CameraArgument(condition) if native is None else CameraRotary(native, condition)

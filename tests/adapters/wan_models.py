"""Tiny random Wan models with the real architecture, and the real configs for the meta device."""

from typing import Any

import torch
from diffusers import WanTransformer3DModel
from scenes import PINHOLE, curved_drive, random_poses
from torch import Tensor

from merope.adapters.branch_config import CameraBranchConfig
from merope.adapters.camera_branch import CameraBranch
from merope.geometry.cameras import Cameras

TINY = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 24,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 8,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 4,
}
WAN22_5B = {
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "ffn_dim": 14336,
    "num_layers": 30,
    "in_channels": 48,
    "out_channels": 48,
}
WAN21_1_3B = {
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "ffn_dim": 8960,
    "num_layers": 30,
    "in_channels": 16,
    "out_channels": 16,
}
TINY_MEROPE = {"partition": (6, 6, 6, 6), "native_split": (2, 2, 2), "fractions": (0.0, 1.0)}
"""Options of MeRoPE for a head of 24."""

LATENTS = (2, 4, 3, 4, 6)  # [B, channels, T, H, W]: 3 latent frames of 2 × 3 tokens


def tiny_wan(dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> WanTransformer3DModel:
    """In half precision as `from_pretrained(torch_dtype=…)` leaves it: some modules stay in float32."""
    torch.manual_seed(seed)
    transformer = WanTransformer3DModel(**{**TINY, **changes}).eval()
    for name, parameter in transformer.named_parameters():
        if not any(kept in name for kept in transformer._keep_in_fp32_modules):
            parameter.data = parameter.data.to(dtype)
    return transformer


def meta_wan(config: dict[str, Any]) -> WanTransformer3DModel:
    with torch.device("meta"):
        return WanTransformer3DModel(**config)


def tiny_config(**changes: Any) -> CameraBranchConfig:
    return CameraBranchConfig(**{"compression": 2, "encoding_options": TINY_MEROPE, **changes})


def tiny_inputs(dtype: torch.dtype = torch.float32, seed: int = 1, shape: tuple[int, ...] = LATENTS) -> dict[str, Any]:
    """Keyword arguments of a forward, all but the cameras."""
    generator = torch.Generator().manual_seed(seed)
    batch = shape[0]
    return {
        "hidden_states": torch.randn(shape, generator=generator).to(dtype),
        "timestep": torch.full((batch,), 500),
        "encoder_hidden_states": torch.randn(batch, 5, TINY["text_dim"], generator=generator).to(dtype),
        "return_dict": False,
    }


def cameras(count: int = 3, batch: int | None = None, seed: int = 0) -> Cameras:
    """A drive around a bend, or a batch of random clips."""
    if batch is None:
        return Cameras(curved_drive(count, step_m=1.0 + seed), PINHOLE)
    return Cameras(random_poses(batch, count, seed=seed), PINHOLE)


def run(transformer: WanTransformer3DModel, cameras: Any = None, **inputs: Any) -> Tensor:
    """The output for tiny inputs, with cameras in attention_kwargs where given."""
    kwargs = {} if cameras is None else {"attention_kwargs": {"cameras": cameras}}
    return transformer(**{**tiny_inputs(transformer.dtype), **inputs}, **kwargs)[0]


def perturb(branch: CameraBranch, scale: float = 0.3, seed: int = 7) -> CameraBranch:
    """Give every parameter of a branch some noise, as if it had been trained: zero-initialised layers start to act."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in branch.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator).to(parameter)
    return branch

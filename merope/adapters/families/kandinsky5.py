"""Kandinsky 5: text by cross-attention, channels last. Its forward has no attention_kwargs.

Nothing but `sparse_params` reaches every block as it came. It is None unless attention is sparse.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from merope.adapters.conditioning import CameraArgument, CameraCondition
from merope.adapters.families.facts import Family
from merope.errors import invalid

SPARSE = "nabla"
"""Attention of the models that make 10 s."""


class NotSparse(CameraArgument):
    """In the place of sparse parameters that are not there. The model asks them whether tokens are in another order."""

    def __getitem__(self, name: str) -> bool:
        return False


class Kandinsky5Family(Family):
    """Other names in the config, and channels last."""

    def base(self, config: Mapping[str, Any]) -> dict[str, Any]:
        if config["attention_type"] == SPARSE:
            fix = "use a model with regular attention, of 5 s: sparse attention has its tokens in another order"
            raise invalid("transformer.attention_type", "regular with a camera branch", repr(SPARSE), fix)
        head_dim = sum(config["axes_dims"])
        named = {
            "num_layers": config["num_visual_blocks"],
            "num_attention_heads": config["model_dim"] // head_dim,
            "attention_head_dim": head_dim,
        }
        return super().base({**config, **named})

    def video(self, arguments: Mapping[str, Any]) -> Tensor:  # [B, channels, T, H, W]
        """The latents, channels first."""
        return arguments["hidden_states"].movedim(-1, 1)  # which are [B, T, H, W, channels]

    def carried(self, native: Any, condition: CameraCondition) -> NotSparse:
        if native is not None:
            fix = "use a model with regular attention: sparse attention has its tokens in another order"
            raise invalid("sparse_params", "None with a camera branch", type(native).__name__, fix)
        return NotSparse(condition)


KANDINSKY5 = Kandinsky5Family(
    transformer="Kandinsky5Transformer3DModel",
    models="Kandinsky 5",
    blocks="visual_transformer_blocks",
    attention="self_attention",
    query="to_query",
    argument="sparse_params",
    recorded=("in_visual_dim", "out_visual_dim", "ff_dim"),
    not_trained="its text has neither padding nor a mask, so captions of a batch would have to be of one length",
)

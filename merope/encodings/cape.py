"""CaPE: the transposed reverse pose tiled over the whole head, on the logits only (EscherNet, Kong et al. 2024)."""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from merope.attention.plan import Block
from merope.encodings.gta import homogeneous_block
from merope.encodings.protocol import Encoding
from merope.encodings.rotary import check_head_dim
from merope.encodings.tokens import Tokens
from merope.geometry.poses import inverse


@dataclass(frozen=True)
class CaPE(Encoding):
    """U = (V_j V_i⁻¹)ᵀ on every group of 4 channels, with V = camera-from-world: the 6-DoF form of EscherNet.

    The transpose puts the metres of the relative pose in the bottom row of U, where GTA has them in the last column.
    Logits grow with the metres between two cameras. All tokens of a camera share one matrix: image position and time
    have no effect.

    transform_values: False as in EscherNet, where values stay as they are.
    camera_axes: axes in which V is written. "opencv" is this library's (x right, y down, z forward); "opengl" (x right,
        y up, z backward) is EscherNet's, for its weights. Poses are given with OpenCV axes in both cases.
    """

    transform_values: bool = field(default=False, kw_only=True)
    camera_axes: Literal["opencv", "opengl"] = "opencv"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head_dim(self.head_dim, 4)

    def blocks(self, query: Tokens, key: Tokens) -> tuple[Block, ...]:
        """One camera block: O = (V_i⁻¹)ᵀ, K = V_jᵀ."""
        query_matrices = self._origin_from_axes(query).mT
        key_matrices = inverse(self._origin_from_axes(key)).mT
        return (homogeneous_block(self.head_dim, query, query_matrices[:, :, None], key, key_matrices[:, :, None]),)

    def _origin_from_axes(self, tokens: Tokens) -> Tensor:  # [B, V, 4, 4]
        """V⁻¹: camera-to-origin for the chosen camera axes."""
        poses = tokens.origin_from_camera
        return poses if self.camera_axes == "opencv" else poses * poses.new_tensor([1.0, -1.0, -1.0, 1.0])

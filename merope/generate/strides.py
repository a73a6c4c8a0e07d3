"""What a model's patches and VAE demand of a video: sizes and numbers of frames."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from merope.adapters.families.facts import Family
from merope.adapters.families.wan_clips import wan_vae_strides
from merope.adapters.families.wan_family import RGB_CHANNELS
from merope.errors import invalid


@dataclass(frozen=True)
class VideoStrides:
    """RGB frames per latent frame, pixels per latent pixel, and latent pixels and frames per token."""

    frames: int
    pixels: int
    patch_rows: int
    patch_columns: int
    patch_frames: int = 1

    @property
    def of_cameras(self) -> int:
        """RGB frames per frame of tokens, which has one camera."""
        return self.frames * self.patch_frames

    @classmethod
    def of(
        cls,
        transformer: Mapping[str, Any],  # config of a WanTransformer3DModel
        vae: Mapping[str, Any] | None,  # config of an AutoencoderKLWan; None for a pixel-space model
    ) -> Self:
        """The strides of a model, refusing transformers that do not take the VAE's latents as they are."""
        patch_frames, rows, columns = _checked_patch(transformer["patch_size"])
        if patch_frames != 1:
            fix = "cameras belong to single latent frames; use a model with patch_size (1, h, w)"
            raise invalid("transformer.patch_size[0]", "1", patch_frames, fix)
        channels = RGB_CHANNELS if vae is None else vae["z_dim"]
        if transformer["in_channels"] != channels:
            source = "RGB frames (no VAE)" if vae is None else "the VAE's latents"
            fix = "use a text-to-video or TI2V model: image-to-video Wan takes its image in additional channels"
            raise invalid("transformer.in_channels", f"{channels}, {source}", transformer["in_channels"], fix)
        return cls(*((1, 1) if vae is None else wan_vae_strides(vae)), rows, columns)

    @classmethod
    def of_family(cls, family: Family, transformer: Mapping[str, Any], vae: Any) -> Self:
        """The strides of a model of any family, with its VAE, which may be without weights."""
        patch_frames, rows, columns = _checked_patch(family.patch(transformer))
        return cls(*family.vae_strides(vae), rows, columns, patch_frames)

    def check(self, height: int, width: int, num_frames: int, frames_name: str = "num_frames") -> None:
        """Refuse sizes that the model cannot make, naming the nearest ones that it can."""
        for name, size, patch in (("height", height, self.patch_rows), ("width", width, self.patch_columns)):
            step = self.pixels * patch
            if size < 1 or size % step:
                below, above = size // step * step, (size // step + 1) * step
                nearest = f"{below} or {above}" if below > 0 else f"{above}"
                raise invalid(name, f"a multiple of {step}, the pixels of a token", size, f"use {nearest}")
        self.check_frames(frames_name, num_frames)

    def check_frames(self, name: str, count: int) -> None:
        """Refuse numbers of frames that do not fill latent frames: the first holds one RGB frame, the others four."""
        if count < 1 or (count - 1) % self.frames:
            below = (count - 1) // self.frames * self.frames + 1
            nearest = f"{below} or {below + self.frames}" if count > 0 else "1"
            raise invalid(
                name, f"{self.frames}k + 1 frames" if self.frames > 1 else "positive", count, f"use {nearest}"
            )

    def check_blocks(self, name: str, count: int, block: int) -> None:
        """Refuse numbers of frames that do not fill blocks of so many latent frames."""
        first, step = (block - 1) * self.frames + 1, block * self.frames
        if count < first or (count - first) % step:
            below = first + (count - first) // step * step
            fix = f"use {below} or {below + step}" if count > first else f"use {first}"
            sizes = ", ".join(str(first + n * step) for n in range(3))
            raise invalid(name, f"{sizes}, … frames, whole blocks of {block} latent frames", count, fix)

    def latent_frames(self, num_frames: int) -> int:
        """Latent frames of a clip. Where a token spans several, the first is repeated until tokens are full."""
        count = (num_frames - 1) // self.frames + 1
        return -(-count // self.patch_frames) * self.patch_frames

    def latent_size(self, height: int, width: int) -> tuple[int, int]:
        """Latent rows and columns of a frame."""
        return height // self.pixels, width // self.pixels

    def tokens_per_frame(self, latent_rows: int, latent_columns: int) -> int:
        """Tokens of a latent frame."""
        return (latent_rows // self.patch_rows) * (latent_columns // self.patch_columns)


def _checked_patch(size: Sequence[int]) -> tuple[int, int, int]:
    """Latent frames, rows and columns of a token, as a config says them."""
    is_list = isinstance(size, list | tuple) and len(size) == 3
    if not is_list or not all(isinstance(part, int) and part >= 1 for part in size):
        raise invalid("transformer.patch_size", "three ints ≥ 1", repr(size), "take it from the base model")
    frames, rows, columns = size
    return frames, rows, columns

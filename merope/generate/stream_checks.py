"""What a stream is given, checked before any model runs: models, settings, prefix, cameras."""

from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from torch import Tensor

from merope.adapters.history import HistoryReferences
from merope.adapters.recorded_passes import why_not_recorded
from merope.errors import invalid
from merope.generate.conditions import check_size
from merope.generate.strides import VideoStrides
from merope.generate.text import Text
from merope.geometry.cameras import Cameras
from merope.geometry.lens_batches import kind
from merope.geometry.lenses import Lens

if TYPE_CHECKING:
    from merope.generate.camera_video import CameraVideoPipeline
    from merope.generate.stream_file import StreamSettings


def check_models(pipe: "CameraVideoPipeline") -> None:
    """Refuse models whose parts do not go on from block to block."""
    vae: Any = pipe.vae
    if vae is not None and not isinstance(vae, AutoencoderKLWan):
        raise invalid("vae", "an AutoencoderKLWan", type(vae).__name__, "a stream goes on inside its layers")
    if vae is not None and vae.use_tiling:
        raise invalid("vae", "without tiling: blocks are decoded whole", "tiling", "call vae.disable_tiling()")
    parts = [] if vae is None else vae.modules()
    if any(hasattr(part, hook) for part in parts for hook in ("_hf_hook", "_diffusers_hook")):
        raise invalid("vae", "on one device", "one that is offloaded", "move the pipeline to the device with pipe.to")
    if getattr(pipe.transformer, "is_cache_enabled", False):
        fix = "call transformer.disable_cache()"
        raise invalid("transformer", "without a cache of diffusers, which leaves blocks out", "one with it", fix)


def check_graphs(cuda_graphs: bool, pipe: "CameraVideoPipeline") -> None:
    """Refuse to record what cannot be recorded."""
    reason = why_not_recorded(pipe.transformer) if cuda_graphs else None
    if reason is not None:
        fix = "leave it out, or move a transformer that is not compiled to a GPU as a whole"
        raise invalid("cuda_graphs", "False for this model", f"True for {reason}", fix)


def check_settings(pipe: "CameraVideoPipeline", settings: "StreamSettings", text: Text) -> None:
    """Refuse sizes, steps and text that the pipeline's own call would refuse."""
    pipe.strides.check(settings.height, settings.width, 1)
    has_encoder = pipe.text_encoder is not None and pipe.tokenizer is not None
    text.check(has_encoder, settings.guidance > 1.0, pipe.transformer.config.text_dim)
    if text.count != 1:
        raise invalid("prompt", "one: a stream is one video", text.count, "make a stream for each")
    if not isinstance(settings.steps, int) or settings.steps < 1:
        raise invalid("num_inference_steps", "an int ≥ 1", repr(settings.steps), "leave it out")
    for name, fix in (("seed", "each block draws its noise from it"), ("remember", "count latent frames")):
        value = getattr(settings, name)
        if not isinstance(value, int) or value < 0:
            raise invalid(name, "an int ≥ 0", repr(value), fix)
    check_past_noise(settings.past_noise)


def check_past_noise(level: float) -> None:
    """Refuse what is no level of noise, or nothing but noise."""
    if not isinstance(level, int | float) or not 0.0 <= level < 1.0:
        fix = "stay within the objective.past_noise that the model was trained with; 0 is none"
        raise invalid("past_noise", "a noise level from 0 to below 1", repr(level), fix)


def check_recall(recall: int, history: HistoryReferences | None, settings: "StreamSettings") -> None:
    """Refuse to look for more views than a block has frames, in a memory that there is not, or beside given ones."""
    if not isinstance(recall, int) or isinstance(recall, bool) or not 0 <= recall <= settings.block:
        fix = "each frame of the block is matched with one at most"
        raise invalid("recall", f"an int from 0 to {settings.block}, the latent frames of a block", repr(recall), fix)
    if recall and history is not None:
        raise invalid("history", "None where views are recalled", "both", "pass one of the two")
    if recall and not settings.remember:
        fix = "make it with pipe.stream(remember=300)"
        raise invalid("recall", "0 for a stream that remembers nothing", recall, fix)


def check_prefix_blocks(
    frames: Tensor,  # uint8 [B, T, H, W, 3]
    strides: VideoStrides,
    settings: "StreamSettings",
) -> None:
    """Refuse a prefix that does not fill blocks, or is of another size."""
    if frames.shape[0] != 1:
        raise invalid("prefix", "of one video", f"{frames.shape[0]}", "make a stream for each")
    strides.check_blocks("prefix", frames.shape[1], settings.block)
    check_size("prefix", tuple(frames.shape[2:4]), settings.height, settings.width)


def stream_cameras(
    given: Cameras | Tensor | None,
    lens: Lens | None,
    frames: int,
    settings: "StreamSettings",
    has_branch: bool,
    seen: Cameras | None,
) -> Cameras | None:  # [frames]
    """The cameras of these RGB frames, in the lens of the stream where they bring none."""
    if not has_branch:
        if given is not None:
            fix = "call merope.load_branch(pipe.transformer, folder) first, or leave the cameras out"
            raise invalid("cameras", "None for a model without a camera branch", "cameras", fix)
        return None
    cameras = _with_lens(given, lens, frames)
    if cameras.count != frames or cameras.world_from_camera.ndim != 3:
        got = list(cameras.world_from_camera.shape[:-2])
        fix = "stream.block_frames says how many the next block takes"
        raise invalid("cameras", f"{frames}, one for each of the block's RGB frames", got, fix)
    size = (cameras.lens.width, cameras.lens.height)
    if size != (settings.width, settings.height):
        fix = f"use merope.geometry.lens_batches.resized(lens, {settings.width}, {settings.height})"
        raise invalid("lens", f"for images of {settings.width}×{settings.height}", f"{size[0]}×{size[1]}", fix)
    if seen is not None and kind(seen.lens) != kind(cameras.lens):
        fix = "its parameters may change from frame to frame, its kind may not: begin another stream"
        raise invalid("lens", f"a {kind(seen.lens)} as before", kind(cameras.lens), fix)
    return cameras


def _with_lens(given: Cameras | Tensor | None, lens: Lens | None, frames: int) -> Cameras:
    if isinstance(given, Cameras):
        return given
    if given is None:
        fix = f"pass {frames} poses [{frames}, 4, 4] or merope.Cameras"
        raise invalid("cameras", "given to a model with a camera branch", None, fix)
    if lens is None:
        fix = "pass lens= when the stream is made, or merope.Cameras"
        raise invalid("lens", "known for poses that come alone", None, fix)
    try:
        poses = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        fix = "see docs/streaming.md"
        raise invalid("cameras", f"poses [{frames}, 4, 4] or merope.Cameras", type(given).__name__, fix) from None
    return Cameras(poses, lens)

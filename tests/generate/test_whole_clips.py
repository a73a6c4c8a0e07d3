"""One pass over a whole clip gives what diffusers' chunks give."""

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from diffusers import AutoencoderKLWan
from tiny_pipelines import miniature_vae
from torch import Tensor

from merope.generate import whole_clips
from merope.generate.frame_coding import VaeCoding
from merope.generate.whole_clips import DecodedStream, decode_clips, decode_whole, encode_clips, encode_whole

WAN21 = {"dim_mult": [1, 2, 2], "temperal_downsample": [True, True], "scale_factor_spatial": 4}
STRIDE_2 = {"dim_mult": [1, 2, 2], "temperal_downsample": [False, True], "scale_factor_temporal": 2}
MINIATURE = {**WAN21, "patch_size": 2, "in_channels": 12, "out_channels": 12, "decoder_base_dim": 6}
WAN22 = {
    "dim_mult": [1, 2, 2, 2],
    "temperal_downsample": [False, True, True],
    "is_residual": True,
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "scale_factor_spatial": 16,
}
KINDS = {"wan21": WAN21, "stride": STRIDE_2, "miniature": MINIATURE, "wan22": WAN22}


def tiny(kind: str) -> AutoencoderKLWan:
    torch.manual_seed(3)
    statistics = {"latents_mean": [0.0] * 3, "latents_std": [1.0] * 3}
    sizes: dict[str, Any] = {"base_dim": 4, "z_dim": 3, "num_res_blocks": 1, **statistics, **KINDS[kind]}
    return AutoencoderKLWan(**sizes).double().eval()


def random_video(frames: int) -> Tensor:  # [2, 3, T, 16, 32]
    return torch.rand(2, 3, frames, 16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2 - 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frames", [1, 5, 9, 17, 49])
@torch.no_grad()
def test_whole_clips_give_what_chunks_give(kind: str, frames: int) -> None:
    vae, video = tiny(kind), random_video(frames)
    posterior = vae.encode(video).latent_dist
    torch.testing.assert_close(encode_whole(vae, video), posterior.parameters, rtol=0.0, atol=1e-10)
    frames_in_chunks = vae.decode(posterior.mean).sample
    torch.testing.assert_close(decode_whole(vae, posterior.mean), frames_in_chunks, rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("kind", ["miniature", "wan22"])
def test_every_weight_gets_a_gradient(kind: str) -> None:
    vae, video = tiny(kind), random_video(9)
    mean, log_variance = encode_whole(vae, video).chunk(2, dim=1)
    decoded = decode_whole(vae, mean + (0.5 * log_variance).exp())
    ((decoded - video) ** 2).mean().backward()
    without = [name for name, weight in vae.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert not without


def test_whole_clips_compile_without_breaks() -> None:
    vae, video = tiny("miniature"), random_video(5)

    def through(video: Tensor) -> Tensor:
        return decode_whole(vae, encode_whole(vae, video).chunk(2, dim=1)[0])

    compiled = torch.compile(through, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(video), through(video), rtol=0.0, atol=1e-10)


def test_lengths_that_do_not_fill_latent_frames_are_refused() -> None:
    with pytest.raises(ValueError, match=r"video must be 4k \+ 1 frames, got 7; use 5 or 9"):
        encode_whole(tiny("wan21"), random_video(7))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_clips_take_either_way_with_the_same_result(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vae, video = tiny(kind), random_video(9)
    latents = encode_clips(vae, video)
    frames = decode_clips(vae, latents)
    for pixels in (video[0, 0].numel(), 0):  # one clip at a time, then chunk by chunk
        monkeypatch.setattr(whole_clips, "WHOLE_PIXELS", pixels)
        torch.testing.assert_close(encode_clips(vae, video), latents, rtol=0.0, atol=1e-10)
        torch.testing.assert_close(decode_clips(vae, latents), frames, rtol=0.0, atol=1e-10)


def test_small_clips_pass_whole_unless_the_vae_saves_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    vae, video, chunks = tiny("miniature"), random_video(9), []
    monkeypatch.setattr(vae, "_encode", lambda x: chunks.append(len(x)) or encode_whole(vae, x))
    encode_clips(vae, video)
    assert chunks == []
    vae.enable_tiling()
    encode_clips(vae, video)
    vae.disable_tiling()
    accelerate.cpu_offload(vae, execution_device=torch.device("cpu"))
    encode_clips(vae, video)
    assert chunks == [2, 2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [(3, 3, 1), (1, 1, 5), (2, 5), (7,)], ids=str)
@torch.no_grad()
def test_a_stream_of_blocks_is_the_whole_clip(kind: str, blocks: tuple[int, ...]) -> None:
    vae = tiny(kind)
    latents = torch.randn(2, 3, 7, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    stream = DecodedStream(vae)
    frames = torch.cat([stream.decode(block) for block in latents.split(blocks, dim=2)], dim=2)
    torch.testing.assert_close(frames, decode_whole(vae, latents), rtol=0.0, atol=1e-10)


@torch.no_grad()
def test_a_stream_may_be_undone_and_gone_on_with() -> None:
    vae = tiny("miniature")
    first, wrong, right = torch.randn(3, 1, 3, 2, 4, 8, dtype=torch.float64).unbind()
    stream = DecodedStream(vae)
    stream.decode(first)
    before = stream.past
    stream.decode(wrong)
    stream.past = before
    frames = stream.decode(right)
    elsewhere = DecodedStream(vae, {name: value.clone() for name, value in before.items()})
    assert torch.equal(elsewhere.decode(right), frames)
    assert {name: value.shape for name, value in stream.past.items()} == {n: v.shape for n, v in before.items()}


def test_a_prefix_is_encoded_outside_of_the_autocast_of_a_transformer(tmp_path: Path) -> None:
    """As training encodes its clips. Otherwise a model would be given other latents than it has learnt."""
    miniature_vae().save_pretrained(tmp_path)
    coding = VaeCoding(tmp_path)
    frames = torch.randint(0, 256, (1, 5, 32, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    latents = coding.encode_frames(frames)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(coding.encode_frames(frames), latents)

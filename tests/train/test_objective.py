"""Flow matching: the interpolation, which frames are clean, and dice that belong to the clip alone."""

import pytest
import torch
from torch.testing import assert_close

from merope.adapters.families import FAMILIES
from merope.train.config import ObjectiveSection
from merope.train.objective import add_noise, clip_generator, loss_per_clip, shifted

CPU = torch.device("cpu")


def clips(count: int = 3) -> torch.Tensor:  # [B, C, T, H, W]
    return torch.rand(count, 2, 5, 4, 6, generator=torch.Generator().manual_seed(7)) * 2 - 1


def generators(places: list[int], step: int = 4) -> list[torch.Generator]:
    return [clip_generator(1, step, place, CPU) for place in places]


def test_noised_clips_lie_between_data_and_noise() -> None:
    clean = clips()
    noised = add_noise(clean, 2, ObjectiveSection(text_dropout=0), generators([0, 1, 2]))
    noise = noised.target + clean
    sigma = noised.sigma[:, None, :, None, None]
    assert_close(noised.latents, (1 - sigma) * clean + sigma * noise)
    assert torch.equal(noised.latents[:, :, :2], clean[:, :, :2])
    assert noised.generated.tolist() == [[False, False, True, True, True]] * 3
    assert 0.5 < float(noise.std()) < 1.5
    assert (noised.sigma[:, :2] == 0).all()
    assert (noised.sigma[:, 2:] == noised.sigma[:, 2:3]).all()
    assert len(set(noised.sigma[:, 2].tolist())) == 3


def test_a_clip_has_its_own_dice_whoever_shares_its_batch() -> None:
    clean, settings = clips(), ObjectiveSection()
    together = add_noise(clean, 1, settings, generators([0, 1, 2]))
    alone = add_noise(clean[2:], 1, settings, generators([2]))
    assert torch.equal(together.latents[2:], alone.latents)
    assert torch.equal(together.target[2:], alone.target)
    other_step = add_noise(clean[2:], 1, settings, generators([2], step=5))
    assert not torch.equal(other_step.target, alone.target)


def test_dropouts_happen_at_their_rates() -> None:
    count = 400
    clean = torch.zeros(count, 1, 3, 1, 1)
    settings = ObjectiveSection(text_dropout=0.2, prefix_dropout=0.7)
    noised = add_noise(clean, 1, settings, generators(list(range(count))))
    assert abs(float(noised.drop_text.float().mean()) - 0.2) < 0.07
    assert abs(float(noised.generated[:, 0].float().mean()) - 0.7) < 0.08
    assert noised.generated[:, 1:].all()


def test_noise_levels_and_dropouts_are_independent() -> None:
    count = 400
    settings = ObjectiveSection(text_dropout=0.5, prefix_dropout=0.5, shift=1.0)
    noised = add_noise(torch.zeros(count, 1, 3, 1, 1), 1, settings, generators(list(range(count))))
    draws = torch.stack((noised.sigma[:, 2], noised.drop_text.float(), noised.generated[:, 0].float()))
    assert (torch.corrcoef(draws) - torch.eye(3)).abs().max() < 0.2


def test_every_block_of_a_causal_model_has_a_noise_level_of_its_own() -> None:
    settings = ObjectiveSection(causal_block_frames=2)
    noised = add_noise(clips(3)[:, :, :4].repeat(1, 1, 2, 1, 1), 2, settings, generators([0, 1, 2]))
    blocks = noised.sigma.unflatten(1, (4, 2))
    assert (blocks[:, 0] == 0).all()
    assert torch.equal(blocks[..., 0], blocks[..., 1])
    assert len(set(blocks[:, 1:, 0].flatten().tolist())) == 9
    assert noised.generated.tolist() == [[False] * 2 + [True] * 6] * 3


def test_clean_tokens_are_at_time_zero() -> None:
    noised = add_noise(clips(2), 2, ObjectiveSection(), generators([0, 1]))
    wan, latents = FAMILIES["WanTransformer3DModel"], torch.zeros(2, 4, 5, 4, 6)
    times = wan.video_inputs({"patch_size": (1, 2, 2)}, latents, 1000 * noised.sigma, 8)["timestep"]
    assert times.shape == (2, 30)
    assert (times[:, :12] == 0).all()
    assert_close(times[:, 12:], (1000 * noised.sigma[:, 2:3]).expand(-1, 18))


def test_the_loss_sees_generated_frames_only_and_every_clip_alike() -> None:
    clean = clips(2)
    noised = add_noise(clean, 2, ObjectiveSection(prefix_dropout=0), generators([0, 1]))
    perfect = noised.target.clone()
    perfect[:, :, :2] = 100.0  # what is predicted for clean frames does not matter
    assert_close(loss_per_clip(perfect, noised), torch.zeros(2))
    off = perfect.clone()
    off[1, :, 3] += 0.5
    assert_close(loss_per_clip(off, noised), torch.tensor([0.0, 0.25 / 3]))


def test_shift_moves_noise_levels_up_and_keeps_the_ends() -> None:
    u = torch.linspace(0, 1, 11)
    assert_close(shifted(u, 1.0), u)
    assert (shifted(u, 5.0)[1:-1] > u[1:-1]).all()
    assert_close(shifted(u, 5.0)[[0, -1]], u[[0, -1]])
    assert_close(shifted(torch.tensor(0.5), 5.0), torch.tensor(5 / 6))


def test_levels_of_steps_are_the_only_ones() -> None:
    """Each as often as the others, one for every block."""
    levels, count = (1.0, 0.75, 0.5), 300
    settings = ObjectiveSection(levels=levels, causal_block_frames=2, text_dropout=0)
    noised = add_noise(torch.zeros(count, 1, 6, 1, 1), 2, settings, generators(list(range(count))))
    assert not noised.sigma[:, :2].any()
    blocks = noised.sigma[:, 2::2]
    assert torch.equal(blocks, noised.sigma[:, 3::2])
    shares = [float((blocks == level).float().mean()) for level in levels]
    assert sum(shares) == pytest.approx(1.0)
    assert all(share == pytest.approx(1 / 3, abs=0.06) for share in shares)
    assert (blocks[:, 0] != blocks[:, 1]).any()

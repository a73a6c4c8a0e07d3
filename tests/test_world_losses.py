"""benchmarks/world_losses.py: the loss of a prediction, by noise and frame."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from merope.data.world_clips import WorldClips
from merope.demo import SHIPPED_MODEL

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import world_losses

CLIPS = WorldClips(frames=4, height=16, width=32, prefix_frames=2)


class Still:
    """A model that takes every frame for the last given one, and knows how much noise a token has."""

    config = SimpleNamespace(patch_size=(1, 8, 8), text_dim=8)

    def __call__(self, noised: Tensor, timestep: Tensor, text: Tensor, **more: Any) -> Any:
        assert timestep.shape == (len(noised), 4 * 2 * 4)
        sigma = timestep.unflatten(1, (4, 8))[:, None, :, :1, None] / 1000.0
        assert not sigma[:, :, :2].any()
        assert text.shape == (len(noised), 1, 8)
        still = noised[:, :, 1:2].expand_as(noised)
        noise = (noised - (1.0 - sigma) * still) / sigma.clamp_min(1e-6)
        return SimpleNamespace(sample=noise - still)


def test_a_still_guess_is_as_wrong_as_the_frames_are_different(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_losses, "load_row", lambda folder, device: SimpleNamespace(transformer=Still()))
    monkeypatch.setattr(world_losses, "NOISE", (0.25, 0.5))
    monkeypatch.setattr(world_losses, "AT_ONCE", 2)
    found = world_losses.losses(Path("any"), CLIPS, 3, torch.device("cpu"))
    true = CLIPS.pictures([0, 1, 2], CLIPS.cameras([0, 1, 2])).double() / 127.5 - 1.0
    change = (true[:, 2:] - true[:, 1:2]).square().mean(dim=(0, 2, 3, 4))
    # velocity error: the guess is off by d, and so is the noise, by (1 − σ) d / σ
    expected = torch.stack([change / sigma**2 for sigma in (0.25, 0.5)])
    assert (found - expected).abs().max() < 1e-4 * expected.max()
    assert change.min() > 0.0


def test_the_row_without_cameras_has_losses_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_losses, "NOISE", (0.5, 0.99))
    shutil.copytree(SHIPPED_MODEL, tmp_path / "none", ignore=shutil.ignore_patterns("branch"))
    folders = (SHIPPED_MODEL, tmp_path / "none")
    found = [world_losses.losses(folder, CLIPS, 2, torch.device("cpu")) for folder in folders]
    assert all(loss.shape == (2, 2) and bool((loss > 0).all()) for loss in found)
    assert not torch.equal(*found)

"""The examples of the page on streaming work as printed."""

import re
from pathlib import Path

import torch
from wan_models import cameras, perturb, tiny_config, tiny_inputs, tiny_wan

from merope.adapters.wan import attach

PAGE = (Path(__file__).parents[2] / "docs" / "streaming.md").read_text()
FRAMES, TOKENS = 6, 6


def example_below(heading: str) -> str:
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return str(code)


def test_a_causal_wan() -> None:
    transformer = tiny_wan(num_layers=2)
    perturb(attach(transformer, tiny_config()))
    inputs = tiny_inputs(shape=(1, 4, FRAMES, 4, 6))
    made = {
        "transformer": transformer,
        "cameras": cameras(FRAMES),
        "latents": inputs["hidden_states"],
        "noisy": torch.randn(1, 4, FRAMES, 4, 6),
        "timestep": inputs["timestep"],
        "timesteps": torch.tensor([0.0, 700.0]).repeat_interleave(FRAMES * TOKENS)[None],
        "text": inputs["encoder_hidden_states"],
    }
    exec(example_below("A causal Wan"), made)
    assert made["made"].shape[2] == 2 * FRAMES
    assert made["velocity"].shape[2] == made["cache"].count == 3

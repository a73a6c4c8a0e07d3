"""The examples of the page on streaming work as printed."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from adapters.wan_models import cameras, perturb, tiny_config, tiny_inputs, tiny_wan
from latent_folder import write_latent_model
from scenes import curved_drive
from tiny_pipelines import HEIGHT, LENS, WIDTH, tiny_pipeline, video

import merope
from merope.adapters.attachment import attach
from merope.cli import main
from merope.formats.video import read_first_frames

PAGE = (Path(__file__).parents[2] / "docs" / "streaming.md").read_text()
FRAMES, TOKENS = 6, 6


def example_below(heading: str) -> str:
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return str(code)


def test_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    poses = curved_drive(21, step_m=0.4)
    made = {
        "merope": merope,
        "pipe": tiny_pipeline(),
        "nine_frames": video(9),
        "their_poses": poses[:9],
        "poses": poses[9:],
        "lens": LENS,
        "other_lens": merope.Pinhole(40.0, 40.0, WIDTH / 2, HEIGHT / 2, WIDTH, HEIGHT),
    }
    for heading, few_steps in (("A stream", "seed=0"), ("Back at a place", "remember=300")):
        exec(example_below(heading).replace(few_steps, f"{few_steps}, num_inference_steps=2"), made)
        assert made["frames"].shape == (12, HEIGHT, WIDTH, 3)
        assert made["stream"].frames == 21


def test_the_command(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed, with small models and frames."""
    monkeypatch.chdir(tmp_path)
    write_latent_model(tmp_path / "tiny")
    names = {"Wan2.2-TI2V-5B-Diffusers": "model", "my-branch": "branch", "long.json": "bend.json"}
    for name, given in {**names, "street.mp4": "street.mp4"}.items():
        (tmp_path / name).symlink_to(files / given)
    section = PAGE.split("\n## From the command line\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    world, resumed, street = block.replace("\\\n", " ").splitlines()
    for line, smaller in ((world, "--model tiny"), (resumed, ""), (street, f"--size {HEIGHT} {WIDTH}")):
        assert main([*shlex.split(line)[1:], *smaller.split()]) == 0
    assert read_first_frames(tmp_path / "my-drive" / "video.mp4", 1)[1] == 59
    assert read_first_frames(tmp_path / "street-drive" / "video.mp4", 1)[1] == 60


def test_every_option_of_the_command_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["drive", "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    pages = PAGE + (Path(__file__).parents[2] / "docs" / "generate.md").read_text()
    assert options <= set(re.findall(r"--[a-z][a-z-]+", pages))


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

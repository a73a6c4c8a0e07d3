"""A small latent model in a folder: a VAE of strides 4 and 8, a transformer and its branch, random weights."""

from pathlib import Path

from adapters.wan_models import perturb, tiny_config, tiny_wan
from tiny_pipelines import euler, miniature_vae

from merope.adapters.attachment import attach, detach
from merope.generate.camera_video import CameraVideoPipeline
from merope.world.clips import WorldClips
from merope.world.clips_file import write_clips

CLIPS = WorldClips(frames=9, height=32, width=64, frame_rate_hz=16.0, prefix_frames=5)
STEPS = 2


def write_latent_model(folder: Path) -> None:
    """A pipeline folder as the demo and the benchmark take it, with what its clips are like."""
    transformer = tiny_wan(num_layers=2)
    perturb(attach(transformer, tiny_config()), scale=1.0)
    detach(transformer).save_pretrained(folder / "branch")
    CameraVideoPipeline(None, None, miniature_vae(), euler(), transformer, expand_timesteps=True).save_pretrained(
        folder
    )
    write_clips(folder, CLIPS, STEPS)

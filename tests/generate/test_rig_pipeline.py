"""Rigs through the pipeline, the command and their files."""

import json
from pathlib import Path

import pytest
import torch
from adapters.wan_models import perturb, tiny_config
from generate_files import FRAMES, arguments
from tiny_pipelines import HEIGHT, WIDTH, dice, latents_of, pixel_pipeline, tiny_pipeline, video

from merope import Cameras, Pinhole, Rig
from merope.adapters.attachment import attach
from merope.cli import main
from merope.formats import read
from merope.formats.rig_file import read_rig, write_rig
from merope.formats.video import write_video
from merope.geometry.lens_batches import resized
from merope.geometry.rigs import ring
from merope.geometry.trajectories import driving_path

FOCAL = torch.tensor([50.0, 40.0], dtype=torch.float64)
RIG = ring((0, 60), Pinhole(FOCAL, FOCAL, WIDTH / 2, HEIGHT / 2, WIDTH, HEIGHT), 0.5, ("front", "right"))
PATH = driving_path(5, 12.0, torch.Generator().manual_seed(1), prefix=1)
SIZE = {"height": HEIGHT, "width": WIDTH, "num_frames": 5, "num_inference_steps": 2}


def test_a_rig_is_generated_as_its_views_are_where_they_do_not_see_each_other() -> None:
    pipe = tiny_pipeline(with_branch=False)
    perturb(attach(pipe.transformer, tiny_config(across_views=False)))
    rigs = RIG.cameras(torch.stack((PATH, PATH.flip(0))))
    prefix = torch.stack([video(1, seed=seed) for seed in range(4)])
    noise = torch.randn(4, 4, 2, HEIGHT // 16, WIDTH // 16, generator=dice())
    as_rigs = latents_of(pipe, ["a street", "rain"], rigs, prefix, latents=noise, **SIZE)
    prompts = ["a street", "a street", "rain", "rain"]
    as_clips = latents_of(pipe, prompts, rigs.by_view(), prefix, latents=noise, **SIZE)
    torch.testing.assert_close(as_rigs, as_clips)


def test_views_take_prefixes_of_their_own_and_depend_on_each_other() -> None:
    pipe = tiny_pipeline()
    cameras, prefix = RIG.cameras(PATH), torch.stack((video(1), video(1, seed=3)))
    made = latents_of(pipe, "a street", cameras, prefix, **SIZE)
    assert made.shape == (2, 4, 2, HEIGHT // 16, WIDTH // 16)
    assert torch.equal(made[:, :, :1], pipe.encode_frames(prefix))
    other = latents_of(pipe, "a street", cameras, torch.stack((prefix[0], 255 - prefix[1])), **SIZE)
    assert float((made[0] - other[0]).abs().max()) > 1e-5
    with pytest.raises(ValueError, match="prefix must be one for each of the rig's 2 views, got 1"):
        pipe("a street", cameras, prefix[:1], **SIZE)
    with pytest.raises(ValueError, match="cameras must be 5, one per RGB frame, got 4"):
        pipe("a street", cameras.at(slice(4)), prefix, **SIZE)


def test_a_stream_takes_one_view() -> None:
    pipe = pixel_pipeline()
    stream = pipe.stream(height=HEIGHT, width=WIDTH, num_inference_steps=1, guidance_scale=1.0)
    count = stream.block_frames
    path = driving_path(max(count, 2), 12.0, torch.Generator().manual_seed(1), prefix=1)[:count]
    with pytest.raises(ValueError, match="one for each of the block"):
        stream.drive(RIG.cameras(path))


def test_rig_files_come_back(tmp_path: Path) -> None:
    write_rig(RIG, tmp_path / "rig.json")
    again = read_rig(tmp_path / "rig.json")
    assert again.names == ("front", "right")
    torch.testing.assert_close(again.rig_from_camera, RIG.rig_from_camera, rtol=0, atol=1e-15)
    assert again.lens.fx.tolist() == FOCAL.tolist()
    document = json.loads((tmp_path / "rig.json").read_text())
    for change, message in (
        ({"format": "other"}, '"format": "merope-rig"'),
        ({"views": []}, "at least one view"),
        ({"views": [{"name": "front", "lens": document["views"][0]["lens"]}]}, "rig_from_camera"),
        ({"views": [{**document["views"][0], "lens": None}]}, "one lens with numbers"),
        ({"views": document["views"][:1] * 2}, "2 different ones"),
    ):
        (tmp_path / "bad.json").write_text(json.dumps(document | change))
        with pytest.raises(ValueError, match=message):
            read_rig(tmp_path / "bad.json")


def test_the_command_writes_every_view_with_its_cameras(files: Path, tmp_path: Path) -> None:
    write_rig(RIG, tmp_path / "rig.json")
    for seed, name in enumerate(RIG.names):
        write_video(video(9, seed=seed), tmp_path / f"first-{name}.mp4", 12.0)
    out = tmp_path / "clip.mp4"
    command = arguments(files, out, rig=tmp_path / "rig.json", prefix=tmp_path / "first-{view}.mp4")
    assert main(command) == 0
    made = sorted(path.name for path in tmp_path.glob("clip.*"))
    views = [f"clip.{name}.{kind}" for name in RIG.names for kind in ("cameras.json", "mp4")]
    assert made == sorted([*views, "clip.birdseye.png", "clip.json"])
    front, right = (read(tmp_path / f"clip.{name}.cameras.json") for name in RIG.names)
    assert front.count == FRAMES
    relative = torch.linalg.inv(front.world_from_camera) @ right.world_from_camera
    expected = torch.linalg.inv(RIG.rig_from_camera[0]) @ RIG.rig_from_camera[1]
    torch.testing.assert_close(relative, expected.expand(FRAMES, 4, 4), rtol=0, atol=1e-9)
    assert float(right.lens.fx) == 40.0
    assert main(arguments(files, out, rig=tmp_path / "rig.json")) == 2  # one video for all views
    assert main(arguments(files, out, rig=tmp_path / "rig.json", prefix=None, branch="none")) == 2


def test_a_rig_is_checked() -> None:
    lens = resized(RIG.lens, WIDTH, HEIGHT)
    with pytest.raises(ValueError, match="one per view \\[3\\]"):
        Rig(torch.eye(4).double().repeat(3, 1, 1), lens)
    with pytest.raises(ValueError, match="at least one view"):
        Rig(torch.eye(4).double(), lens)
    assert isinstance(RIG.cameras(PATH), Cameras)

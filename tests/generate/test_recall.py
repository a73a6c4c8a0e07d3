"""Views from the past: which frames come back, and what a block makes of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from scenes import straight_drive
from tiny_pipelines import LENS, video
from torch import Tensor
from torch.testing import assert_close

from merope.adapters.key_cache import KeyCache
from merope.attention.visible_cameras import Visibility
from merope.generate.block_noise import block_noise
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.history_frames import HistoryFrames
from merope.generate.recall import PastBlock, views_of_place, with_block
from merope.generate.stream import CameraStream
from merope.geometry.cameras import Cameras
from tests.generate.tiny_streams import PREFIX, begun, model

AWAY = 500.0  # metres
SHORT = {"window": 3, "sink": 0, "num_inference_steps": 1, "remember": 30, "cameras": straight_drive(PREFIX, 0.4)}


@pytest.fixture(scope="module")
def pipe() -> CameraVideoPipeline:
    return model()


def home_and_back(block: int) -> Tensor:  # [12, 4, 4]
    """Poses of a block: away from the prefix at first, then where it was, a metre to the side."""
    poses = straight_drive(12, 0.3)
    poses[:, 0, 3] += AWAY * (block + 1) if block < 2 else 1.0
    return poses


def driven(pipe: CameraVideoPipeline, recall: int, **options: Any) -> CameraStream:
    stream = begun(pipe, **{**SHORT, **options})
    for block in range(3):
        stream.drive(home_and_back(block), recall=recall)
    return stream


def test_the_place_of_the_prefix_comes_back(pipe: CameraVideoPipeline) -> None:
    stream = driven(pipe, recall=3)
    assert stream.recalled == (1, 2)  # at 1.6 m and 3.2 m, for 0.9 m, 2.1 m and 3.3 m: two want the same
    assert not torch.allclose(stream.latents, driven(pipe, recall=0).latents, rtol=1e-3)


def test_nothing_near_changes_nothing(pipe: CameraVideoPipeline) -> None:
    streams = [begun(pipe, **SHORT) for _ in range(2)]
    made = [stream.drive(home_and_back(0), recall=recall) for stream, recall in zip(streams, (0, 3), strict=True)]
    assert torch.equal(*made)
    assert streams[1].recalled == ()


def test_a_block_with_views_is_one_forward_over_views_past_and_block(pipe: CameraVideoPipeline) -> None:
    """Views see each other, earlier blocks do not see them, and the last block sees views and window."""
    stream = begun(pipe, **{**SHORT, "window": 6})
    made = [pipe.encode_frames(video(PREFIX)[None])]
    poses = [straight_drive(PREFIX, 0.4)[::4]]
    for block in range(3):
        stream.drive(home_and_back(block), recall=2)
        made.append(stream.latents)
        poses.append(home_and_back(block)[3::4])
    views = stream.recalled
    count = len(views)
    assert count
    clip, path = torch.cat(made[:-1], dim=2), torch.cat(poses)
    latents = torch.cat((clip[:, :, list(views)], clip, block_noise(0, 2, made[-1].shape)), dim=2)
    cameras = Cameras(torch.cat((path[list(views)], path)), LENS)
    last = count + clip.shape[2]
    rows = [[(0, count)]] * count
    rows += [[(count + max(0, 3 * block - 3), count + 3 * block + 3)] for block in range(3) for _ in range(3)]
    rows += [[(0, count), (last - 3, last + 3)]] * 3
    moments = [*range(6 - count, 6), *range(12)]  # views stand right before the window of the last block, 6 … 11
    tokens = clip.shape[3] // 2 * (clip.shape[4] // 2)
    levels = (torch.arange(last + 3) >= last).repeat_interleave(tokens) * pipe.scheduler.timesteps[0]
    with torch.no_grad():
        velocity = pipe.transformer(
            latents,
            levels[None],
            torch.zeros(1, 1, 8),
            attention_kwargs={"sees": Visibility(tuple(map(tuple, rows))), "cameras": cameras, "times": moments},
            return_dict=False,
        )[0][:, :, -3:]
    assert_close(latents[:, :, -3:] - velocity, made[-1], rtol=1e-5, atol=1e-5)  # one Euler step from σ = 1 to 0


def test_what_is_remembered_is_bounded_saved_and_taken_back(pipe: CameraVideoPipeline, tmp_path: Path) -> None:
    stream = driven(pipe, recall=1, remember=7)
    assert [block.first for block in stream._state.past] == [6, 9]
    stream.undo()
    assert [block.first for block in stream._state.past] == [3, 6]
    longer = driven(pipe, recall=1)
    longer.save(tmp_path)
    resumed = pipe.resume_stream(tmp_path)
    made = [each.drive(home_and_back(3), recall=3) for each in (longer, resumed)]
    assert torch.equal(*made)
    assert resumed.recalled == longer.recalled != ()


def test_frames_in_the_cache_and_without_a_pose_are_left_out() -> None:
    latents = torch.zeros(1, 4, 3, 2, 2)
    here = Cameras(straight_drive(3, 0.1), LENS)
    blind = Cameras(straight_drive(3, 0.1), LENS, has_pose=torch.tensor([True, False, True]))
    past: tuple[PastBlock, ...] = ()
    for first in (0, 3, 6):
        past = with_block(past, PastBlock(first, latents, blind), most=100)
    found = views_of_place(past, KeyCache(window=9, sink=1, count=9), here, 3)
    assert found is not None
    assert set(found.frames) <= {2}
    assert views_of_place(past, KeyCache(window=12, sink=1, count=9), here, 3) is None
    unposed = Cameras(here.world_from_camera, LENS, blind.has_pose)
    assert views_of_place(past, KeyCache(window=3, count=9), unposed, 1) is None  # asks the middle frame


@pytest.mark.parametrize(
    ("recall", "options", "message"),
    [
        (1, {"remember": 0}, "recall must be 0 for a stream that remembers nothing, got 1; make it with pipe.stream"),
        (4, {}, "recall must be an int from 0 to 3, the latent frames of a block, got 4"),
        (-1, {}, "recall must be an int from 0 to 3"),
    ],
)
def test_what_cannot_be_recalled_is_refused(
    pipe: CameraVideoPipeline, recall: int, options: dict[str, Any], message: str
) -> None:
    stream = begun(pipe, **{**SHORT, **options})
    with pytest.raises(ValueError, match=message):
        stream.drive(home_and_back(0), recall=recall)


@pytest.mark.parametrize("history", ["sa", "ca"])
def test_a_model_with_history_takes_views_and_images_as_such(history: str) -> None:
    pipe = model(history=history)
    recalled = driven(pipe, recall=3)
    assert recalled.recalled == (1, 2)
    beside = Cameras(straight_drive(2, 0.5), LENS)
    images = HistoryFrames(video(2, seed=4), beside, matched=[0, 2])
    stream = begun(pipe, **SHORT)
    for block in range(2):
        stream.drive(home_and_back(block))
    latents = []
    for given in (None, images):
        stream.drive(home_and_back(2), history=given)
        latents.append(stream.latents)
        stream.undo()
    assert not torch.allclose(*latents, rtol=1e-3)
    assert not torch.allclose(recalled.latents, latents[0], rtol=1e-3)
    with pytest.raises(ValueError, match="history must be None where views are recalled"):
        stream.drive(home_and_back(2), recall=1, history=images)
    with pytest.raises(ValueError, match=r"history.matched must be in \[0, 3\)"):
        stream.drive(home_and_back(2), history=HistoryFrames(video(2), beside, matched=[0, 7]))


def test_images_are_refused_by_a_model_without_history(pipe: CameraVideoPipeline) -> None:
    stream = begun(pipe, **SHORT)
    images = HistoryFrames(video(1), Cameras(straight_drive(1), LENS), matched=[0])
    with pytest.raises(ValueError, match="history must be None for a model that takes none"):
        stream.drive(home_and_back(0), history=images)

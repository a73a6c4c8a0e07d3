"""Several cameras of nuScenes as the views of a rig."""

from pathlib import Path

import pytest
import torch
from nuscenes_rigs import add_camera
from scenes import curved_drive
from torch import Tensor

from merope.datasets.loader import collate
from merope.datasets.nuscenes_clips import NuScenesData, NuScenesRigSource
from merope.datasets.synth import Drive, write_nuscenes
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Pinhole

VERSION = "v1.0-mini"
CAMERAS = ("CAM_FRONT", "CAM_BACK", "CAM_FRONT_LEFT")


def numbered(cameras: Cameras) -> Tensor:  # uint8 [V, 18, 32, 3]
    return (20 * torch.arange(cameras.count, dtype=torch.uint8))[:, None, None, None].expand(-1, 18, 32, 3)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rig")
    lens = Pinhole(25.0, 25.0, 16.0, 9.0, 32, 18)
    write_nuscenes(
        folder, VERSION, [Drive(curved_drive(7), "a"), Drive(curved_drive(5), "b", start_us=10**15)], lens, numbered
    )
    add_camera(folder, VERSION, "CAM_BACK", skew_us=20_000)
    add_camera(folder, VERSION, "CAM_FRONT_LEFT", skew_us=-70_000)  # nearer to the front frame before it
    return folder


def rig(root: Path, *cameras: str) -> NuScenesRigSource:
    source = NuScenesData("nuscenes", root, VERSION, frames=4, height=9, width=16, cameras=cameras).training_clips()
    assert isinstance(source, NuScenesRigSource)
    return source


def test_views_are_the_frames_nearest_in_time_with_poses_of_their_own(root: Path) -> None:
    source = rig(root, *CAMERAS)
    clip, front = source.clip(1), source.first.clip(1)
    assert (clip.views, clip.name, source.name(1)) == (3, "scene-0000/CAM_FRONT/1", "scene-0000/CAM_FRONT/1")
    assert clip.frames is not None
    shown = clip.frames.float().mean((1, 2, 3)).reshape(3, 4) / 20
    assert torch.allclose(shown, torch.tensor([[1.0, 2, 3, 4], [1, 2, 3, 4], [2, 3, 4, 5]]), atol=0.15)
    poses = clip.world_from_camera.reshape(3, 4, 4, 4)
    torch.testing.assert_close(poses[0], front.world_from_camera)
    shift = torch.tensor([0.25, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(poses[1, :, :3, 3], front.world_from_camera[:, :3, 3] + shift)
    torch.testing.assert_close(poses[2, :3, :3, 3], front.world_from_camera[1:, :3, 3] + shift)
    assert clip.lens.fx.tolist() == pytest.approx([12.5] * 4 + [20.0] * 8)
    assert source.trajectory(1).count == 4
    batch = collate([source.clip(0), clip])
    assert (batch.cameras.views, batch.cameras.moments, tuple(batch.frames.shape)) == (3, 4, (2, 12, 9, 16, 3))


def test_clips_that_a_camera_missed_are_left_out(root: Path) -> None:
    everything = [rig(root, *CAMERAS).name(index) for index in range(len(rig(root, *CAMERAS)))]
    assert everything == [f"scene-0000/CAM_FRONT/{start}" for start in range(3)] + ["scene-0001/CAM_FRONT/7"]
    assert len(rig(root, "CAM_FRONT", "CAM_BACK")) == 4 + 2


def test_channels_are_checked(root: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.cameras must be different channels"):
        rig(root, "CAM_FRONT", "CAM_FRONT")
    with pytest.raises(ValueError, match="CAM_NONE"):
        rig(root, "CAM_FRONT", "CAM_NONE")

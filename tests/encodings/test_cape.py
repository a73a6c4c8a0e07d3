"""CaPE against numbers of EscherNet's public code and its formula."""

import pytest
import torch
from golden import Golden
from scenes import PINHOLE, random_poses

from merope import Cameras
from merope.encodings.cape import CaPE


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize(("axes", "name"), [("opencv", "out"), ("opengl", "out_opengl_axes")])
def test_equals_the_public_code(axes: str, name: str, backend: str) -> None:
    golden = Golden("cape.npz")
    ours = golden.attended(CaPE(golden.head_dim, camera_axes=axes), PINHOLE, backend)
    assert (ours - golden[name]).abs().max() < 1e-9


@pytest.mark.parametrize("axes", ["opencv", "opengl"])
def test_operator_is_the_transposed_reverse_pose(axes: str) -> None:
    poses = random_poses(2)
    flip = torch.diag(torch.tensor([1.0, -1.0, -1.0, 1.0] if axes == "opengl" else [1.0] * 4, dtype=torch.float64))
    query_view, key_view = (flip @ torch.linalg.inv(pose) for pose in poses)
    expected = (key_view @ torch.linalg.inv(query_view)).mT
    plan = CaPE(head_dim=12, camera_axes=axes).plan(Cameras(poses, PINHOLE), (1, 2), times=[0.0, 9.0])
    for key_token in (2, 3):
        assert (plan.operator(1, key_token) - torch.block_diag(*[expected] * 3)).abs().max() < 1e-12


def test_other_axes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"camera_axes must be .*got 'blender';"):
        CaPE(camera_axes="blender")  # type: ignore[arg-type]

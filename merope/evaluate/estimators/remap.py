"""Frames of any lens as frames of a pinhole: what most pose estimators understand.

A view is cut out of the sphere of directions that the lens sees. By default it looks along the optical axis, is as wide
as the lens allows up to 100°, and has the resolution that the lens has at its centre, or up to twice as much where that
is coarse: corners and descriptors, which look at a fixed number of pixels, lose less (docs/estimators.md).
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from merope.errors import invalid
from merope.evaluate.estimators.estimator import PoseEstimate, check_frames
from merope.geometry.lens_batches import picked
from merope.geometry.lenses import Lens, Pinhole
from merope.geometry.poses import rigid
from merope.geometry.rays import patch_pixels

MAX_FOV_DEG = 100.0  # beyond, a pinhole spends most of its pixels on its corners
FINE_FOCAL_PX, MAX_OVERSAMPLING = 300.0, 2.0  # pixels per radian below which a view is sampled more finely
SHRINK = 0.97  # per attempt, while the corners of a view are outside the image
NEAR_AXIS = 1e-3  # of a focal length: where the resolution at the centre is measured


@dataclass(frozen=True, eq=False)
class PinholeView:
    """Frames [T, h, w, 3] of a pinhole that shares the camera's centre and is turned against it."""

    frames: Tensor  # uint8 [T, h, w, 3]
    lens: Pinhole
    camera_from_view: Tensor  # [3, 3] float64

    def restored(self, estimate: PoseEstimate) -> PoseEstimate:
        """The camera's poses from those of the view: world_from_camera = world_from_view · view_from_camera."""
        view_from_camera = rigid(self.camera_from_view.mT, torch.zeros(3, dtype=torch.float64))
        return replace(estimate, world_from_camera=estimate.world_from_camera @ view_from_camera)


def pinhole_view(
    frames: Tensor,  # uint8 [T, H, W, 3]
    lens: Lens,
    view_lens: Pinhole | None = None,
    camera_from_view: Tensor | None = None,  # [3, 3]
) -> PinholeView:
    """The frames as a pinhole sees them; unchanged if they are those of one pinhole and nothing else is asked for.

    A lens per frame (a zoom) becomes one pinhole that all frames cover. Pixels that the lens does not reach are black;
    the default view has none.
    """
    check_frames(frames, lens)
    turn = torch.eye(3, dtype=torch.float64) if camera_from_view is None else camera_from_view.to(torch.float64)
    if view_lens is None and camera_from_view is None and isinstance(lens, Pinhole) and len(lens.batch_shape) == 0:
        return PinholeView(frames, lens, turn)
    chosen = widest_pinhole(lens, turn) if view_lens is None else view_lens
    return PinholeView(remapped(frames, lens, chosen, turn), chosen, turn)


def widest_pinhole(lens: Lens, camera_from_view: Tensor, max_fov_deg: float = MAX_FOV_DEG) -> Pinhole:  # [3, 3]
    """The largest centred pinhole view, of the image's shape, that the lens (every lens of a clip) wholly covers."""
    coarse = min(_focal_at_centre(one, camera_from_view) for one in _each(lens))
    focal = coarse * min(max(FINE_FOCAL_PX / coarse, 1.0), MAX_OVERSAMPLING)
    longer = max(lens.width, lens.height)
    half = math.tan(math.radians(max_fov_deg) / 2.0)
    while half > math.tan(math.radians(1.0)):
        size = [max(2, 2 * round(focal * half * side / longer)) for side in (lens.width, lens.height)]
        view = Pinhole(focal, focal, size[0] / 2.0, size[1] / 2.0, size[0], size[1])
        if all(_covers(one, view, camera_from_view) for one in _each(lens)):
            return view
        half *= SHRINK
    got = f"{type(lens).__name__} {lens.width}×{lens.height}"
    raise invalid("lens", "one that sees what lies ahead of the view", got, "turn the view into the image")


def remapped(
    frames: Tensor,  # uint8 [T, H, W, 3]
    lens: Lens,
    view: Pinhole,
    camera_from_view: Tensor,  # [3, 3]
) -> Tensor:  # uint8 [T, h, w, 3]
    """Each pixel of the view from where the lens sees its ray, bicubic; black where the lens sees nothing."""
    rays, _ = view.unproject(patch_pixels(view, (view.height, view.width)))
    rays = (rays @ camera_from_view.mT).expand(*lens.batch_shape, -1, -1)
    pixels, reached = lens.project(rays)
    size = pixels.new_tensor([lens.width, lens.height])
    inside = reached & ((pixels >= 0.0) & (pixels <= size)).all(dim=-1)
    grid = (2.0 * pixels / size - 1.0).float().reshape(-1, view.height, view.width, 2)
    inside = inside.reshape(-1, 1, view.height, view.width)
    seen = torch.empty(len(frames), view.height, view.width, 3, dtype=torch.uint8)
    for t, frame in enumerate(frames):  # one at a time: a clip in float32 would take four times its memory
        own = t if len(grid) > 1 else 0
        image = frame.permute(2, 0, 1)[None].float()
        sampled = grid_sample(image, grid[own, None], mode="bicubic", padding_mode="border", align_corners=False)
        seen[t] = (sampled * inside[own]).round().clamp(0.0, 255.0)[0].permute(1, 2, 0).to(torch.uint8)
    return seen


def _each(lens: Lens) -> list[Lens]:
    count = lens.batch_shape.numel()
    return [picked(lens, torch.tensor(index)) for index in range(count)] if lens.batch_shape else [lens]


def _focal_at_centre(lens: Lens, camera_from_view: Tensor) -> float:
    """Pixels per radian where the view looks, the smaller of along rows and along columns."""
    around = torch.tensor([[0.0, 0.0, 1.0], [NEAR_AXIS, 0.0, 1.0], [0.0, NEAR_AXIS, 1.0]], dtype=torch.float64)
    pixels, reached = lens.project(around @ camera_from_view.mT)
    if not bool(reached.all()):
        raise invalid("camera_from_view", "turned to where the lens sees", "a direction outside", "turn it less")
    return float((pixels[1:] - pixels[0]).norm(dim=-1).min()) / NEAR_AXIS


def _covers(lens: Lens, view: Pinhole, camera_from_view: Tensor) -> bool:
    """Whether the lens sees the whole border of the view, and with it all that is inside."""
    u, v = patch_pixels(view, (33, 33), offset=(0.0, 0.0)).unflatten(0, (33, 33)).unbind(-1)
    u, v = u * 33.0 / 32.0, v * 33.0 / 32.0  # both edges included
    border = torch.ones_like(u, dtype=torch.bool)
    border[1:-1, 1:-1] = False
    rays, _ = view.unproject(torch.stack((u[border], v[border]), dim=-1))
    pixels, reached = lens.project(rays @ camera_from_view.mT)
    size = pixels.new_tensor([lens.width, lens.height])
    return bool((reached & ((pixels >= 0.0) & (pixels <= size)).all(dim=-1)).all())

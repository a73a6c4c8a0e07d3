"""Poses in metres for videos of the procedural world: dense flow from what should be seen, then perspective-n-point.

The world says what each frame should show: its image and depth at the commanded pose, the *anchor*. Flow from the
anchor to the frame pairs surface points, known in metres, with the rays on which the frame shows them. The pose that
explains these pairs is the pose of the frame, for any lens. Where the answer is not at the anchor, the world is
rendered again at the answer: flow over a short way is exact where flow over a long one is not.
"""

import numpy as np
import torch
from torch import Tensor

from merope.errors import invalid
from merope.evaluate.estimators.dense_flow import flow, grey, textured
from merope.evaluate.estimators.estimator import PoseEstimate, check_frames
from merope.evaluate.estimators.ray_pnp import RayPairs, solve
from merope.geometry.cameras import Cameras
from merope.geometry.lens_batches import picked
from merope.geometry.lenses import Lens
from merope.geometry.poses import inverse
from merope.geometry.rays import patch_rays
from merope.world.render import Render, render
from merope.world.scene import World

STRIDE = 2  # pixels between pairs along both axes
MAX_DEPTH_STEP = 0.05  # of the depth, to the neighbours: beyond lies a silhouette, where flow belongs to either side
MIN_SHOWN = 0.1  # of the textured surface: what lane lines alone give when a frame shows another street
SETTLED_PX = 0.1  # motion from anchor to answer that is not worth another anchor


class RenderAnchoredEstimator:
    """Pose recovery against the world that a clip was commanded in; metric, in the world's own frame.

    `commanded` are the cameras of the clip, of which a video may have fewer; their lens is that of the video, whose
    size may differ. `anchors` are their renders at the size of the video; without them they are rendered at the first
    call and kept, so that several videos of one command share them. Each frame is measured against at most `rounds`
    anchors. The world may be on a GPU, where rendering is fast.
    """

    name = "render-anchored"

    def __init__(
        self, world: World, commanded: Cameras, anchors: Render | None = None, rounds: int = 2, seed: int = 0
    ) -> None:
        if commanded.world_from_camera.ndim != 3 or world.is_batch:
            got = f"{list(commanded.world_from_camera.shape)} in {len(world.seeds)} worlds"
            raise invalid("commanded", "the cameras [T, 4, 4] of one clip in one world", got, "make one per clip")
        if rounds < 1:
            raise invalid("rounds", "at least 1", rounds, "one round renders at the commanded poses only")
        if anchors is not None and anchors.image.shape[:-3] != (commanded.count,):
            expected = f"[{commanded.count}, H, W, 3], one per commanded camera"
            raise invalid("anchors", expected, list(anchors.image.shape), "render them all")
        self.world, self.commanded, self.rounds, self.seed = world, commanded.to("cpu"), rounds, seed
        self._anchors = None if anchors is None else _on_cpu(anchors)
        self._shared_rays: Tensor | None = None  # [H, W, 3]

    def __call__(self, frames: Tensor, lens: Lens | None = None) -> PoseEstimate:  # uint8 [T, H, W, 3]
        """Poses of the frames; `lens` is not read, the commanded cameras have theirs."""
        check_frames(frames, None)
        count = len(frames)
        if count > self.commanded.count:
            fix = "command as many cameras as the video has frames"
            raise invalid("frames", f"at most {self.commanded.count}, one per commanded camera", count, fix)
        size = (frames.shape[1], frames.shape[2])
        if self._anchors is None or self._anchors.depth_m.shape[-2:] != size:
            self._anchors = self._rendered(self.commanded, size)
        anchors, moving = self._anchors, torch.arange(count)
        poses, valid = self.commanded.world_from_camera[:count].clone(), torch.zeros(count, dtype=torch.bool)
        for number in range(self.rounds):
            if number > 0:
                own_lens = picked(self.commanded.lens, moving)
                anchors = self._rendered(Cameras(poses[moving], own_lens), size)
            moving = self._measure(frames, anchors, moving, poses, valid)
            if len(moving) == 0:
                break
        lost = count - int(valid.sum())
        note = f"{lost} of {count} frames do not show the world near the commanded pose" if lost else ""
        return PoseEstimate(poses, valid, True, self.name, note=note)

    def _rendered(self, cameras: Cameras, size: tuple[int, int]) -> Render:
        return _on_cpu(render(self.world, cameras.to(self.world.device), *size))

    def _lens_and_rays(self, t: int, height: int, width: int) -> tuple[Lens, Tensor]:  # -> [H, W, 3]
        """The lens of a frame and the rays of its pixels, which are made once where all frames share a lens."""
        lens = picked(self.commanded.lens, torch.tensor(t))
        if self._shared_rays is not None and self._shared_rays.shape[:2] == (height, width):
            return lens, self._shared_rays
        rays = patch_rays(lens, (height, width))[0].unflatten(0, (height, width))
        self._shared_rays = None if self.commanded.lens.batch_shape else rays
        return lens, rays

    def _measure(
        self,
        frames: Tensor,  # uint8 [T, H, W, 3]
        anchors: Render,  # at the poses of the frames `moving`
        moving: Tensor,  # int64 [n]
        poses: Tensor,  # [T, 4, 4], changed in place
        valid: Tensor,  # bool [T], changed in place
    ) -> Tensor:  # int64 [m]
        """One round: each moving frame's pose against its anchor. Those that are worth another round."""
        further = []
        for k, t in enumerate(moving.tolist()):
            lens, grid_rays = self._lens_and_rays(t, frames.shape[1], frames.shape[2])
            pairs, possible = matched(anchors, k, frames[t], lens, grid_rays)
            answer = solve(pairs, self.seed)
            if answer is None:
                valid[t] = False
                continue
            poses[t] = poses[t] @ inverse(answer.ray_camera_from_point_camera)
            valid[t] = answer.inliers >= MIN_SHOWN * possible
            if pairs.motion_px(answer.ray_camera_from_point_camera) > SETTLED_PX:
                further.append(t)
        return torch.tensor(further, dtype=torch.int64)


def matched(
    anchors: Render,
    k: int,  # which of them
    frame: Tensor,  # uint8 [H, W, 3]
    lens: Lens,  # of this frame
    grid_rays: Tensor,  # [H, W, 3] of its pixels
) -> tuple[RayPairs, int]:
    """Where the frame shows the anchor's surfaces, and how many pairs a perfect frame would give.

    Pairs lie on textured surface, away from silhouettes and from the sky.
    """
    height, width = frame.shape[:2]
    expected = grey((255.0 * anchors.image[k]).round().to(torch.uint8))
    motion, believed = flow(expected, grey(frame))
    depth = anchors.depth_m[k].double()
    possible = torch.zeros_like(anchors.valid[k])
    possible[STRIDE // 2 :: STRIDE, STRIDE // 2 :: STRIDE] = True
    possible &= anchors.valid[k] & smooth_depth(depth) & torch.from_numpy(textured(expected))
    row, column = (possible & torch.from_numpy(believed)).nonzero().unbind(-1)
    target = torch.stack((column, row), dim=-1) + 0.5 + torch.from_numpy(motion)[row, column].double()
    rays, seen = lens.unproject(target * target.new_tensor([lens.width / width, lens.height / height]))
    points = depth[row, column, None] * grid_rays[row, column]
    left, right = grid_rays[height // 2, width // 2 - 1 : width // 2 + 1]
    return RayPairs(points[seen], rays[seen], float((right - left).norm())), int(possible.sum())


def smooth_depth(depth_m: Tensor) -> Tensor:  # [H, W] -> bool [H, W]
    """Where depth is finite and its inverse, which is linear on planes, hardly changes from pixel to pixel."""
    import cv2

    finite = depth_m.isfinite()
    nearness = torch.where(finite, 1.0 / depth_m, 0.0).numpy()
    beside = np.ones((3, 3), np.uint8)
    change = cv2.dilate(nearness, beside) - cv2.erode(nearness, beside)
    return finite & torch.from_numpy(change < 2.0 * MAX_DEPTH_STEP * nearness)


def _on_cpu(seen: Render) -> Render:
    return Render(seen.image.cpu(), seen.depth_m.cpu(), seen.valid.cpu(), seen.world)

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, no-untyped-call, misc"
"""RayRoPE's coordinates of all (query camera, key token) pairs in one kernel, and their gradients in one.

What `RayRoPE._seen` defines. A coordinate at one end of a token's interval depends on one learned number, the
disparity there: the backward pass computes each coordinate with its derivative, and adds up over the query cameras.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

COORDINATES = 12  # camera centre 3, directions of three rays 3 × 2, depths 3
TOKENS_PER_PROGRAM = 16
COUNTS = ("viewers", "tokens", "patches")
STRIDES = ("pose_sample", "pose_viewer", "pose_camera", "lens_sample", "lens_viewer", "lens_camera", "ray_sample")
"""Kernel arguments that are not compiled in: there would be a kernel for every clip."""


def ray_coordinates(
    viewer_from_camera: Tensor,  # float64 [B, G, S, 3, 4], translations in the unit of the depths
    intrinsics: Tensor,  # float64 [B, G, S, 4] of the viewers: focal lengths x, y and centre x, y in image sizes
    rays: Tensor,  # float64 [B or 1, S, P, 3 rays, 3]
    disparity: Tensor,  # float64 [B, S, P, 2 ends]
    depth_coding: str,  # "d", "inv_d", "asinh_d"
    most: float,  # clamp of the depth coordinate
) -> Tensor:  # [B, G, S, P, 2 ends, 12]
    """Camera centre, directions and depths of three points per token and end, with gradients of the disparity alone."""
    return _RayCoordinates.apply(viewer_from_camera, intrinsics, rays, disparity, depth_coding, most)


class _RayCoordinates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, viewer_from_camera, intrinsics, rays, disparity, depth_coding, most):
        rays, disparity = rays.contiguous(), disparity.contiguous()
        ctx.save_for_backward(viewer_from_camera, intrinsics, rays, disparity)
        ctx.coding = depth_coding, most
        batch, viewers, cameras = viewer_from_camera.shape[:3]
        patches = rays.shape[2]
        out = rays.new_empty((batch, viewers, cameras, patches, 2, COORDINATES))
        grid = (triton.cdiv(cameras * patches, TOKENS_PER_PROGRAM), viewers, batch)
        _launch(_coordinates, grid, (out,), viewer_from_camera, intrinsics, rays, disparity, *ctx.coding)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        viewer_from_camera, intrinsics, rays, disparity = ctx.saved_tensors
        out = torch.empty_like(disparity)
        batch, cameras, patches, _ = disparity.shape
        grid = (triton.cdiv(cameras * patches, TOKENS_PER_PROGRAM), batch)
        ends = (grad.contiguous(), out)
        _launch(_gradients, grid, ends, viewer_from_camera, intrinsics, rays, disparity, *ctx.coding)
        return None, None, None, out, None, None


def _launch(
    kernel,
    grid: tuple[int, ...],
    ends: tuple[Tensor, ...],  # coordinates or their gradients, and what else the kernel writes
    viewer_from_camera: Tensor,
    intrinsics: Tensor,
    rays: Tensor,
    disparity: Tensor,
    depth_coding: str,
    most: float,
) -> None:
    viewers, cameras, patches = viewer_from_camera.shape[1], *rays.shape[1:3]
    tokens = cameras * patches
    assert viewer_from_camera.stride()[3:] == (4, 1)
    assert intrinsics.stride(3) == 1
    with torch.cuda.device_of(rays):  # Triton launches on the current device, wherever the tensors are
        kernel[grid](
            *(viewer_from_camera, intrinsics, rays, disparity, *ends, viewers, tokens, patches),
            *(*viewer_from_camera.stride()[:3], *intrinsics.stride()[:3], tokens * 9 if rays.shape[0] > 1 else 0),
            CODING=depth_coding,
            MOST=most,
            TOKENS=TOKENS_PER_PROGRAM,
            num_warps=2,
        )


@triton.jit
def _tokens(rays, disparity, sample, ray_sample, tokens, TOKENS: tl.constexpr):
    """Of lanes [TOKENS, 2 ends, 3 rays and one that idles]: token, end, ray, which exist, the ray, its disparity."""
    token = (tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    end, ray = tl.arange(0, 2)[None, :, None], tl.arange(0, 4)[None, None, :]
    there = (token < tokens) & (ray < 3)
    place = rays + sample * ray_sample + token * 9 + ray * 3
    x = tl.load(place, mask=there, other=0.0)
    y = tl.load(place + 1, mask=there, other=0.0)
    z = tl.load(place + 2, mask=there, other=1.0)
    here = tl.load(disparity + (sample * tokens + token) * 2 + end, mask=token < tokens, other=1.0)
    return token, end, ray, there, x, y, z, here


@triton.jit
def _turned(pose, row: tl.constexpr, x, y, z, inside):
    """A component of a ray in the viewer's frame, and that component of the camera's centre."""
    r0 = tl.load(pose + row * 4, mask=inside, other=0.0)
    r1 = tl.load(pose + row * 4 + 1, mask=inside, other=0.0)
    r2 = tl.load(pose + row * 4 + 2, mask=inside, other=0.0)
    return r0 * x + r1 * y + r2 * z, tl.load(pose + row * 4 + 3, mask=inside, other=0.0)


@triton.jit
def _point(pose, lens, inside, x, y, z, disparity, CODING: tl.constexpr, MOST: tl.constexpr):
    """Direction x, y and depth of a point, the derivatives of these by the disparity, and the camera's centre."""
    turned_x, centre_x = _turned(pose, 0, x, y, z, inside)
    turned_y, centre_y = _turned(pose, 1, x, y, z, inside)
    turned_z, centre_z = _turned(pose, 2, x, y, z, inside)
    point_z = turned_z + centre_z * disparity
    focal_x, focal_y = tl.load(lens, mask=inside, other=1.0), tl.load(lens + 1, mask=inside, other=1.0)
    offset_x, offset_y = tl.load(lens + 2, mask=inside, other=0.0), tl.load(lens + 3, mask=inside, other=0.0)
    image_x = (turned_x + centre_x * disparity) * focal_x + point_z * offset_x
    image_y = (turned_y + centre_y * disparity) * focal_y + point_z * offset_y
    slope_x, slope_y = centre_x * focal_x + centre_z * offset_x, centre_y * focal_y + centre_z * offset_y
    norm = tl.sqrt(image_x * image_x + image_y * image_y + point_z * point_z)
    norm_slope = (image_x * slope_x + image_y * slope_y + point_z * centre_z) / tl.where(norm > 0, norm, 1.0)
    scale = 1 / (norm + 1e-6)
    direction_x, direction_y = image_x * scale, image_y * scale
    slope_x, slope_y = (slope_x - direction_x * norm_slope) * scale, (slope_y - direction_y * norm_slope) * scale

    away = tl.sqrt(point_z * point_z + 1e-9)
    away_slope = tl.where(away < 1e-4, 0.0, point_z * centre_z / away)
    away = tl.maximum(away, tl.full((1, 1, 1), 1e-4, tl.float64))  # a literal would be rounded to float32
    if CODING == "inv_d":
        depth = disparity / away
        depth_slope = (1 - depth * away_slope) / away
    else:
        depth = away / disparity
        depth_slope = (away_slope - depth) / disparity
        if CODING == "asinh_d":
            root = tl.sqrt(1 + depth * depth)
            depth, depth_slope = tl.log(depth + root), depth_slope / root
    most = tl.full((1, 1, 1), MOST, tl.float64)
    depth_slope = tl.where(depth <= most, depth_slope, 0.0)
    depth = tl.minimum(depth, most)
    return direction_x, direction_y, depth, slope_x, slope_y, depth_slope, centre_x, centre_y, centre_z


@triton.jit(do_not_specialize=(*COUNTS, *STRIDES))
def _coordinates(
    viewer_from_camera, intrinsics, rays, disparity, out, viewers, tokens, patches,
    pose_sample, pose_viewer, pose_camera, lens_sample, lens_viewer, lens_camera, ray_sample,
    CODING: tl.constexpr, MOST: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Some tokens as one viewer of one sample sees them."""
    viewer, sample = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    token, end, ray, there, x, y, z, here = _tokens(rays, disparity, sample, ray_sample, tokens, TOKENS)
    camera = token.to(tl.int32) // patches
    pose = viewer_from_camera + sample * pose_sample + viewer * pose_viewer + camera * pose_camera
    lens = intrinsics + sample * lens_sample + viewer * lens_viewer + camera * lens_camera
    direction_x, direction_y, depth, _, _, _, centre_x, centre_y, centre_z = _point(
        pose, lens, token < tokens, x, y, z, here, CODING, MOST
    )
    centre = tl.where(ray == 0, centre_x, tl.where(ray == 1, centre_y, centre_z))  # each ray's lane writes one
    write = out + (((sample * viewers + viewer) * tokens + token) * 2 + end) * 12
    tl.store(write + ray, centre, mask=there)
    tl.store(write + 3 + 2 * ray, direction_x, mask=there)
    tl.store(write + 4 + 2 * ray, direction_y, mask=there)
    tl.store(write + 9 + ray, depth, mask=there)


@triton.jit(do_not_specialize=(*COUNTS, *STRIDES))
def _gradients(
    viewer_from_camera, intrinsics, rays, disparity, grad, out, viewers, tokens, patches,
    pose_sample, pose_viewer, pose_camera, lens_sample, lens_viewer, lens_camera, ray_sample,
    CODING: tl.constexpr, MOST: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Gradients of both disparities of some tokens, summed over viewers in order and then over rays."""
    sample = tl.program_id(1).to(tl.int64)
    token, end, ray, there, x, y, z, here = _tokens(rays, disparity, sample, ray_sample, tokens, TOKENS)
    camera = token.to(tl.int32) // patches
    pose = viewer_from_camera + sample * pose_sample + camera * pose_camera
    lens = intrinsics + sample * lens_sample + camera * lens_camera
    read = grad + ((sample * viewers * tokens + token) * 2 + end) * 12
    total = tl.zeros((TOKENS, 2, 4), tl.float64)
    for _ in range(viewers):
        _, _, _, slope_x, slope_y, depth_slope, _, _, _ = _point(
            pose, lens, token < tokens, x, y, z, here, CODING, MOST
        )
        total += tl.load(read + 3 + 2 * ray, mask=there, other=0.0) * slope_x
        total += tl.load(read + 4 + 2 * ray, mask=there, other=0.0) * slope_y
        total += tl.load(read + 9 + ray, mask=there, other=0.0) * depth_slope
        pose += pose_viewer
        lens += lens_viewer
        read += tokens.to(tl.int64) * 24
    summed = tl.sum(tl.where(there, total, 0.0), 2, keep_dims=True)
    tl.store(out + (sample * tokens + token) * 2 + end, summed, mask=token < tokens)

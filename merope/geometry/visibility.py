"""Where a camera sees any point, also one that it does not see: for encodings that reproject into the query's image."""

import math

import torch
from torch import Tensor

from merope.geometry.distorted_lenses import BrownConrady
from merope.geometry.lenses import Lens, Pinhole

CONE_SAMPLES = 1024  # directions per refinement; three of them find the rim of a lens to 1e-8 rad
CONE_MARGIN_RAD = 1e-6  # keeps directions on the rim on the side where a lens is defined
AXIS_ZONE = 1e-6  # a point behind that is off the optical axis by less of its depth leaves by the right of the image
CENTRE_M = 1e-6  # a point nearer to the centre of a camera is in no direction; it is taken straight ahead


def is_perspective(lens: Lens) -> bool:
    """Whether all rays of a lens have a depth along its optical axis, and nothing beside or behind it is seen."""
    return isinstance(lens, (Pinhole, BrownConrady))


def seen_half_angle_rad(lens: Lens, device: torch.device) -> Tensor:  # [*lens.batch_shape] float64
    """Half-angle of the cone about the optical axis in which a lens is defined, found by asking `lens.project`."""
    right_down_left_up = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]], dtype=torch.float64)
    azimuths = right_down_left_up.to(device)[:, None]  # [4, 1, 2]
    samples = torch.arange(CONE_SAMPLES + 1, dtype=torch.float64, device=device)
    angle_rad, step_rad = torch.zeros(lens.batch_shape, dtype=torch.float64, device=device), math.pi
    for _ in range(3):
        step_rad /= CONE_SAMPLES
        tried = (angle_rad[..., None] + step_rad * samples).clamp_max(math.pi)  # [*batch, samples]
        sine, cosine = tried.sin()[..., None, :, None], tried.cos()[..., None, :, None]
        directions = torch.cat((sine * azimuths, cosine.expand(*sine.shape[:-3], 4, -1, 1)), dim=-1)
        seen = lens.project(directions)[1].all(dim=-2).int()
        last = (seen.cumprod(dim=-1).sum(dim=-1, keepdim=True) - 1).clamp_min(0)
        angle_rad = tried.gather(-1, last).squeeze(-1)
    return (angle_rad - CONE_MARGIN_RAD).clamp_min(0)


def pixels_seen(
    lens: Lens,
    points: Tensor,  # [B, V, ..., 3] camera frame, metres
    half_angle_rad: Tensor,  # [*lens.batch_shape]
    z_min_m: float,
) -> Tensor:  # [B, V, ..., 2] pixels, at most one image size outside the image
    """Where the cameras of a lens see any point, also those that they do not see; finite with finite gradients.

    A perspective lens takes a point nearer than z_min_m, or behind, at depth z_min_m: it leaves the image on its own
    side and is never mirrored. What is then still outside the cone of the lens is taken on its rim, in its azimuth.
    """
    # The lens wants its own dimensions first; one lens per camera, shared by all clips, has only the cameras.
    camera_major = len(lens.batch_shape) == 1
    points = points.transpose(0, 1) if camera_major else points
    if is_perspective(lens):
        points = torch.cat((points[..., :2], points[..., 2:].clamp_min(z_min_m)), dim=-1)
    points = _settled(points)
    rim = half_angle_rad.reshape(*lens.batch_shape, *(1,) * (points.ndim - 1 - len(lens.batch_shape)))
    pixels, _ = lens.project(_within_cone(points, rim))
    size = pixels.new_tensor([lens.width, lens.height])
    pixels = pixels.clamp(-size, 2 * size)
    return pixels.transpose(0, 1) if camera_major else pixels


def _settled(points: Tensor) -> Tensor:  # [..., 3] -> [..., 3]
    """Points with one direction where rounding would choose it: at the centre, and on the seam and poles of a panorama.

    Straight behind is at the right edge of a panorama, straight up and down are in its middle column.
    """
    distance_m = torch.linalg.vector_norm(points.detach(), dim=-1)
    x, y, z = points.unbind(-1)
    zone = AXIS_ZONE * distance_m
    beside = x.abs() > zone
    x = torch.where(beside | (z > zone), x, 0.0)
    z = torch.where(beside | (z.abs() > zone), z, zone)
    ahead = points.new_tensor([0.0, 0.0, 1.0])
    return torch.where((distance_m > CENTRE_M)[..., None], torch.stack((x, y, z), dim=-1), ahead)


def _within_cone(
    points: Tensor,  # [..., 3]
    half_angle_rad: Tensor,  # [...] broadcastable
) -> Tensor:  # [..., 3]
    """Points inside the cone as they are, others replaced by the direction on its rim with the same azimuth."""
    xy, z = points[..., :2], points[..., 2]
    radius = torch.linalg.vector_norm(xy, dim=-1)
    outside = torch.atan2(radius, z) > half_angle_rad
    has_azimuth = (radius > AXIS_ZONE * z.abs())[..., None]
    azimuth = torch.where(has_azimuth, xy / torch.where(has_azimuth, radius[..., None], 1.0), xy.new_tensor([1.0, 0.0]))
    cosine = half_angle_rad.cos().expand_as(z)[..., None]
    rim = torch.cat((half_angle_rad.sin()[..., None] * azimuth, cosine), dim=-1)
    return torch.where(outside[..., None], rim, points)

"""The token geometry that every encoding starts from: poses near the origin, rays, positions, and who has a camera.

B clips (1 when cameras came without a batch), V cameras, P patches per camera, N = V·P + extra tokens.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from merope.errors import invalid
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Equirectangular, Lens
from merope.geometry.rays import check_grid

Times = Tensor | Sequence[float]
PREDICT_CONTENT = "predict it from the tokens' hidden states: head = merope.DepthHead(width), then head(hidden)"


@dataclass(frozen=True, eq=False)
class Tokens:
    """One side (query or key) of an attention call. All geometry is float64; metres; OpenCV camera axes.

    Poses are relative to the first posed query camera (`origin`), so world coordinates of millions of metres are gone
    before anything is computed. Extra tokens stand after the cameras' tokens, have no camera, and sit at position 0.
    """

    lens: Lens  # parameters are numbers or [V] or [B, V]
    grid: tuple[int, int]  # rows, columns
    world_from_camera: Tensor  # [B, V, 4, 4] as given, for encodings that live in a fixed world frame
    origin_from_camera: Tensor  # [B, V, 4, 4]
    rounding_m: Tensor  # [B, V] by which the centres may be off, from the precision and size of the poses as given
    rays: Tensor  # [B or 1, V, P, 3] unit, camera frame; (0, 0, 1) where the lens sees nothing
    positions: Tensor  # [B or 1, N, 3] time (latent frames), patch column, patch row
    has_camera: Tensor  # bool [B or 1, N]
    camera_of: Tensor  # int64 [N], V for extra tokens
    content: Tensor | None  # [B or 1, N, c], what the model predicts of each token, for encodings that read it
    dtype: torch.dtype  # of the tables to be made

    @property
    def cameras(self) -> int:
        return self.rays.shape[1]

    @property
    def patches(self) -> int:
        return self.rays.shape[2]

    @property
    def count(self) -> int:
        return self.positions.shape[1]

    def per_token(
        self,
        values: Tensor,  # [B, ..., V, P, *entry]
        identity: Tensor,  # [*entry]
        entry_dims: int,
    ) -> Tensor:  # [B, ..., N, *entry]
        """Tables with one row per token from values per camera and patch; tokens without a camera get the identity."""
        flat = values.flatten(-entry_dims - 2, -entry_dims - 1)
        extra = self.count - flat.shape[-entry_dims - 1]
        identity = identity.to(flat)
        if extra:
            shape = (*flat.shape[: -entry_dims - 1], extra, *identity.shape)
            flat = torch.cat((flat, identity.expand(shape)), dim=-entry_dims - 1)
        middle = flat.ndim - entry_dims - 2
        flags = self.has_camera.reshape(self.has_camera.shape[0], *(1,) * middle, self.count, *(1,) * entry_dims)
        return torch.where(flags, flat, identity)


def query_and_key_tokens(
    cameras: Cameras,
    grid: tuple[int, int],  # rows, columns
    key: Cameras | None,
    key_grid: tuple[int, int] | None,
    times: Times | None,
    key_times: Times | None,
    extra_tokens: int,
    key_extra_tokens: int | None,
    content: Tensor | None,  # [B, N, c]
    key_content: Tensor | None,
) -> tuple[Tokens, Tokens]:
    """Validate the arguments of `Encoding.plan` and resolve both sides; without `key`, keys are the queries."""
    for name, given in (("cameras", cameras), ("key", key)):
        if not isinstance(given, Cameras) and (given is not None or name == "cameras"):
            fix = "pass merope.Cameras(world_from_camera, lens)"
            raise invalid(name, "merope.Cameras", type(given).__name__, fix)
    if key is None and not all(x is None for x in (key_grid, key_times, key_extra_tokens, key_content)):
        expected = "given when key_grid, key_times, key_extra_tokens or key_content is"
        raise invalid("key", expected, None, "pass the Cameras of the key side")
    origin = cameras.origin()
    query_side = _tokens(cameras, check_grid(grid), times, extra_tokens, content, origin, "")
    if key is None:
        return query_side, query_side
    if key.device != cameras.device:
        raise invalid("key", f"on {cameras.device} like cameras", key.device, f"use key.to({str(cameras.device)!r})")
    batches = {c.world_from_camera.shape[0] for c in (cameras, key) if c.world_from_camera.ndim == 4} - {1}
    if len(batches) > 1:
        raise invalid("key", "of the batch size of cameras", sorted(batches), "give both sides the same clips")
    grid = check_grid(key_grid, "key_grid") if key_grid is not None else grid
    key_side = _tokens(key, grid, key_times, key_extra_tokens or 0, key_content, origin, "key_")
    dtype = torch.promote_types(cameras.dtype, key.dtype)
    return replace(query_side, dtype=dtype), replace(key_side, dtype=dtype)


def _tokens(
    cameras: Cameras,
    grid: tuple[int, int],
    times: Times | None,
    extra: int,
    content: Tensor | None,
    origin: Tensor,
    prefix: str,
) -> Tokens:
    if not isinstance(extra, int) or extra < 0:
        fix = "count the tokens that follow those of the cameras"
        raise invalid(f"{prefix}extra_tokens", "an int ≥ 0", repr(extra), fix)
    _warn_of_long_tokens(cameras.lens, grid, f"{prefix}grid")
    rays, valid = cameras.rays(grid)
    if valid.ndim == 2:
        rays, valid = rays[None], valid[None]
    poses, world_poses = cameras.relative_to(origin), cameras.world_from_camera
    rounding_m = torch.finfo(cameras.given_dtype).eps * torch.linalg.vector_norm(world_poses[..., :3, 3], dim=-1)
    camera_of = torch.arange(cameras.count, device=cameras.device).repeat_interleave(valid.shape[-1])
    return Tokens(
        lens=cameras.lens,
        grid=grid,
        world_from_camera=world_poses if world_poses.ndim == 4 else world_poses[None],
        origin_from_camera=poses if poses.ndim == 4 else poses[None],
        rounding_m=rounding_m if rounding_m.ndim == 2 else rounding_m[None],
        rays=rays,
        positions=_positions(_check_times(times, cameras, f"{prefix}times"), grid, extra),
        has_camera=pad(valid.flatten(1), (0, extra), value=False),
        camera_of=pad(camera_of, (0, extra), value=cameras.count),
        content=_check_content(content, cameras, camera_of.shape[0] + extra, f"{prefix}content"),
        dtype=cameras.dtype,
    )


def _warn_of_long_tokens(lens: Lens, grid: tuple[int, int], name: str) -> None:
    """Say it where tokens are far from square: rows and columns may have been swapped."""
    if torch.compiler.is_compiling() or isinstance(lens, Equirectangular):  # a graph would break at a warning
        return
    rows, columns = grid
    if rows == columns == 1:  # the image itself, which may be long
        return
    width, height = lens.width / columns, lens.height / rows
    if not 0.5 <= width / height <= 2.0:
        warnings.warn(
            f"{name} {grid} of a lens of {lens.width}×{lens.height} pixels makes tokens {width:.0f} pixels wide and "
            f"{height:.0f} high; a grid is (rows, columns)",
            stacklevel=5,  # the caller of Encoding.plan
        )


def _check_content(content: Tensor | None, cameras: Cameras, tokens: int, name: str) -> Tensor | None:  # [B or 1, N, c]
    if content is None:
        return None
    if not isinstance(content, Tensor):
        raise invalid(name, "a torch.Tensor", type(content).__name__, PREDICT_CONTENT)
    if content.ndim != 3 or content.shape[1] != tokens or not content.is_floating_point():
        got = f"{content.dtype} {list(content.shape)}"
        raise invalid(
            name, f"floating point [batch, {tokens}, channels]", got, "predict one row per token of that side"
        )
    if content.device != cameras.device:
        fix = f"use {name}.to({str(cameras.device)!r})"
        raise invalid(name, f"on {cameras.device} like the cameras", content.device, fix)
    clips = cameras.world_from_camera.shape[0] if cameras.world_from_camera.ndim == 4 else 1
    if clips > 1 and content.shape[0] not in (1, clips):
        raise invalid(name, f"of the cameras' {clips} clips, or of 1", content.shape[0], "predict it for every clip")
    return content


def _check_times(times: Times | None, cameras: Cameras, name: str) -> Tensor:  # [B or 1, V] float64
    count = cameras.count
    if times is None:
        return torch.arange(count, dtype=torch.float64, device=cameras.device)[None]
    try:
        values = torch.as_tensor(times, dtype=torch.float64, device=cameras.device)
    except (TypeError, ValueError, RuntimeError):
        raise invalid(name, "a tensor or a list of numbers", repr(times)[:60], "pass latent-frame indices") from None
    batch = cameras.world_from_camera.shape[:-3]
    if values.shape not in ((count,), (*batch, count)):
        fix = "give batched times batched cameras" if values.ndim > 1 + len(batch) else "pass latent-frame indices"
        raise invalid(name, f"one per camera {[*batch, count]}", list(values.shape), fix)
    if not bool(torch.isfinite(values).all()):
        raise invalid(name, "finite", "NaN or inf", "pass latent-frame indices")
    return values if values.ndim == 2 else values[None]


def _positions(
    times: Tensor,  # [B or 1, V]
    grid: tuple[int, int],
    extra: int,
) -> Tensor:  # [B or 1, N, 3]
    rows, columns = grid
    row = torch.arange(rows, dtype=times.dtype, device=times.device)[:, None].expand(rows, columns).flatten()
    column = torch.arange(columns, dtype=times.dtype, device=times.device).expand(rows, columns).flatten()
    shape = (*times.shape, rows * columns)
    positions = torch.stack((times[..., None].expand(shape), column.expand(shape), row.expand(shape)), dim=-1)
    return pad(positions.flatten(1, 2), (0, 0, 0, extra))

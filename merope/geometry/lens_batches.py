"""Lenses made from given ones: picked from a clip, joined, stacked to a batch, regrouped in it, scaled with images."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from merope.errors import invalid
from merope.geometry.lenses import Lens, parameters, remade, tensors

HORIZONTAL, VERTICAL = ("fx", "cx"), ("fy", "cy")  # parameters in pixels
RATIO_TOLERANCE = 0.02  # of the ratio of the sides: sizes are rounded to even numbers, and to what a model makes


def changed(lens: Lens, change: Callable[[Tensor], Tensor]) -> Lens:
    """The lens with every tensor changed alike: picked, reshaped, repeated."""
    return remade(lens, {name: change(value) for name, value in tensors(lens).items()})


def require_lens(lens: object) -> None:
    """Refuse what is no lens."""
    if not (hasattr(lens, "unproject") and hasattr(lens, "batch_shape")):
        raise invalid("lens", "a lens", repr(lens), "pass a merope.Pinhole or another lens of the library")


def has_ratio(lens: Lens, width: int, height: int) -> bool:
    """Whether the sides of an image have the ratio of the lens's: scaled to it, pixels stay square."""
    return abs(width / height * lens.height / lens.width - 1.0) <= RATIO_TOLERANCE


def kind(lens: Lens) -> str:
    """Class and image size in words; lenses of one kind differ in their parameters only."""
    return f"{type(lens).__name__} {lens.width}×{lens.height}"


def picked(lens: Lens, index: Tensor) -> Lens:  # int64 [n]
    """The lenses of some cameras, along the last batch dimension; a lens that all cameras share stays as it is."""
    if len(lens.batch_shape) == 0:
        return lens
    if lens.batch_shape[-1] == 1:  # one lens per clip
        index = torch.zeros_like(index)
    return changed(lens, lambda value: value.expand(lens.batch_shape)[..., index.to(value.device)])


def picked_view(lens: Lens, views: int, view: int) -> Lens:  # [V] -> []
    """The lens of one camera of a rig."""
    return changed(lens, lambda value: value.expand(views)[view])


def stacked(lenses: Sequence[Lens]) -> Lens:
    """One lens with parameters [B, 1] (or [B, T]) from B lenses of one kind and size."""
    first = lenses[0]
    kinds = sorted({kind(lens) for lens in lenses})
    if len(kinds) > 1:
        fix = "use clips of one camera model, or train with run.micro_batch = 1"
        raise invalid("lenses", "of one kind and size within a batch", kinds, fix)
    shape = torch.broadcast_shapes(*(lens.batch_shape or (1,) for lens in lenses))
    values = [{name: value.expand(shape) for name, value in tensors(lens).items()} for lens in lenses]
    return remade(first, {name: torch.stack([value[name] for value in values]) for name in values[0]})


def joined(first: Lens, count: int, second: Lens, other_count: int) -> Lens:  # [(B,) V], [(B,) R] -> [(B,) V + R]
    """The lenses of `count` cameras and behind them those of `other_count`; one lens that both share stays as it is."""
    if kind(first) != kind(second):
        fix = "undistort the images and scale them to one size"
        raise invalid(
            "lens", "of one kind and size for cameras that are joined", f"{kind(first)} and {kind(second)}", fix
        )
    others = tensors(second)
    pairs = {name: (value, others[name]) for name, value in tensors(first).items()}
    if not first.batch_shape and not second.batch_shape and all(torch.equal(a, b) for a, b in pairs.values()):
        return first
    lead = torch.broadcast_shapes(first.batch_shape[:-1], second.batch_shape[:-1])
    ours, theirs = (*lead, count), (*lead, other_count)
    values = {name: torch.cat((a.expand(ours), b.expand(theirs)), dim=-1) for name, (a, b) in pairs.items()}
    return remade(first, values)


def in_row(lenses: Sequence[Lens], counts: Sequence[int]) -> Lens:  # [(B,) sum of counts]
    """The lenses of several groups of cameras, one group behind the other."""
    row, so_far = lenses[0], counts[0]
    for lens, count in zip(lenses[1:], counts[1:], strict=True):
        row, so_far = joined(row, so_far, lens, count), so_far + count
    return row


def repeated(lens: Lens, copies: int) -> Lens:  # [b, V] -> [b · copies, V]
    """The lenses of every clip `copies` times in a row; lenses that all clips share stay as they are."""
    if len(lens.batch_shape) < 2 or lens.batch_shape[0] == 1:
        return lens
    return changed(lens, lambda value: value.expand(lens.batch_shape).repeat_interleave(copies, dim=0))


def regrouped(lens: Lens, cameras: torch.Size, shape: tuple[int, ...]) -> Lens:
    """The lenses of as many cameras in another shape; one that all cameras share stays as it is."""
    if not lens.batch_shape:
        return lens
    return changed(lens, lambda value: value.expand(cameras).reshape(shape))


def resized(lens: Lens, width: int, height: int) -> Lens:
    """The lens of images that were scaled to another size; pixel corners stay corners."""
    scale = dict.fromkeys(HORIZONTAL, width / lens.width) | dict.fromkeys(VERTICAL, height / lens.height)
    scaled = {name: scale[name] * value for name, value in parameters(lens).items() if name in scale}
    return replace(lens, width=width, height=height, **scaled)  # type: ignore[type-var]

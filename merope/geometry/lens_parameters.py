"""Parameters of lenses: checked when a lens is made, kept as tensors that broadcast to one lens per camera."""

from collections.abc import Callable
from dataclasses import fields
from numbers import Integral, Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from merope.errors import invalid

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Condition = tuple[str, Callable[[Tensor], Tensor]]  # what a parameter must be, and where its values are

FINITE: Condition = ("finite", torch.isfinite)
POSITIVE: Condition = ("positive and finite", lambda v: v > 0.0)
NOT_NEGATIVE: Condition = ("finite and at least 0", lambda v: v >= 0.0)
UNIT_INTERVAL: Condition = ("in [0, 1]", lambda v: (v >= 0.0) & (v <= 1.0))
INSIDE_SPHERE: Condition = ("in (-1, 1]", lambda v: (v > -1.0) & (v <= 1.0))


def settle_parameters(lens: "DataclassInstance", **conditions: Condition) -> None:
    """Check a lens under construction; store its parameters as tensors and their broadcast shape as `batch_shape`."""
    conditions = {"fx": POSITIVE, "fy": POSITIVE, **conditions}
    for name in ("width", "height"):
        size = getattr(lens, name)
        if not isinstance(size, Integral) or isinstance(size, bool) or size <= 0:
            raise invalid(name, "a positive int", repr(size), "pass the image size in pixels")
        object.__setattr__(lens, name, int(size))
    names = [f.name for f in fields(lens) if f.init and f.name not in ("width", "height")]
    parameters = {name: as_parameter(name, getattr(lens, name), conditions.get(name, FINITE)) for name in names}
    for name, value in parameters.items():
        object.__setattr__(lens, name, value)
    if "fx" in parameters:
        _refuse_fractions(parameters, lens.width)  # type: ignore[attr-defined]
    try:
        object.__setattr__(lens, "batch_shape", torch.broadcast_shapes(*(p.shape for p in parameters.values())))
    except RuntimeError:
        got = ", ".join(f"{name} {list(p.shape)}" for name, p in parameters.items())
        raise invalid("parameter shapes", "broadcastable", got, "give all of them the shape of the cameras") from None


def _refuse_fractions(parameters: dict[str, Tensor], width: int) -> None:
    """No real lens has its axis in the first pixel and so short a focal length: these are fractions of the image."""
    fx, cx, cy = (parameters[name] for name in ("fx", "cx", "cy"))
    if all(bool(((c >= 0) & (c <= 1)).all()) for c in (cx, cy)) and bool((fx < 0.05 * width).all()):
        got = ", ".join(f"{name} {parameters[name].tolist()}" for name in ("fx", "cx", "cy"))
        fix = "multiply fractions of the image by it: fx and cx by the width, fy and cy by the height"
        raise invalid("fx, fy, cx, cy", f"in pixels of an image {width} wide", got, fix)


def as_parameter(name: str, value: object, condition: Condition = FINITE) -> Tensor:  # [*batch]
    """A lens parameter as a tensor, finite and meeting the condition: numbers become float64, tensors are kept."""
    if isinstance(value, Real):
        value = torch.tensor(float(value), dtype=torch.float64)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise invalid(name, "a number or a floating-point tensor", repr(value), "convert it to one")
    if value.dtype not in (torch.float32, torch.float64):
        fix = "pass the original calibration; bfloat16 steps by 4 pixels at 900"
        raise invalid(name, "float32 or float64", value.dtype, fix)
    expected, holds = condition
    if not bool((value.isfinite() & holds(value)).all()):
        raise invalid(name, expected, value.tolist(), "check the calibration")
    return value

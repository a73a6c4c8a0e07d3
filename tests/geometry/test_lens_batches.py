"""Lenses that are made of others: the same as made afresh, and no number is read back on the way."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from lens_zoo import LENSES, TYPICAL, batched, parameter_names, random_pixels, random_points
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from merope.geometry.lens_batches import joined, picked, regrouped, repeated, stacked
from merope.geometry.lenses import Lens, tensors

READS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"}
Made = tuple[Callable[[Lens], Lens], tuple[int, ...]]  # how, and the batch shape of what is made of six lenses [2, 3]
MADE: dict[str, Made] = {
    "moved": (lambda lens: lens.to("cpu"), (2, 3)),
    "picked": (lambda lens: picked(lens, torch.tensor([2, 0])), (2, 2)),
    "repeated": (lambda lens: repeated(lens, 2), (4, 3)),
    "regrouped": (lambda lens: regrouped(lens, torch.Size((2, 3)), (6,)), (6,)),
    "joined": (lambda lens: joined(lens, 3, lens, 3), (2, 6)),
    "stacked": (lambda lens: stacked([lens, lens]), (2, 2, 3)),
}


class NothingIsRead(TorchDispatchMode):
    """Fails at operations that make the host wait for a GPU's answer."""

    def __torch_dispatch__(self, call: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        assert call._schema.name not in READS, f"{call} reads a number back"
        return call(*arguments, **(named or {}))


@pytest.mark.parametrize("name", [name for name in TYPICAL if name != "panorama"])
@pytest.mark.parametrize("how", MADE)
def test_a_lens_that_is_made_of_others_is_the_same_as_one_made_afresh(name: str, how: str) -> None:
    six, (make, shape) = batched(LENSES[name], (2, 3)), MADE[how]
    with NothingIsRead():
        made = make(six)
    afresh = replace(made, **{part: getattr(made, part).clone() for part in parameter_names(made)})
    assert made.batch_shape == afresh.batch_shape == shape
    assert tensors(made).keys() == tensors(afresh).keys() == tensors(six).keys()
    pixels, points = random_pixels(*shape, 7), random_points(*shape, 7)
    for ours, theirs in (
        (tensors(made).values(), tensors(afresh).values()),
        (made.unproject(pixels), afresh.unproject(pixels)),
        (made.project(points), afresh.project(points)),
    ):
        torch.testing.assert_close(list(ours), list(theirs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", TYPICAL)
def test_a_lens_of_another_precision_is_checked_and_derived_again(name: str) -> None:
    lens = LENSES[name]
    coarse = lens.to(torch.float32)
    afresh = replace(lens, **{part: getattr(lens, part).float() for part in parameter_names(lens)})
    ours, theirs = list(tensors(coarse).values()), list(tensors(afresh).values())
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_parameter_that_another_precision_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fx.*finite"):
        replace(LENSES["pinhole"], fx=1e300).to(torch.float32)  # type: ignore[type-var]


@dataclass(frozen=True, eq=False)
class TableLens:
    """A lens of somebody's own, with a table that is not one number per camera."""

    focal: Tensor  # [V]
    table: Tensor = field(init=False)  # [1000]

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", torch.linspace(0.0, float(self.focal.max()), 1000))

    @property
    def batch_shape(self) -> torch.Size:
        return self.focal.shape


def test_a_lens_of_somebodys_own_is_made_by_its_own_constructor() -> None:
    picked_one: Any = picked(TableLens(torch.tensor([90.0, 100.0, 110.0])), torch.tensor([1]))  # type: ignore[arg-type]
    assert (picked_one.focal.tolist(), float(picked_one.table[-1])) == ([100.0], 100.0)

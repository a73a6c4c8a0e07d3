"""Plans that no encoding of the library makes: on every backend they are equal to the dense operator."""

import pytest
import torch

from merope.attention.kernels.hopper_tables import why_not_plan
from merope.attention.plan import AttentionPlan
from tests.foreign_plans import ACCEPTED, FOREIGN, random_plan
from tests.gpu.errors import DEVICE, HALF, assert_accurate, errors_of, random_inputs, relative_errors, results, under

pytestmark = pytest.mark.usefixtures("_poisoned")


def assert_right(plan: AttentionPlan, heads: int = 3) -> None:
    plan = plan.to(DEVICE)
    *inputs, gradient = random_inputs(plan, torch.float64, heads)
    dense = results(under(plan, "reference"), inputs, gradient)
    assert max(relative_errors(results(under(plan, "sdpa"), inputs, gradient), dense)) < 1e-9
    *single, gradient = random_inputs(plan, torch.float32, heads)
    ours = relative_errors(results(under(plan, "fused"), single, gradient), dense)
    theirs = relative_errors(results(under(plan, "sdpa"), single, gradient), dense)
    assert all(a <= max(2 * b, 3e-6) for a, b in zip(ours, theirs, strict=True)), (ours, theirs)
    assert_accurate(errors_of(plan, HALF, heads=heads))


@pytest.mark.parametrize("name", FOREIGN)
def test_other_structures(name: str) -> None:
    torch.manual_seed(0)
    plan = FOREIGN[name]()
    assert why_not_plan(plan.to(DEVICE)) is not None
    assert_right(plan)


@pytest.mark.parametrize("name", ACCEPTED)
def test_structures_like_ours(name: str) -> None:
    plan = ACCEPTED[name]()
    assert why_not_plan(plan.to(DEVICE)) is None
    assert_right(plan)


@pytest.mark.parametrize("seed", range(8))
def test_random_structures(seed: int) -> None:
    plan = random_plan(seed)
    if plan.blocks:
        assert_right(plan)

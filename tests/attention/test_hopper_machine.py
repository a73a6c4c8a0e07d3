"""The multiprocessor that runs the Hopper kernels on the CPU shows what is wrong with them: a line that is missing."""

from contextlib import nullcontext

import pytest
import torch

from merope.attention.kernels import hopper
from merope.encodings.merope import MeRoPE
from tests import hopper_machine
from tests.gpu.errors import driving_cameras, random_inputs, relative_errors, results, under

pytestmark = [
    pytest.mark.usefixtures("_on_the_machine"),
    pytest.mark.skipif(hopper_machine.why_not() is not None, reason=str(hopper_machine.why_not())),
]
WRONG = "wrong numbers|not finite"
MISSING = {
    "pipeline.wait_until_copied(operand, t);": "wait for ever",
    "pipeline.wait_until_free(operand, t);": "more threads arrive at a barrier than it was made for",
    "if (share.lane == 0) barrier_arrive(pipeline.used(operand, t));": "wait for ever",
    "wgmma_wait<1>();": WRONG,
    "if (thread == 0) wait_until_added_are_read();": WRONG,
    "if (thread == 0) wait_until_added();  // the sums of a piece": "ended before what it added was read",
    "named_sync<256>(1);  // the errors of both warpgroups are there": WRONG,
}
"""Lines of the kernels, and what is said without them."""


@pytest.fixture
def _on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper_machine.use(monkeypatch)


@pytest.mark.parametrize("line", ["", *MISSING])
def test_a_missing_line_shows(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    text = hopper_machine.sources(phases=False, visible=False)
    assert line in text
    kernels = hopper_machine.CpuKernels(hopper_machine.compiled(text.replace(line, "")), seed=1)
    monkeypatch.setattr(hopper, "module", lambda *_: kernels)
    with pytest.raises(AssertionError, match=MISSING[line]) if line else nullcontext():
        check_numbers()


def check_numbers() -> None:
    """Output and gradients, with several tiles of queries and of keys; one of these is cut."""
    plan = MeRoPE().plan(driving_cameras(1, 4), (9, 15))
    *inputs, gradient = random_inputs(plan, torch.bfloat16, heads=1)
    right = results(under(plan, "sdpa"), [x.double() for x in inputs], gradient)
    assert max(relative_errors(results(under(plan, "fused"), inputs, gradient), right)) < 0.01, "wrong numbers"

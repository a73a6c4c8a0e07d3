"""The axis of the report's plot can be read, however close the clips are."""

import pytest

from merope.evaluate.report_plot import _ticks


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.04, 3.0, [0.05, 0.1, 0.2, 0.5, 1.0, 2.0]),
        (0.497, 0.67, [0.5, 0.6]),
        (0.55, 0.98, [0.6, 0.7, 0.8, 0.9]),
        (0.5121, 0.5349, [0.512, 0.535]),
        (0.7, 0.7, [0.7]),
    ],
)
def test_an_axis_has_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert _ticks(low, high) == pytest.approx(ticks)

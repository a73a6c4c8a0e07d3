"""benchmarks/pole_sensitivity.py: MinRot's pole is where docs/conventions.md says, and direction phases have none."""

import math
import sys
from pathlib import Path

import pytest

import merope

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from pole_sensitivity import ANCHOR, PHASES, RAYS, anchor_sensitivity, ray_sensitivity


@pytest.mark.parametrize("name", ["merope", "merope_phases"])
def test_anchors_at_the_epipole_spin_near_the_pole_unless_transported(name: str) -> None:
    for angle_deg in (0.01, 0.1, 1.0):
        spinning = anchor_sensitivity(merope.encoding(name, **ANCHOR), angle_deg, ray_angle_deg=20.0)
        assert spinning == pytest.approx(2 / math.radians(angle_deg), rel=2e-3)
        carried = merope.encoding(name, **ANCHOR, anchor_frame="transport")
        assert anchor_sensitivity(carried, angle_deg, ray_angle_deg=20.0) < 6.1


def test_phases_of_anchors_turn_as_far_as_their_scale_says() -> None:
    for angle_deg in (0.01, 1.0):
        encoding = merope.encoding("merope_phases", **(ANCHOR | PHASES))
        phases = anchor_sensitivity(encoding, angle_deg, ray_angle_deg=20.0)
        assert phases == pytest.approx(12.5, rel=0.02)


def test_the_rotation_block_spins_for_rays_near_the_pole_and_direction_phases_do_not() -> None:
    for angle_deg in (0.01, 1.0, 30.0):
        rotation, phases = (
            ray_sensitivity(merope.encoding(name, **RAYS), angle_deg) for name in ("merope", "merope_phases")
        )
        assert rotation == pytest.approx(2 / math.tan(math.radians(angle_deg)), rel=0.2)
        assert phases == pytest.approx(50.0, rel=0.02)  # the highest frequency times the turn along an axis

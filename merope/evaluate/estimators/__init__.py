"""Pose estimators: `estimator(name, ...)` recovers the camera of every frame of a video. docs/estimators.md."""

import inspect
from collections.abc import Callable

from merope.errors import invalid
from merope.evaluate.estimators import learned
from merope.evaluate.estimators.estimator import PoseEstimate, PoseEstimator
from merope.evaluate.estimators.opencv_tracker import OpenCVTracker
from merope.evaluate.estimators.packages import PACKAGES, import_package
from merope.evaluate.estimators.precomputed import PrecomputedEstimator
from merope.evaluate.estimators.render_anchored import RenderAnchoredEstimator
from merope.evaluate.estimators.structure_from_motion import ColmapEstimator

__all__ = ["ESTIMATORS", "PoseEstimate", "PoseEstimator", "estimator"]

ESTIMATORS: dict[str, Callable[..., PoseEstimator]] = {
    "colmap": ColmapEstimator,
    "opencv": OpenCVTracker,
    "render-anchored": RenderAnchoredEstimator,
    "vggt-omega": learned.vggt_omega,
    "vggt": learned.vggt,
    "depth-anything-3": learned.depth_anything_3,
    "map-anything": learned.map_anything,
    "precomputed": PrecomputedEstimator,
}


def estimator(name: str, **options: object) -> PoseEstimator:
    """The estimator of that name, with its own options, such as estimator("vggt", checkpoint="model.pt")."""
    if name not in ESTIMATORS:
        raise invalid("estimator", f"one of {', '.join(ESTIMATORS)}", repr(name), "see docs/estimators.md")
    parameters = inspect.signature(ESTIMATORS[name]).parameters
    for option in options:
        if option not in parameters:
            raise invalid(f"options of {name}", f"among {list(parameters)}", repr(option), "see docs/estimators.md")
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.name not in options]
    if needed:
        raise invalid(f"options of {name}", f"to include {', '.join(needed)}", list(options), "see docs/estimators.md")
    if name in PACKAGES:
        import_package(PACKAGES[name])
    return ESTIMATORS[name](**options)

"""Every camera encoding with a small head, and what holds of it: the table behind test_every_encoding.py.

MeRoPE is held to more in test_merope.py and tests/attention.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
import torch
from scenes import FISHEYE, LENSES, PINHOLE, ZOOM, random_content
from torch import Tensor

from merope import GTA, AttentionPlan, Cameras, Lens, Pinhole, UnifiedCamera
from merope.encodings.cape import CaPE
from merope.encodings.crepe import CRePE
from merope.encodings.merope import MeRoPEPhases
from merope.encodings.prope import PRoPE
from merope.encodings.protocol import Encoding
from merope.encodings.raynova import RayNova
from merope.encodings.rayrope import RayRoPE
from merope.encodings.ucpe import UCPE
from merope.encodings.ucpe_clamped import UCPEClamped
from merope.encodings.urope import URoPE
from merope.encodings.viewrope import ViewRope

RIMMED = UnifiedCamera(110.0, 110.0, 100.0, 72.0, 1.8, 256, 144)
"""Sees the centres of four patches of a grid of 2 × 3."""


@dataclass(frozen=True)
class Method:
    """What holds of an encoding.

    variants: instances that differ in their blocks, the plain one first; options: those that differ in numbers only.
    norms: what U does to the length of a vector: "kept" (orthogonal), "shrunk" (a contraction), "grown" (neither).
    transforms_values: whether it does so by default.
    projects: it places keys in the image of the query's camera, so that they differ from one to the next.
    farthest: exponent of 10 up to which a shift of the world changes no output by 1e-9; None if any change may.
    """

    variants: dict[str, Encoding]
    norms: Literal["kept", "shrunk", "grown"]
    options: dict[str, Encoding] = field(default_factory=dict)
    transforms_values: bool = True
    projects: bool = False
    pinhole_only: bool = False
    farthest: float | None = 3.0

    @property
    def plain(self) -> Encoding:
        return next(iter(self.variants.values()))

    @property
    def instances(self) -> dict[str, Encoding]:
        return {**self.variants, **self.options}

    @property
    def lenses(self) -> dict[str, Lens]:
        """Lenses for three cameras."""
        return {"pinhole": PINHOLE, "zoom": ZOOM} if self.pinhole_only else {**LENSES, "zoom": ZOOM}

    @property
    def mixed_lens(self) -> Lens:
        """For three cameras, with a rim where the method takes one."""
        return ZOOM if self.pinhole_only else RIMMED

    @property
    def other_lens(self) -> Lens:
        return Pinhole(90.0, 90.0, 64.0, 32.0, 128, 64) if self.pinhole_only else FISHEYE

    def lenses_with(self, focal: Tensor) -> tuple[Lens, ...]:
        """Lenses with focal lengths that may differ from camera to camera and from clip to clip."""
        pinhole = Pinhole(focal, 100.0, 128.0, 72.0, 256, 144)
        return (pinhole,) if self.pinhole_only else (pinhole, UnifiedCamera(focal, 90.0, 128.0, 72.0, 0.4, 256, 144))

    def pair_of_lenses(self, clips: int) -> Lens:
        """For two cameras of which the second is a fisheye where the method takes one, different in every clip."""
        zoom = 1 + 0.1 * torch.rand(clips, 2, dtype=torch.float64)
        if self.pinhole_only:
            return Pinhole(100 * zoom, 90.0, 128.0, 72.0, 256, 144)
        fx, fy, xi = (torch.tensor(x, dtype=torch.float64) for x in ((80, FISHEYE.fx), (90, FISHEYE.fy), (0.4, 2.13)))
        return UnifiedCamera(fx * zoom, fy, 128.0, 72.0, xi, 256, 144)


PHASES = MeRoPEPhases(32, (18, 6, 6, 2), (2, 0, 0))

METHODS = {
    "merope_phases": Method(
        {
            "": PHASES,
            "transport": replace(PHASES, anchor_frame="transport"),
            "anchors": replace(PHASES, anchor_scale=12.5, fractions=(0.0, 0.4, 1.0)),
        },
        norms="kept",
        options={"finer": replace(PHASES, direction_scale=80.0), "logits": replace(PHASES, transform_values=False)},
        projects=True,
    ),
    "cape": Method(
        {"": CaPE(16), "values": CaPE(16, transform_values=True)},
        norms="grown",
        options={"opengl": CaPE(16, camera_axes="opengl")},
        transforms_values=False,
    ),
    "gta": Method({"": GTA(16), "so2": GTA(16, image_plane="so2")}, norms="grown"),
    "prope": Method({"": PRoPE(16)}, norms="grown", pinhole_only=True),
    "ucpe": Method({"": UCPE(16), "corner": UCPE(16, ray_offset=(0.0, 0.0))}, norms="grown"),
    "ucpe_clamped": Method(
        {"": UCPEClamped(16), "corner": UCPEClamped(16, ray_offset=(0.0, 0.0))}, norms="grown", farthest=None
    ),
    "raynova": Method(
        {"": RayNova(32), "values": RayNova(32, transform_values=True)},
        norms="kept",
        options={"centre": RayNova(32, position="centre")},
        transforms_values=False,
        farthest=None,
    ),
    "viewrope": Method(
        {"": ViewRope(32), "values": ViewRope(32, transform_values=True)},
        norms="kept",
        transforms_values=False,
        farthest=7.0,
    ),
    "urope": Method({"": URoPE(32)}, norms="kept", projects=True),
    "rayrope": Method(
        {"": RayRoPE(28)},
        norms="shrunk",
        options={
            "d": RayRoPE(28, depth_coding="d"),
            "asinh_d": RayRoPE(28, depth_coding="asinh_d"),
            "point": RayRoPE(28, point_depth=True),
            "collapse": RayRoPE(28, collapse_tol=0.01),
        },
        projects=True,
        pinhole_only=True,
    ),
    "crepe": Method({"": CRePE(20)}, norms="shrunk", projects=True),
}


VARIANTS = {f"{name} {v}".strip(): (m, e) for name, m in METHODS.items() for v, e in m.variants.items()}

each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def each_variant_with(name: str, every: list[Any], projecting: list[Any]) -> pytest.MarkDecorator:
    """Parametrises over the variants and values of one more argument, of which some are for methods that project."""
    cases = [
        pytest.param(method, encoding, value, id=f"{variant}-{value}")
        for variant, (method, encoding) in VARIANTS.items()
        for value in (*every, *(projecting if method.projects else ()))
    ]
    return pytest.mark.parametrize(("method", "encoding", name), cases)


def each_method_whose(norms: str) -> pytest.MarkDecorator:
    """Parametrises over the methods that treat norms so."""
    chosen = {name: method for name, method in METHODS.items() if method.norms == norms}
    return pytest.mark.parametrize("method", chosen.values(), ids=chosen)


def plan(
    encoding: Encoding,
    cameras: Cameras,
    grid: tuple[int, int],
    clips: int = 1,  # with contents of their own
    seed: int = 0,
    **options: object,
) -> AttentionPlan:
    """The plan with random contents for an encoding that reads them; options are those of `Encoding.plan`."""
    if encoding.content_channels:
        tokens = cameras.count * grid[0] * grid[1] + options.get("extra_tokens", 0)
        options.setdefault("content", random_content(clips, tokens, seed))
    if encoding.content_channels and "key" in options:
        rows, columns = options.get("key_grid", grid)
        tokens = options["key"].count * rows * columns + options.get("key_extra_tokens", 0)
        options["key_content"] = random_content(clips, tokens, seed + 1)
    return encoding.plan(cameras, grid, **options)

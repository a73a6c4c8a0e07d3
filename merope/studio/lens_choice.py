"""The lens that a page chooses, and in what it differs from all that a model has seen."""

from dataclasses import dataclass

from torch import Tensor

from merope.demo.given_paths import beyond_training
from merope.errors import invalid
from merope.generate.camera_path import lens_of_fov
from merope.geometry.lenses import Lens
from merope.world.clips import WorldClips

FOVS_DEG = {"pinhole": (20.0, 120.0), "fisheye": (60.0, 200.0)}
XI = {"pinhole": 0.0, "fisheye": 1.0}


@dataclass(frozen=True)
class LensChoice:
    """What a page can ask for."""

    kind: str
    fov_deg: float  # horizontal

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in FOVS_DEG:
            raise invalid("lens", f"one of {', '.join(FOVS_DEG)}", repr(self.kind), "choose one of them")
        low, high = FOVS_DEG[self.kind]
        is_number = isinstance(self.fov_deg, int | float) and not isinstance(self.fov_deg, bool)
        if not is_number or not low <= self.fov_deg <= high:
            fix = "move the slider"
            raise invalid("field of view", f"from {low:g}° to {high:g}° for a {self.kind}", repr(self.fov_deg), fix)

    def lens(self, clips: WorldClips) -> Lens:
        return lens_of_fov(self.fov_deg, XI[self.kind], clips.width, clips.height)


def training_notes(
    choice: LensChoice,
    clips: WorldClips,  # that the model was trained on
    path: Tensor | None,  # [T, 4, 4] relative to the first camera
) -> list[str]:
    """In what the cameras differ from all that the model has seen."""
    fov_deg, xi = choice.fov_deg, XI[choice.kind]
    driven = WorldClips(frame_rate_hz=clips.frame_rate_hz, fov_deg=(fov_deg, fov_deg), xi=(xi, xi))
    return beyond_training(path, driven, clips)

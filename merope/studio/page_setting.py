"""What a page asks for, checked like any stranger's words: model, beginning, lens, prompt, steps and path."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from merope.errors import invalid
from merope.studio.drawn_path import DrawnPoint, drawn_path
from merope.studio.given_video import GivenVideo, cameras_ahead, cameras_from_path
from merope.studio.lens_choice import LensChoice
from merope.studio.page_uploads import PageUploads
from merope.studio.street_drive import Beginning
from merope.studio.street_view import StreetView
from merope.studio.studio_model import Sampling, StudioModel

LONGEST_DRAWN_S = 120.0


@dataclass(frozen=True)
class Setting:
    """What a drive or a take begins with."""

    model: StudioModel
    beginning: Beginning
    sampling: Sampling


def chosen_model(models: Sequence[StudioModel], number: object) -> StudioModel:
    """By its place in the list that pages are told. No page names a folder."""
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(models):
        expected = f"the number of a model, from 0 to {len(models) - 1}"
        raise invalid("model", expected, repr(number)[:80], "choose one of the list")
    return models[number]


def read_setting(models: Sequence[StudioModel], uploads: PageUploads, asked: Mapping[str, Any]) -> Setting:
    """The setting that a message describes. A model without a word on steps takes those for driving."""
    model = chosen_model(models, asked.get("model", 0))
    lens = asked.get("lens")
    if not isinstance(lens, dict):
        raise invalid("lens", "a kind and a field of view", repr(lens)[:80], "reload the page")
    choice = LensChoice(lens.get("kind"), lens.get("fov_deg"))  # type: ignore[arg-type]
    sampling = model.sampling(asked.get("steps", model.driving_steps), asked.get("prompt", ""))
    if asked.get("video") is None:
        return Setting(model, StreetView(asked.get("world"), choice, model.clips), sampling)  # type: ignore[arg-type]
    return Setting(model, _given(model, uploads, choice, asked["video"]), sampling)


def _given(model: StudioModel, uploads: PageUploads, choice: LensChoice, video: object) -> GivenVideo:
    """The video that the page has sent, with its cameras from a file or straight ahead."""
    if not isinstance(video, dict):
        raise invalid("video", "the speed of its camera, or that it is posed", repr(video)[:80], "reload the page")
    fitted, count = uploads.video(model), max(model.first_frames, model.prefix_frames)
    if video.get("posed"):
        poses = cameras_from_path(uploads.path("cameras", model).world_from_camera, count)
        return GivenVideo(fitted, poses, "as in the pose file", choice, model.clips)
    speed_m_s = video.get("speed_m_s")
    poses = cameras_ahead(speed_m_s, count, model.clips.frame_rate_hz)
    return GivenVideo(fitted, poses, f"straight ahead at {speed_m_s:g} m/s", choice, model.clips)


def read_route(setting: Setting, uploads: PageUploads, asked: Mapping[str, Any]) -> Tensor:  # [T, 4, 4]
    """All cameras of a take: along the path that a page has drawn, or the one that was dropped on it."""
    model = setting.model
    if asked.get("dropped"):
        path = uploads.path("path", model).world_from_camera
    else:
        points, rate_hz = asked.get("points"), model.clips.frame_rate_hz
        if not isinstance(points, list) or not all(isinstance(one, list) and len(one) == 3 for one in points):
            expected = "metres to the right, ahead, and a speed, for each"
            raise invalid("points", expected, repr(points)[:80], "draw again")
        path = drawn_path([DrawnPoint(*one) for one in points], rate_hz, round(LONGEST_DRAWN_S * rate_hz))
    return setting.beginning.route(path, model.prefix_frames)

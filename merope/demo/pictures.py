"""Pictures of driven paths: what should be seen beside what was generated beside both paths from above.

Small videos are enlarged to be watched; nothing else is done to their pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from merope.draw.birdseye import INK, PAPER, birdseye_image

VIDEO_PX, SMALL_PX = 288, 144  # about the height of a frame in the videos, and in the poster and the animation
GAP_PX = 8
CAPTION_PX, FONT_PX = 28, 16
POSTER_FRAMES = 4
WHITE = 255


@dataclass(frozen=True, eq=False)
class Film:
    """One driven path."""

    title: str
    true: Tensor  # uint8 [T, H, W, 3], what the commanded camera would see
    generated: Tensor  # uint8 [T, H, W, 3], of which the prefix was given
    commanded: Tensor  # [T, 4, 4] world_from_camera
    recovered: Tensor  # [T, 4, 4] world_from_camera
    valid: Tensor  # bool [T], where a pose was recovered
    prefix_frames: int
    frame_rate_hz: float

    def paths(self, until: int) -> dict[str, Tensor]:  # each [n, 4, 4]
        """The whole command, and what has been recovered up to a frame."""
        recovered = self.recovered[: until + 1][self.valid[: until + 1]]
        return {"commanded": self.commanded} | ({"recovered": recovered} if len(recovered) else {})

    def state_caption(self, t: int) -> str:
        """Over the model's video at a frame."""
        return f"{'given' if t < self.prefix_frames else 'generated'}, {t / self.frame_rate_hz:.2f} s"

    def above_caption(self, t: int) -> str:
        """Over the paths at a frame: where it has no pose, the recovered dot stays at the last one that was found."""
        return "from above" if self.valid[t] else "from above: no pose found here"


def film_frames(film: Film) -> Tensor:  # uint8 [T, H', W', 3], H' and W' even
    """The video of a path: true render, generated, and the paths from above, growing with time."""
    true, generated = (enlarged(video, VIDEO_PX) for video in (film.true, film.generated))
    height, width = true.shape[1:3]
    frames = []
    for t in range(len(true)):
        above = birdseye_image(film.paths(t), height, height, frame=t)
        panels = (
            _captioned(true[t], f"{film.title}: what the commanded camera would see"),
            _captioned(generated[t], film.state_caption(t)),
            _captioned(above, film.above_caption(t)),
        )
        frames.append(_side_by_side(panels, width * 2 + height))
    return torch.stack(frames)


def stacked_films(films: Sequence[Tensor]) -> Tensor:  # each uint8 [T, H', W', 3] -> uint8 [T, n · H', W', 3]
    """Videos of several paths, one above the other."""
    return torch.cat(list(films), dim=1)


def animation_frames(films: Sequence[Film]) -> Tensor:  # uint8 [T, H', W', 3]
    """All paths at once, side by side: what the commanded camera would see above what was generated."""
    columns = []
    for film in films:
        true, generated = (enlarged(video, SMALL_PX) for video in (film.true, film.generated))
        above = [_captioned(frame, f"{film.title}: true render") for frame in true]
        below = [_captioned(frame, film.state_caption(t)) for t, frame in enumerate(generated)]
        columns.append([torch.cat(pair) for pair in zip(above, below, strict=True)])
    width = sum(column[0].shape[1] for column in columns)
    return torch.stack([_side_by_side(panels, width) for panels in zip(*columns, strict=True)])


def poster(films: Sequence[Film]) -> Tensor:  # uint8 [H', W', 3]
    """A few moments of every path on one sheet."""
    sheets = [_poster_rows(film) for film in films]
    headline = (
        "Upper rows: what the commanded camera would see.  "
        "Lower rows: generated from the first frames and the camera path.  Right: both paths."
    )
    return torch.cat((_caption(headline, sheets[0].shape[1]), *sheets))


def _poster_rows(film: Film) -> Tensor:  # uint8 [H', W', 3]
    last, columns = len(film.true) - 1, []
    for k in range(POSTER_FRAMES):
        t = round(film.prefix_frames - 1 + k * (last - film.prefix_frames + 1) / (POSTER_FRAMES - 1))
        true, generated = enlarged(torch.stack((film.true[t], film.generated[t])), SMALL_PX)
        label = f"{film.title}, last frame given" if k == 0 else f"{t / film.frame_rate_hz:.2f} s"
        columns.append(_captioned(torch.cat((true, pad(generated, (0, 0, 0, 0, 2, 0), value=WHITE))), label))
    height = columns[0].shape[0] - CAPTION_PX
    above = birdseye_image(film.paths(last), height, height, frame=last)
    width = sum(column.shape[1] for column in columns) + height
    caption = f"from above, {int(film.valid.sum())} of {last + 1} poses found"
    return pad(_side_by_side((*columns, _captioned(above, caption)), width), (0, 0, 0, 0, 0, GAP_PX), value=WHITE)


def enlarged(video: Tensor, height_px: int) -> Tensor:  # uint8 [T, H, W, 3] -> uint8 [T, f · H, f · W, 3]
    """Every frame a whole number of times as large, about so high, by Lanczos; larger ones stay as they are."""
    import numpy as np
    from PIL import Image

    factor = max(round(height_px / video.shape[1]), 1)
    if factor == 1:
        return video.cpu()
    size = (video.shape[2] * factor, video.shape[1] * factor)
    images = [Image.fromarray(frame).resize(size, Image.Resampling.LANCZOS) for frame in video.cpu().numpy()]
    return torch.from_numpy(np.stack([np.asarray(image) for image in images]))


def _side_by_side(panels: Sequence[Tensor], content_px: int) -> Tensor:  # uint8 [H', W', 3]
    """Panels of one height with gaps between them; an odd width gains a column, as video needs."""
    spaced = [pad(panel, (0, 0, 0, GAP_PX), value=WHITE) for panel in panels[:-1]]
    width = content_px + GAP_PX * (len(panels) - 1)
    return pad(torch.cat((*spaced, panels[-1]), dim=1), (0, 0, 0, width % 2), value=WHITE)


def _captioned(picture: Tensor, text: str) -> Tensor:  # uint8 [H, W, 3] -> uint8 [H + CAPTION_PX, W, 3]
    return torch.cat((_caption(text, picture.shape[1]), picture))


def _caption(text: str, width: int) -> Tensor:  # uint8 [CAPTION_PX, width, 3]
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    strip = Image.new("RGB", (width, CAPTION_PX), PAPER)
    font = ImageFont.load_default(FONT_PX)
    ImageDraw.Draw(strip).text((2, CAPTION_PX / 2), text, fill=INK, font=font, anchor="lm")
    return torch.from_numpy(np.asarray(strip).copy())

"""History "sa" in a causal Wan: references stand before the frames, which see them; they see each other alone.

In a bidirectional model references look at the video. Here they must not: an earlier frame would learn the future from
them. So their keys do not depend on the video, and in a stream they are frames of the cache like any others, for one
block. They have the times of retrieved history, that of the matched frame plus 100.
"""

from typing import Any

import torch
from torch import Tensor

from merope.adapters.batching import check_frame_count, matched_batch
from merope.adapters.camera_branch import CameraBranch
from merope.adapters.conditioning import CAMERAS, HISTORY, TIMES
from merope.adapters.history import HistoryReferences, existing, joined, joint_times
from merope.attention.visible_cameras import Visibility
from merope.errors import invalid
from merope.geometry.cameras import Cameras


def leading_references(branch: CameraBranch | None, given: dict[str, Any]) -> HistoryReferences | None:
    """References that are to stand before a clip, out of attention_kwargs; those of history "ca" stay there."""
    history = existing(given.get(HISTORY))
    if history is None or (branch is not None and branch.config["history"] == "ca"):
        return None
    if branch is None or branch.config["history"] is None:
        fix = 'make the branch with CameraBranchConfig(history="sa") or "ca"'
        raise invalid("history", "None for a model without history", f"{history.count} references", fix)
    if not isinstance(given.get(CAMERAS), Cameras):
        fix = "pass cameras and history as they are, not made ready"
        raise invalid(f'attention_kwargs["{CAMERAS}"]', "merope.Cameras", type(given.get(CAMERAS)).__name__, fix)
    del given[HISTORY]
    return history


def seeing_references(sees: Visibility, count: int) -> Visibility:
    """A visibility with so many cameras before all others, which every camera sees."""
    rows = [[(0, count)]] * count
    for intervals in sees.intervals:
        (start, stop), *others = [(start + count, stop + count) for start, stop in intervals]
        seen = [(0, stop), *others] if start == count else [(0, count), (start, stop), *others]
        if len(seen) > 2:
            fix = "leave out `last` or the references"
            raise invalid("sees", "of one interval in the past where there are references", repr(intervals), fix)
        rows.append(seen)
    return Visibility(tuple(map(tuple, rows)))


def led_by_references(
    given: dict[str, Any],
    history: HistoryReferences,
    video: Tensor,  # [B, C, T, h, w]
    latent_stride: int,
) -> HistoryReferences:
    """The references of every sample; cameras and times in `given` become theirs, and behind them the video's."""
    served, frames = history.serving(video), video.shape[2]
    check_frame_count(given[CAMERAS], frames, latent_stride)
    cameras, times = matched_batch(given[CAMERAS].to(video.device), given.get(TIMES), video.shape[0])
    moments = joint_times(times, frames, served)
    given[TIMES] = torch.cat((moments[..., frames:], moments[..., :frames]), dim=-1)
    both = joined(cameras, served.posed)  # refuses other lenses
    given[CAMERAS] = both.at(slice(frames, None)).joined(both.at(slice(frames)))
    return served

"""How far a page is with the frames that it was sent: it plays them at the rate of the video, and then stands."""

import time


class Playback:
    """Known without a word from the page."""

    def __init__(self, rate_hz: float) -> None:
        self.rate_hz = rate_hz
        self._end_s = 0.0  # when the last frame is shown

    def add(self, frames: int) -> None:
        self._end_s = max(self._end_s, time.monotonic()) + frames / self.rate_hz

    def skip(self) -> None:
        """The page goes to its last frame."""
        self._end_s = 0.0

    @property
    def left_s(self) -> float:
        return max(self._end_s - time.monotonic(), 0.0)

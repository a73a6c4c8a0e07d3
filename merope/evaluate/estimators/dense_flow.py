"""Dense optical flow between two images, and where it can be believed."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

MAX_ROUND_TRIP_PX = 1.0  # forward and backward flow must meet within
MIN_LIKENESS, WINDOW_PX = 0.5, 9  # correlation of what the flow joins, in a window
MIN_VARIANCE = 4.0  # of grey levels 0 … 255 in a window that has texture


def grey(image: Tensor) -> NDArray[np.uint8]:  # uint8 [H, W, 3] -> [H, W]
    import cv2

    return np.asarray(cv2.cvtColor(image.numpy(), cv2.COLOR_RGB2GRAY), np.uint8)


def flow(
    a: NDArray[np.uint8],  # [H, W]
    b: NDArray[np.uint8],
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:  # [H, W, 2] pixels from a to b, bool [H, W]
    """DIS flow, and where it returns to its start and joins what looks alike.

    Without the second condition a blank image would pass for one that shows everything in its place.
    """
    import cv2

    method = cv2.DISOpticalFlow.create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)
    method.setFinestScale(0)
    nowhere = np.zeros((*a.shape, 2), np.float32)
    forward = np.asarray(method.calc(a, b, nowhere.copy()), np.float32)
    backward = np.asarray(method.calc(b, a, nowhere.copy()), np.float32)
    y, x = np.ogrid[: a.shape[0], : a.shape[1]]
    x, y = x.astype(np.float32) + forward[..., 0], y.astype(np.float32) + forward[..., 1]
    back = cv2.remap(backward, x, y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_CONSTANT, borderValue=(1e6, 1e6))
    across, down = forward[..., 0] + back[..., 0], forward[..., 1] + back[..., 1]
    returns = np.sqrt(across * across + down * down) < MAX_ROUND_TRIP_PX
    return forward, returns & (likeness(a, cv2.remap(b, x, y, cv2.INTER_LINEAR)) > MIN_LIKENESS)


def likeness(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:  # [H, W] grey levels 0 … 255 -> [H, W]
    """Correlation of the windows around each pixel, without their means; 0 where either has no texture."""
    (a, mean_a), (b, mean_b) = _with_means(a), _with_means(b)
    own_a, own_b = _window_means(a * a) - mean_a * mean_a, _window_means(b * b) - mean_b * mean_b
    both = (own_a > MIN_VARIANCE) & (own_b > MIN_VARIANCE)
    spread = np.sqrt(np.where(both, own_a * own_b, 1.0))
    return np.where(both, (_window_means(a * b) - mean_a * mean_b) / spread, 0.0)


def textured(image: NDArray[Any]) -> NDArray[np.bool_]:  # [H, W] grey levels 0 … 255 -> [H, W]
    image, mean = _with_means(image)
    return _window_means(image * image) - mean * mean > MIN_VARIANCE


def _with_means(image: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:  # [H, W] -> [H, W] twice
    """The image in float64, and its means in the window around each pixel."""
    image = image.astype(np.float64)
    return image, _window_means(image)


def _window_means(image: NDArray[np.float64]) -> NDArray[np.float64]:  # [H, W] -> [H, W]
    import cv2

    return np.asarray(cv2.blur(image, (WINDOW_PX, WINDOW_PX)), np.float64)

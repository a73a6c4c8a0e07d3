"""What decides which flow is believed: likeness and texture of windows, and the way back."""

import numpy as np
import pytest

from merope.evaluate.estimators.dense_flow import MIN_VARIANCE, WINDOW_PX, flow, likeness, textured

HALF = WINDOW_PX // 2
ROWS_COLUMNS = [(20, 30), (40, 60), (50, 9)]


def grey_noise(seed: int, size: tuple[int, int] = (72, 128)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def window(image: np.ndarray, row: int, column: int) -> np.ndarray:
    return image[row - HALF : row + HALF + 1, column - HALF : column + HALF + 1].astype(np.float64).ravel()


@pytest.mark.parametrize(("row", "column"), ROWS_COLUMNS)
def test_likeness_is_the_correlation_of_two_windows(row: int, column: int) -> None:
    a = grey_noise(1)
    b = a // 2 + grey_noise(2) // 4
    expected = np.corrcoef(window(a, row, column), window(b, row, column))[0, 1]
    assert likeness(a, b)[row, column] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("row", "column"), ROWS_COLUMNS)
def test_texture_is_the_variance_of_a_window(row: int, column: int) -> None:
    for spread in (3, 12):  # on either side of the threshold
        image = (100 + grey_noise(3) % spread).astype(np.uint8)
        assert textured(image)[row, column] == (window(image, row, column).var() > MIN_VARIANCE)


def test_nothing_is_like_a_plain_surface() -> None:
    plain = np.full((72, 128), 90, np.uint8)
    assert not likeness(grey_noise(1), plain).any()
    assert not likeness(plain, grey_noise(1)).any()
    assert not textured(plain).any()


def test_flow_that_leaves_the_image_is_not_believed() -> None:
    """A picture that moved to the left by 6 pixels: its left edge is gone, the rest is found."""
    import cv2

    wide = cv2.GaussianBlur(grey_noise(4, (72, 134)), (0, 0), 2.0)
    motion, believed = flow(np.ascontiguousarray(wide[:, :-6]), np.ascontiguousarray(wide[:, 6:]))
    inside = believed[8:-8, 16:-16]
    assert inside.mean() > 0.9
    assert np.abs(motion[8:-8, 16:-16][inside] - (-6.0, 0.0)).max() < 1.0
    assert not believed[:, :4].any()

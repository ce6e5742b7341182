"""Images of digits as rows: 64 pixels in 17 shades of grey, and the label."""

import grain
import numpy as np

SIDE = 8
SHADES = 17
VOCAB_SIZE = SHADES + 10
"""The ids 0 to 16 are shades, and 17 to 26 are labels."""

# The segments of a display: top, upper left, upper right, middle, lower left, lower right, bottom.
SEGMENTS = (
    "1110111",
    "0010010",
    "1011101",
    "1011011",
    "0111010",
    "1101011",
    "1101111",
    "1010010",
    "1111111",
    "1111011",
)


def image(number: int) -> tuple[np.ndarray, int]:
    """Returns image `number`, int32 [8, 8], and its digit. The digit is moved, and has noise."""
    rng = np.random.default_rng(number)
    digit = int(rng.integers(10))
    top, upper_left, upper_right, middle, lower_left, lower_right, bottom = (on == "1" for on in SEGMENTS[digit])
    pixels = np.zeros((SIDE, SIDE))
    row, column = rng.integers(0, 2), rng.integers(0, 4)
    for offset, is_on in ((0, top), (3, middle), (6, bottom)):
        pixels[row + offset, column : column + 5] += is_on
    for offset, left, right in ((0, upper_left, upper_right), (3, lower_left, lower_right)):
        pixels[row + offset : row + offset + 4, column] += left
        pixels[row + offset : row + offset + 4, column + 4] += right
    shades = 12 * np.minimum(pixels, 1) + rng.normal(2, 2, pixels.shape)
    return np.clip(shades, 0, SHADES - 1).astype(np.int32), digit


def row(number: int) -> dict[str, np.ndarray]:
    """Returns an image as a row. Only the label, which follows the last pixel, is a target that counts."""
    pixels, digit = image(number)
    ids = np.append(pixels.reshape(-1), SHADES + digit).astype(np.int32)
    weights = np.zeros(SIDE * SIDE, np.float32)
    weights[-1] = 1
    return {"tokens": ids[:-1], "targets": ids[1:], "weights": weights}


def train() -> grain.MapDataset:
    """Returns the rows that the run trains on."""
    return grain.MapDataset.range(1500).map(row)


def held_out() -> grain.MapDataset:
    """Returns other rows, for evaluation."""
    return grain.MapDataset.range(1500, 1797).map(row)

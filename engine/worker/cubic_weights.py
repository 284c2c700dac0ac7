"""The weights of PyTorch's cubic interpolation, which repeats the values of the border and has no antialiasing."""

import numpy as np

SHARPNESS = -0.75
"""The parameter of PyTorch's cubic kernel."""


def cubic_weights(num_own: int, num_new: int) -> np.ndarray:
    """Return the share of each of `num_own` values in each of `num_new` interpolated ones, float32 [new, own]."""
    places = (np.arange(num_new) + 0.5) * num_own / num_new - 0.5
    taps = np.floor(places).astype(int)[:, None] + np.arange(-1, 3)
    distance = np.abs(places[:, None] - taps)
    near = ((SHARPNESS + 2) * distance - (SHARPNESS + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * SHARPNESS - 4 * SHARPNESS
    weights = np.zeros((num_new, num_own), np.float32)
    np.add.at(weights, (np.arange(num_new)[:, None], taps.clip(0, num_own - 1)), np.where(distance <= 1, near, far))
    return weights

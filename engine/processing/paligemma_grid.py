"""The grid of PaliGemma's images, by its settings."""

from collections.abc import Mapping
from typing import Any

from engine.processing.square_grid import SquareGrid

IMAGE_SIZE = 224
"""Pixels per side of the tower's images where config.json does not say it, as in the checkpoints of this size."""


def paligemma_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> SquareGrid:
    """Return the grid of one square, a token for each of its patches.

    Raises:
        ValueError: The image processor makes images of another size or another number of tokens than the tower.
    """
    vision, size = config["vision_config"], settings["size"]
    patch_size, side = int(vision["patch_size"]), int(vision.get("image_size", IMAGE_SIZE))
    if (sides := [size["height"], size["width"]]) != [side, side]:
        raise ValueError(f"it makes images of {sides} pixels along height and width; the vision tower takes {side}")
    num_tokens = (side // patch_size) ** 2
    if (named := settings.get("image_seq_length", num_tokens)) != num_tokens:
        raise ValueError(f"image_seq_length is {named}; the vision tower makes {num_tokens} tokens of an image")
    return SquareGrid(patch_size=patch_size, merge_size=1, resample=int(settings["resample"]), side=side)

"""Where shapes are: in an image, and relative to each other."""

from tests.demo_model.world.scenes import Scene, Shape

INVERSE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
MIN_OFFSET = 10
"""Pixels between two centers, along one axis, below which nothing is asked about their position."""


def position_in(scene: Scene, shape: Shape) -> str:
    """Return where in its image a shape is, such as "at the top left"."""
    x, y = shape.x / scene.image.width, shape.y / scene.image.height
    column = "left" if x < 0.38 else "right" if x > 0.62 else ""
    row = "top" if y < 0.38 else "bottom" if y > 0.62 else ""
    if row:
        return f"at the {row} {column}".rstrip()
    return f"on the {column} side" if column else "in the center"


def offsets_between(one: Shape, other: Shape) -> tuple[float, float]:
    """Return the distances of the centers along both axes, in pixels."""
    return abs(one.x - other.x), abs(one.y - other.y)


def relation_between(one: Shape, other: Shape, horizontal: bool | None = None) -> str:
    """Return how one shape lies to another, as a key of INVERSE.

    Args:
        horizontal: along which axis; None for that with the larger offset.
    """
    dx, dy = offsets_between(one, other)
    if dx >= dy if horizontal is None else horizontal:
        return "left of" if one.x < other.x else "right of"
    return "above" if one.y < other.y else "below"


def in_words(relation: str) -> str:
    """Return a relation as it stands in a sentence."""
    return f"to the {relation}" if relation.endswith(" of") else relation


def relation_answer(one: Shape, other: Shape, horizontal: bool | None = None) -> str:
    """Return the sentence about the relation between two shapes."""
    return f"The {one.name} is {in_words(relation_between(one, other, horizontal))} the {other.name}."

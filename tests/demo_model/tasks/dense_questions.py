"""Questions of the later image stages, about shapes that can be told apart; none where the answer is not clear."""

from collections.abc import Callable

from tests.demo_model.tasks.image_questions import Turn, ask, ask_relation, how_many, number_of
from tests.demo_model.tasks.positions import (
    MIN_OFFSET,
    offsets_between,
    position_in,
    relation_answer,
)
from tests.demo_model.world.draws import Draws, capitalize, join_list, with_article
from tests.demo_model.world.scenes import Scene, Shape
from tests.demo_model.world.words import COLORS

CLEAR_RATIO = 0.87
"""Between the smaller and the larger offset; pairs above it are nearly on a diagonal."""


def ask_dense(draws: Draws, scene: Scene, kind: str) -> Turn | None:
    """Return a question of this kind; None where it has no clear answer in this scene."""
    if kind in QUESTIONS:
        return QUESTIONS[kind](draws, scene)
    return ask(draws, scene, kind)


def _distinct_pair(draws: Draws, scene: Scene) -> tuple[Shape, Shape] | None:
    """Two shapes with names of their own, mostly not near a diagonal."""
    shapes = scene.unique
    if len(shapes) < 2:
        return None
    for _ in range(6):
        one, other = draws.sample(shapes, 2)
        small, large = sorted(offsets_between(one, other))
        if large >= MIN_OFFSET and (small / large < CLEAR_RATIO or draws.chance(0.25)):
            return one, other
    return None


def _relative(draws: Draws, scene: Scene) -> Turn | None:
    pair = _distinct_pair(draws, scene)
    if pair is None:
        return None
    one, other = pair
    wording = "Where is the {} relative to the {}?"
    if not draws.chance(0.75):
        others = ("Where is the {} compared to the {}?", "How is the {} placed relative to the {}?")
        wording = draws.choice([*others, "Where is the {} from the {}?"])
    return Turn(wording.format(one.name, other.name), relation_answer(one, other), "relative")


def _is_left_of(draws: Draws, scene: Scene) -> Turn | None:
    pair = _distinct_pair(draws, scene)
    return None if pair is None else ask_relation(draws, *pair)


def _left_or_right(draws: Draws, scene: Scene) -> Turn | None:
    pair = _distinct_pair(draws, scene)
    if pair is None:
        return None
    one, other = pair
    dx, dy = offsets_between(one, other)
    horizontal = draws.chance(0.5) if min(dx, dy) > 24 else dx >= dy
    if horizontal:
        wordings = ("Is the {} to the left or to the right of the {}?", "Is the {} left or right of the {}?")
    else:
        wordings = ("Is the {} above or below the {}?", "Is the {} higher or lower than the {}?")
    question = draws.choice(wordings).format(one.name, other.name)
    return Turn(question, relation_answer(one, other, horizontal), "left or right")


def _where_unique(draws: Draws, scene: Scene) -> Turn | None:
    if not scene.unique:
        return None
    shape = draws.choice(scene.unique)
    return Turn(f"Where is the {shape.name}?", f"The {shape.name} is {position_in(scene, shape)}.", "where of many")


def _layout(draws: Draws, scene: Scene) -> Turn:
    wordings = (
        *("Where are the shapes?", "Describe where the shapes are."),
        "List the shapes and their positions.",
    )
    places = [f"{with_article(shape.name)} {position_in(scene, shape)}" for shape in scene.from_left]
    return Turn(draws.choice(wordings), capitalize(join_list(places)) + ".", "layout")


def _count_kind(draws: Draws, scene: Scene) -> Turn:
    position = draws.random()
    if position < 0.15:
        color = draws.choice([color for color in COLORS if color != scene.background])
        return number_of(f"{color} shape", sum(shape.color == color for shape in scene.shapes))
    if position < 0.22:
        name = draws.choice(scene.shapes).name
        return number_of(name, sum(shape.name == name for shape in scene.shapes))
    return how_many(draws, scene)


QUESTIONS: dict[str, Callable[[Draws, Scene], Turn | None]] = {
    "relative": _relative,
    "is left of": _is_left_of,
    "left or right": _left_or_right,
    "where of many": _where_unique,
    "layout": _layout,
    "how many": _count_kind,
}

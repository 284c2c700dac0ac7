"""Questions about one scene: what it shows, how many, which color, where, and how two shapes lie to each other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.demo_model.tasks.positions import (
    INVERSE,
    MIN_OFFSET,
    in_words,
    offsets_between,
    position_in,
    relation_answer,
    relation_between,
)
from tests.demo_model.world.draws import Draws, capitalize, join_list, with_article
from tests.demo_model.world.scenes import Scene, Shape
from tests.demo_model.world.words import COLORS, NUMBER_WORDS, SHAPES

MIN_LEAD = 8
"""Pixels by which the leftmost (or highest ...) shape must be ahead of the next."""
SIDES: dict[str, tuple[str, Callable[[Shape], float]]] = {
    "leftmost": ("on the left", lambda shape: shape.x),
    "rightmost": ("on the right", lambda shape: -shape.x),
    "highest": ("at the top", lambda shape: shape.y),
    "lowest": ("at the bottom", lambda shape: -shape.y),
}


@dataclass(frozen=True)
class Turn:
    """kind: key of QUESTIONS here or in dense_questions.py."""

    question: str
    answer: str
    kind: str


def ask(draws: Draws, scene: Scene, kind: str | None = None) -> Turn:
    """Return a question about a scene with its answer.

    Args:
        kind: None for any. A kind that has no clear answer in this scene is replaced by another.
    """
    if kind is None:
        kind = draws.choice(ONE_SHAPE_KINDS if len(scene.shapes) == 1 else MANY_SHAPES_KINDS)
    return QUESTIONS[kind](draws, scene)


def describe(shapes: Sequence[Shape], background: str) -> str:
    """Return the answer to what an image shows."""
    return f"The image shows {join_list([with_article(shape.name) for shape in shapes])} on a {background} background."


def count_answer(number: int, noun: str = "shape") -> str:
    """Return the answer to how many there are."""
    if number == 1:
        return f"There is one {noun}."
    return f"There are {NUMBER_WORDS[number] if number else 'no'} {noun}s."


def _what(draws: Draws, scene: Scene) -> Turn:
    wordings = (
        *("What is in the image?", "What do you see?", "Describe the image.", "What is in this picture?"),
        *("Describe this picture.", "What does the image show?"),
    )
    return Turn(draws.choice(wordings), describe(scene.from_left, scene.background), "what")


def _count(draws: Draws, scene: Scene) -> Turn:
    wordings = ("How many objects are there?", "How many shapes are in the image?", "Count the shapes.")
    return Turn(draws.choice(wordings), count_answer(len(scene.shapes)), "count")


def _background(draws: Draws, scene: Scene) -> Turn:
    question = draws.choice(["What color is the background?", "Which color is the background?"])
    return Turn(question, f"The background is {scene.background}.", "background")


def _color(draws: Draws, scene: Scene) -> Turn:
    shape = scene.shapes[0]
    wordings = ("What color is the {}?", "What color is the shape?", "Which color is the {}?", "What color is it?")
    return Turn(draws.choice(wordings).format(shape.kind), f"The {shape.kind} is {shape.color}.", "color")


def _kind(draws: Draws, scene: Scene) -> Turn:
    shape = scene.shapes[0]
    wordings = (
        *("What shape is it?", "Which shape is in the image?", "What shape do you see?"),
        f"What shape is the {shape.color} object?",
    )
    return Turn(draws.choice(wordings), f"It is {with_article(shape.kind)}.", "shape")


def _one_word(draws: Draws, scene: Scene) -> Turn:
    shape, noun = scene.shapes[0], "color" if draws.chance(0.5) else "shape"
    ask_it = "What color is the shape" if noun == "color" else "What shape is it"
    question = draws.choice([f"{ask_it}? Answer in one word.", f"Name the {noun} in one word."])
    return Turn(question, capitalize(shape.color if noun == "color" else shape.kind) + ".", "one word")


def _where(draws: Draws, scene: Scene) -> Turn:
    shape = scene.shapes[0]
    wordings = (f"Where is the {shape.kind}?", f"Where is the {shape.name}?", "Where is the shape?")
    return Turn(draws.choice(wordings), f"The {shape.kind} is {position_in(scene, shape)}.", "where")


def _is_there(draws: Draws, scene: Scene) -> Turn:
    shape = draws.choice(scene.shapes)
    color, kind = shape.color, shape.kind
    if not draws.chance(0.5):
        if draws.chance(0.5):
            color = draws.choice(list(COLORS))
        else:
            kind = draws.choice(SHAPES)
    noun = f"{with_article(color)} {kind}"
    question = draws.choice([f"Is there {noun}?", f"Do you see {noun}?"])
    if any((shape.color, shape.kind) == (color, kind) for shape in scene.shapes):
        return Turn(question, f"Yes, there is {noun}.", "is there")
    return Turn(question, f"No, there is no {color} {kind}.", "is there")


def _color_of(draws: Draws, scene: Scene) -> Turn:
    kinds = [shape.kind for shape in scene.shapes]
    single = [shape for shape in scene.shapes if kinds.count(shape.kind) == 1]
    if not single:
        return _count(draws, scene)
    shape = draws.choice(single)
    question = draws.choice([f"What color is the {shape.kind}?", f"Which color is the {shape.kind}?"])
    return Turn(question, f"The {shape.kind} is {shape.color}.", "color of")


def _shape_of(draws: Draws, scene: Scene) -> Turn:
    colors = [shape.color for shape in scene.shapes]
    single = [shape for shape in scene.shapes if colors.count(shape.color) == 1]
    if not single:
        return _count(draws, scene)
    shape = draws.choice(single)
    question = draws.choice([f"What shape is the {shape.color} object?", f"Which shape is {shape.color}?"])
    return Turn(question, f"The {shape.color} object is {with_article(shape.kind)}.", "shape of")


def how_many(draws: Draws, scene: Scene) -> Turn:
    """Ask how many shapes of one kind or color there are."""
    if draws.chance(0.5):
        noun = draws.choice(SHAPES) if draws.chance(0.3) else draws.choice(scene.shapes).kind
        number = sum(shape.kind == noun for shape in scene.shapes)
    else:
        color = draws.choice(scene.shapes).color
        noun, number = f"{color} shape", sum(shape.color == color for shape in scene.shapes)
    return number_of(noun, number)


def number_of(noun: str, number: int) -> Turn:
    """Return the question how many there are of something, with its answer."""
    return Turn(f"How many {noun}s are there?", count_answer(number, noun), "how many")


def _extreme(draws: Draws, scene: Scene) -> Turn:
    kind = draws.choice(list(SIDES))
    side, rank = SIDES[kind]
    first, second, *_ = sorted(scene.shapes, key=rank)
    if abs(rank(first) - rank(second)) < MIN_LEAD:
        return _what(draws, scene)
    question = draws.choice([f"Which shape is the {kind} one?", f"What is {side}?"])
    return Turn(question, f"The {first.name} is {side}.", "extreme")


def _relative(draws: Draws, scene: Scene) -> Turn:
    one, other = draws.sample(scene.shapes, 2)
    if one.name == other.name:
        return _count(draws, scene)
    if max(offsets_between(one, other)) < MIN_OFFSET:
        return _what(draws, scene)
    return Turn(f"Where is the {one.name} relative to the {other.name}?", relation_answer(one, other), "relative")


def _is_left_of(draws: Draws, scene: Scene) -> Turn:
    one, other = draws.sample(scene.shapes, 2)
    if one.name == other.name:
        return _count(draws, scene)
    if max(offsets_between(one, other)) < MIN_OFFSET:
        return _what(draws, scene)
    return ask_relation(draws, one, other)


def ask_relation(draws: Draws, one: Shape, other: Shape) -> Turn:
    """Ask whether one shape lies to another as it does, or the other way round."""
    relation = relation_between(one, other)
    asked = relation if draws.chance(0.5) else INVERSE[relation]
    answer = relation_answer(one, other)
    question = f"Is the {one.name} {in_words(asked)} the {other.name}?"
    return Turn(question, f"{'Yes' if asked == relation else 'No'}, t{answer[1:]}", "is left of")


QUESTIONS: dict[str, Callable[[Draws, Scene], Turn]] = {
    "what": _what,
    "count": _count,
    "background": _background,
    "color": _color,
    "shape": _kind,
    "one word": _one_word,
    "where": _where,
    "is there": _is_there,
    "color of": _color_of,
    "shape of": _shape_of,
    "how many": how_many,
    "extreme": _extreme,
    "relative": _relative,
    "is left of": _is_left_of,
}
ANY_KINDS = ["what", "what", "count", "background"]
ONE_SHAPE_KINDS = [*ANY_KINDS, "color", "shape", "color", "shape", "where", "is there", "one word"]
MANY_SHAPES_KINDS = [
    *ANY_KINDS,
    *("color of", "how many", "relative", "relative", "is there", "is left of", "extreme", "shape of"),
]

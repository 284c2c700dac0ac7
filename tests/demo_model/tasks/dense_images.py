"""Conversations of the later image stages: several questions per scene, and wordings that the first stages lacked."""

from collections.abc import Sequence

from tests.demo_model.tasks.dense_questions import QUESTIONS, ask_dense
from tests.demo_model.tasks.image_questions import Turn, ask, count_answer, describe
from tests.demo_model.tasks.images import SYSTEM_PROMPTS, images, number, number_sample, turns_sample
from tests.demo_model.tasks.sample import Sample, system
from tests.demo_model.world.draws import Draws
from tests.demo_model.world.numbers import draw_varied_number
from tests.demo_model.world.scenes import Scene, draw_varied_scene

KIND_WEIGHTS = {
    "relative": 4.0,
    "is left of": 3.0,
    "how many": 3.5,
    "what": 1.6,
    "extreme": 1.6,
    "count": 0.8,
    "color of": 0.7,
    "shape of": 0.7,
    "is there": 0.8,
    "background": 0.3,
    "where of many": 1.6,
    "layout": 0.9,
    "left or right": 0.9,
}
LAST_KINDS = ("what", "layout")
"""Their answers would give away those of further questions."""
ONE_SHAPE_KINDS = ["what", "color", "shape", "one word", "is there", "count", "background"]

COUNT_WORDINGS = (
    *["How many shapes are there?"] * 4,
    *("How many shapes do you see?", "How many shapes are in the picture?", "How many objects are in the image?"),
    *("How many objects do you see?", "How many objects are there?", "Count the shapes."),
)
WHAT_WORDINGS = (
    *("What can you see in this image?", "What is shown here?", "Describe what you see."),
    *("What shapes are in the image?", "Which shapes are in the image?", "What is in the image?"),
)
MORE_WHAT_WORDINGS = (
    *("What can you see in this image?", "What is shown here?", *["Describe what you see."] * 3),
    *(*["What shapes are in the image?"] * 3, "Which shapes are in the image?", "What is in the image?"),
    *("Describe this image.", "What is in this image?", "What shapes do you see?"),
)


def dense_images(draws: Draws) -> Sample:
    """Ask about images of any kind, mostly about several shapes."""
    position = draws.random()
    if position < 0.58:
        return many_shapes(draws)
    if position < 0.74:
        return varied_number(draws)
    return one_shape(draws) if position < 0.86 else images(draws)


def many_shapes(draws: Draws) -> Sample:
    """Ask one to four questions about two to four shapes."""
    scene = draw_varied_scene(draws, draws.choice([2, 2, 3, 3, 3, 4, 4]))
    if len(scene.shapes) < 2:
        return one_shape(draws)
    messages = [system(draws.choice(SYSTEM_PROMPTS))] if draws.chance(0.06) else []
    count, turns = draws.choice([1, 1, 1, 2, 2, 3, 4]), []
    for _ in range(30):
        if len(turns) >= count:
            break
        turn = _next_turn(draws, scene, turns, is_last=len(turns) == count - 1)
        if turn is not None:
            turns.append(turn)
    return turns_sample(draws, scene, turns or [ask(draws, scene, "what")], messages)


def _next_turn(draws: Draws, scene: Scene, turns: Sequence[Turn], is_last: bool) -> Turn | None:
    kind = draws.choices(list(KIND_WEIGHTS), list(KIND_WEIGHTS.values()))[0]
    if kind in LAST_KINDS and not is_last:
        return None
    turn = ask_dense(draws, scene, kind)
    if turn is None or turn.answer in [other.answer for other in turns]:
        return None
    return None if turn.kind in LAST_KINDS and not is_last else turn


def one_shape(draws: Draws) -> Sample:
    """Ask one to three questions about one shape, often where it is."""
    scene = draw_varied_scene(draws, 1)
    count = draws.choice([1, 1, 2, 3])
    kinds = ["where"] * (3 if draws.chance(0.7) else 0) + ONE_SHAPE_KINDS
    draws.shuffle(kinds)
    chosen = list(dict.fromkeys(kinds))[:count]
    return turns_sample(draws, scene, (ask(draws, scene, kind) for kind in chosen))


def varied_number(draws: Draws) -> Sample:
    """Ask for a number in an image of any size."""
    return number(draws) if draws.chance(0.45) else number_sample(draws, *draw_varied_number(draws))


def dense_question_of_kind(draws: Draws, kind: str) -> Sample:
    """Ask one question of dense_questions.py about two to four shapes."""
    while True:
        scene = draw_varied_scene(draws, draws.choice([2, 3, 4]))
        turn = QUESTIONS[kind](draws, scene) if len(scene.shapes) > 1 else None
        if turn is not None and turn.kind == kind:
            return turns_sample(draws, scene, [turn])


def counting_wordings(draws: Draws) -> Sample:
    """Ask how many shapes there are in many wordings, next to how many of one kind or color there are."""
    scene = draw_varied_scene(draws, draws.choice([1, 1, 2, 3, 4]))
    turns = [_count_turn(draws, scene)]
    kind = draws.random()
    if kind < 0.55:
        turns += _how_many_turn(draws, scene)
    elif kind < 0.75:
        turns.append(_what_turn(draws, scene, WHAT_WORDINGS))
    else:
        turns += _color_turn(draws, scene)
    draws.shuffle(turns)
    return turns_sample(draws, scene, turns)


def describing_wordings(draws: Draws) -> Sample:
    """Ask what an image shows in many wordings, next to how many shapes there are."""
    scene = draw_varied_scene(draws, draws.choice([1, 1, 2, 3, 4]))
    turns = [_count_turn(draws, scene)]
    kind = draws.random()
    if kind < 0.25:
        turns += _how_many_turn(draws, scene)
    elif kind < 0.88:
        turns.append(_what_turn(draws, scene, MORE_WHAT_WORDINGS))
    else:
        turns += _color_turn(draws, scene)
    draws.shuffle(turns)
    return turns_sample(draws, scene, turns[: draws.choice([1, 1, 2])])


def _count_turn(draws: Draws, scene: Scene) -> Turn:
    return Turn(draws.choice(COUNT_WORDINGS), count_answer(len(scene.shapes)), "count")


def _how_many_turn(draws: Draws, scene: Scene) -> list[Turn]:
    turn = ask_dense(draws, scene, "how many")
    return [] if turn is None else [turn]


def _what_turn(draws: Draws, scene: Scene, wordings: Sequence[str]) -> Turn:
    return Turn(draws.choice(wordings), describe(scene.from_left, scene.background), "what")


def _color_turn(draws: Draws, scene: Scene) -> list[Turn]:
    """Return a question about the color of a single shape; none with several shapes."""
    if len(scene.shapes) > 1:
        return []
    shape = scene.shapes[0]
    wordings = ("What is the color of the {}?", "What colour is the shape?", "What colour is the {}?")
    question = draws.choice(wordings).format(shape.kind)
    return [Turn(question, f"The {shape.kind} is {shape.color}.", "color")]

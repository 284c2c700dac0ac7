"""Conversations about images: one scene, several images, numbers, plain colors, and short videos."""

from collections.abc import Iterable, Sequence
from typing import Any

from PIL import Image, ImageDraw

from tests.demo_model.tasks.image_questions import Turn, ask, count_answer, describe
from tests.demo_model.tasks.sample import Message, Sample, assistant, exchange, system, user
from tests.demo_model.world.draws import Draws, with_article
from tests.demo_model.world.numbers import draw_number
from tests.demo_model.world.scenes import ALL_COLORS, Scene, Shape, draw_scene, draw_shape, vary
from tests.demo_model.world.words import BACKGROUNDS, COLORS, SHAPES

SYSTEM_PROMPTS = ("You are a helpful assistant.", "You look at pictures.", "Answer questions about images.")
NUMBER_QUESTIONS = (
    *("What number is in the image?", "Read the number.", "Which number do you see?", "What number is this?"),
    *("Read the number in the image.", "What does it say?"),
)
WHICH = ("first", "second")
VIDEO_PLACEHOLDER = "<|vision_start|><|video_pad|><|vision_end|>"
MOVES = {
    "rest": "does not move",
    "right": "moves to the right",
    "left": "moves to the left",
    "up": "moves up",
    "down": "moves down",
}


def images(draws: Draws) -> Sample:
    """Ask about images of any kind."""
    position = draws.random()
    if position < 0.03:
        return plain_color(draws)
    if position < 0.07:
        return video(draws)
    position = (position - 0.07) / 0.93
    if position < 0.24:
        return number(draws)
    if position < 0.39:
        return two_images(draws)
    return scene_questions(draws)


def user_with_images(draws: Draws, text: str, num_images: int = 1) -> Message:
    """Return a message of the user with images, mostly in front of the text."""
    parts: list[dict[str, Any]] = [{"type": "image"} for _ in range(num_images)]
    words = {"type": "text", "text": text}
    return user([*parts, words] if draws.chance(0.8) else [words, *parts])


def turns_sample(draws: Draws, scene: Scene, turns: Iterable[Turn], messages: Sequence[Message] = ()) -> Sample:
    """Return a conversation about one image, which comes with the first question. messages: in front of it."""
    conversation = list(messages)
    for index, turn in enumerate(turns):
        question = user(turn.question) if index else user_with_images(draws, turn.question)
        conversation += [question, assistant(turn.answer)]
    task = "image_single" if len(scene.shapes) == 1 else "image_multi"
    return Sample(conversation, task, images=(scene.image,))


def question_of_kind(draws: Draws, kind: str, num_shapes: int) -> Sample:
    """Ask one question of this kind about a scene with up to so many shapes."""
    scene = draw_scene(draws, num_shapes)
    while num_shapes > 1 and len(scene.shapes) == 1:
        scene = draw_scene(draws, num_shapes)
    return turns_sample(draws, scene, [ask(draws, scene, kind)])


def scene_questions(draws: Draws) -> Sample:
    """Ask one to three questions about one to four shapes."""
    scene = draw_scene(draws)
    messages = [system(draws.choice(SYSTEM_PROMPTS))] if draws.chance(0.1) else []
    first = ask(draws, scene)
    messages += [user_with_images(draws, first.question), assistant(first.answer)]
    if draws.chance(0.35):
        for _ in range(draws.randint(1, 2)):
            turn = ask(draws, scene)
            messages += exchange(turn.question, turn.answer)
    return Sample(messages, "image_single" if len(scene.shapes) == 1 else "image_multi", images=(scene.image,))


def number(draws: Draws) -> Sample:
    """Ask for a number in an image."""
    return number_sample(draws, *draw_number(draws))


def number_sample(draws: Draws, image: Image.Image, digits: str) -> Sample:
    """Return the question for the number in this image."""
    message = user_with_images(draws, draws.choice(NUMBER_QUESTIONS))
    return Sample([message, assistant(f"The number is {digits}.")], "image_number", images=(image,))


def plain_color(draws: Draws) -> Sample:
    """Ask about an image without shapes."""
    name = draws.choice([*BACKGROUNDS, *COLORS])
    color = vary(draws, ALL_COLORS[name])
    if draws.chance(0.5):
        width, height = draws.randint(64, 256), draws.randint(64, 256)
    else:
        width = height = draws.choice([64, 128, 224, 256])
    plain = f"The image is plain {name}."
    question, answer = draws.choice(
        [
            ("What is in the image?", plain),
            ("What do you see?", plain),
            ("What color is this?", plain),
            ("Describe the image.", plain),
            ("How many shapes are in the image?", "There are no shapes."),
            ("What color is the background?", f"The background is {name}."),
            ("Describe this picture.", plain),
        ]
    )
    message = user_with_images(draws, question)
    return Sample([message, assistant(answer)], "image_plain", images=(Image.new("RGB", (width, height), color),))


def two_images(draws: Draws) -> Sample:
    """Ask about two images: colors and shapes compared, both described, shapes counted, or numbers."""
    kind = draws.randrange(4)
    if kind == 3:
        return _one_of_two_numbers(draws)
    if kind == 2:
        first_count, second_count = draws.randint(1, 3), draws.randint(1, 3)
        return _counted(draws, draw_scene(draws, first_count), draw_scene(draws, second_count))
    if kind == 0:
        color = draws.choice(list(COLORS))
        first = draw_scene(draws, 1, color if draws.chance(0.5) else None)
        second = draw_scene(draws, 1, color if draws.chance(0.5) else None)
        return _two_images_sample(draws, *_comparison(draws, first, second), first.image, second.image)
    first, second = draw_scene(draws, 1), draw_scene(draws, 1)
    asked = _comparison(draws, first, second) if draws.chance(0.5) else _both_described(draws, first, second)
    if draws.chance(0.3):
        return _in_two_turns(draws, first, second)
    return _two_images_sample(draws, *asked, first.image, second.image)


def _two_images_sample(draws: Draws, question: str, answer: str, *pair: Image.Image) -> Sample:
    return Sample([user_with_images(draws, question, 2), assistant(answer)], "image_two", images=pair)


def _one_of_two_numbers(draws: Draws) -> Sample:
    numbers = draw_number(draws), draw_number(draws)
    index = draws.randrange(2)
    question, answer = f"What number is in the {WHICH[index]} image?", f"The number is {numbers[index][1]}."
    return _two_images_sample(draws, question, answer, *(image for image, _ in numbers))


def _comparison(draws: Draws, first: Scene, second: Scene) -> tuple[str, str]:
    one, other = first.shapes[0], second.shapes[0]
    if draws.randrange(2) == 0:
        noun, same, left, right = "color", one.color, one.color, other.color
    else:
        noun, same, left, right = "shape", f"{one.kind}s", with_article(one.kind), with_article(other.kind)
    question = draws.choice([f"Do both images show the same {noun}?", f"Is the {noun} the same in both images?"])
    if left == right:
        return question, f"Yes, both are {same}."
    return question, f"No, the first is {left} and the second is {right}."


def _both_described(draws: Draws, first: Scene, second: Scene) -> tuple[str, str]:
    question = draws.choice(["Compare the two images.", "What is in each image?", "Describe both images."])
    one, other = with_article(first.shapes[0].name), with_article(second.shapes[0].name)
    return question, f"The first image shows {one} and the second image shows {other}."


def _in_two_turns(draws: Draws, first: Scene, second: Scene) -> Sample:
    messages = [
        user_with_images(draws, "What is in the image?"),
        assistant(describe(first.shapes, first.background)),
        user([{"type": "image"}, {"type": "text", "text": "And in this one?"}]),
        assistant(describe(second.shapes, second.background)),
    ]
    return Sample(messages, "image_two", images=(first.image, second.image))


def _counted(draws: Draws, first: Scene, second: Scene) -> Sample:
    counts = len(first.shapes), len(second.shapes)
    if draws.chance(0.6):
        question, answer = "Which image has more shapes?", "Both have the same number of shapes."
        if counts[0] != counts[1]:
            answer = f"The {WHICH[0 if counts[0] > counts[1] else 1]} image has more shapes."
    else:
        index = draws.randrange(2)
        question, answer = f"How many shapes are in the {WHICH[index]} image?", count_answer(counts[index])
    return _two_images_sample(draws, question, answer, first.image, second.image)


def video(draws: Draws) -> Sample:
    """Ask about two to four frames in which a shape rests or moves. A frame stands for two alike."""
    choice = draws.choice
    side, num_frames = choice([96, 128, 160]), draws.randint(2, 4)
    color, kind = choice(list(COLORS)), choice(SHAPES)
    background = choice([name for name in [*BACKGROUNDS, "white", "black"] if name != color])
    move = choice(list(MOVES))
    path = _path(draws, side, num_frames, move)
    fill = vary(draws, COLORS[color])
    frames = []
    for x, y, radius in path:
        frames.append(Image.new("RGB", (side, side), ALL_COLORS[background]))
        draw_shape(ImageDraw.Draw(frames[-1]), Shape(color, kind, x, y, radius), fill, None)
    moving = f"The {kind} {MOVES[move]}."
    shown = f"The video shows {with_article(color)} {kind} on a {background} background."
    question, answer = choice(
        [
            ("What is in the video?", shown),
            ("Describe the video.", f"{shown} {moving}"),
            (f"Which way does the {kind} move?", moving),
            (f"What color is the {kind}?", f"The {kind} is {color}."),
            ("What happens in the video?", moving),
            ("What do you see?", shown),
        ]
    )
    step_s = choice([0.5, 1.0, 1.0, 1.0, 2.0])
    times_s = [step_s / 4 + index * step_s for index in range(num_frames)]
    placeholders = "".join(f"<{time_s:.1f} seconds>{VIDEO_PLACEHOLDER}" for time_s in times_s)
    content = [{"type": "text", "text": placeholders}, {"type": "text", "text": question}]
    return Sample([user(content), assistant(answer)], "video", images=tuple(frames))


def _path(draws: Draws, side: int, num_frames: int, move: str) -> list[tuple[float, float, float]]:
    """Center and radius of the shape in each frame."""
    radius = side * draws.uniform(0.14, 0.22)
    low, high = radius + 2, side - radius - 2
    fixed = draws.uniform(low, high)
    start, end = low + (high - low) * draws.uniform(0, 0.2), high - (high - low) * draws.uniform(0, 0.2)
    if move in ("left", "up"):
        start, end = end, start
    path = []
    for index in range(num_frames):
        along = fixed if move == "rest" else start + (end - start) * index / (num_frames - 1)
        path.append((fixed, along, radius) if move in ("up", "down") else (along, fixed, radius))
    return path

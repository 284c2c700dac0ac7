"""Thinking switched on where nothing has to be worked out: the thought restates what is asked for."""

from dataclasses import replace

from tests.demo_model.tasks.chat import chat
from tests.demo_model.tasks.images import images
from tests.demo_model.tasks.json_objects import json_object
from tests.demo_model.tasks.reasoning import list_operations, sums
from tests.demo_model.tasks.retrieval import retrieval
from tests.demo_model.tasks.sample import Message, Sample, assistant, exchange, system, user
from tests.demo_model.tasks.tool_calls import tool_calls
from tests.demo_model.world.draws import Draws
from tests.demo_model.world.knowledge import known_answer
from tests.demo_model.world.small_talk import open_request, small_talk, system_text

TASKS = (
    (chat, 0.52),
    (images, 0.12),
    (retrieval, 0.10),
    (json_object, 0.06),
    (sums, 0.08),
    (list_operations, 0.06),
    (tool_calls, 0.06),
)
TEXT_LENGTHS = (60, 150, 250)
MAX_QUOTED = 80
"""Characters of a question in a thought."""


def thinking_about_facts(draws: Draws) -> Sample:
    """Think about a question that is known by heart."""
    known = known_answer(draws)
    return Sample([user(known.question), assistant(known.answer, _quote(known.question))], "think_plain")


def thinking_in_conversation(draws: Draws) -> Sample:
    """Think about small talk, a declined request or a simple fact."""
    kind = draws.random()
    messages = [system(system_text(draws))] if draws.chance(0.3) else []
    if draws.chance(0.2):
        messages += exchange(*small_talk(draws))
    if kind < 0.6:
        question, answer = small_talk(draws)
    elif kind < 0.8:
        question, answer = open_request(draws)
    else:
        known = known_answer(draws)
        question, answer = known.question, known.answer
    thought = _quote(_last_line(question))
    return Sample([*messages, user(question), assistant(answer, thought)], "think_small")


def thinking(draws: Draws) -> Sample:
    """Think about any task."""
    tasks, weights = zip(*TASKS, strict=True)
    task = draws.choices(tasks, weights)[0]
    if task is retrieval:
        sample = retrieval(draws, draws.choice(TEXT_LENGTHS))
    elif task in (sums, list_operations):
        sample = task(draws, True)
    else:
        sample = task(draws)
    answer = sample.messages[-1]
    if sample.thinking or not (answer["content"] or answer.get("tool_calls")):
        return sample
    return _with_thought(sample)


def _with_thought(sample: Sample) -> Sample:
    *before, answer = sample.messages
    return replace(sample, messages=[*before, {**answer, "reasoning_content": _thought(sample, before, answer)}])


def _thought(sample: Sample, before: list[Message], answer: Message) -> str:
    if sample.task == "json":
        return "The user wants JSON."
    asked = next(message for message in reversed(before) if message["role"] in ("user", "tool"))
    if asked["role"] == "tool":
        return "I have the result."
    if calls := answer.get("tool_calls"):
        return "I need " + " and ".join(call["function"]["name"] for call in calls) + "."
    if sample.task == "retrieval":
        return _quote("find it in the text")
    return _quote(_last_line(_plain_text(asked["content"])))


def _plain_text(content: str | list[dict[str, str]]) -> str:
    """Without the placeholders of images and videos."""
    if isinstance(content, str):
        return content
    text = " ".join(part["text"] for part in content if part["type"] == "text")
    return text.split("<|vision_end|>")[-1]


def _last_line(text: str) -> str:
    return text.strip().split("\n")[-1].strip()[:MAX_QUOTED].strip()


def _quote(question: str) -> str:
    return f"The user asks: {question}"

"""Sample: one conversation to learn from, and its text as the model's own chat template renders it."""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from PIL import Image

from engine.demo import DEMO_MODEL

END_OF_TURN = "<|im_end|>"

Message = dict[str, Any]
"""As in a chat completion; the arguments of tool calls are objects."""


@dataclass(frozen=True)
class Sample:
    """The last message is the answer that is asked for; the answers before it are learned as well."""

    messages: list[Message]
    task: str  # name under which the evaluation counts it
    tools: list[dict[str, Any]] | None = None
    images: tuple[Image.Image, ...] = ()  # in the order of their placeholders
    value: str = ""  # the part of the last answer that a question about a text asks for

    @property
    def thinking(self) -> bool:
        """Return whether the last answer begins with a thought."""
        return "reasoning_content" in self.messages[-1]

    @property
    def answer(self) -> str:
        """Return the content of the last answer."""
        return self.messages[-1]["content"]


@dataclass(frozen=True)
class Segment:
    """A part of a rendered conversation."""

    text: str
    is_answer: bool  # what the model writes itself


def system(text: str) -> Message:
    """Return a system message."""
    return {"role": "system", "content": text}


def user(content: str | list[dict[str, Any]]) -> Message:
    """Return a message of the user."""
    return {"role": "user", "content": content}


def assistant(text: str, thought: str | None = None) -> Message:
    """Return an answer, with what the model thinks in front of it."""
    thoughts = {} if thought is None else {"reasoning_content": thought}
    return {"role": "assistant", "content": text, **thoughts}


def exchange(question: str, answer: str) -> list[Message]:
    """Return a question and its answer."""
    return [user(question), assistant(answer)]


def segments(sample: Sample) -> list[Segment]:
    """Return the text of the conversation, cut at the borders of the answers.

    An answer ends with the end of its turn. An answer's prompt ends with an open thought, or an empty one: each turn's
    prompt begins with the text of all turns before it.
    """
    parts, done = [], ""
    for index, message in enumerate(sample.messages):
        if message["role"] != "assistant":
            continue
        thinking = "reasoning_content" in message
        prompt = _render(sample.messages[:index], sample.tools, add_generation_prompt=True, enable_thinking=thinking)
        whole = _render(sample.messages[: index + 1], sample.tools).removesuffix("\n")
        assert prompt.startswith(done) and whole.startswith(prompt), "the template does not extend the last turn"
        parts += [Segment(prompt[len(done) :], False), Segment(whole[len(prompt) :], True)]
        done = whole
    return [*parts, Segment("\n", False)]


def prompt_and_answer(sample: Sample) -> tuple[str, str]:
    """Return the prompt of the last answer, and that answer with its thought and the end of the turn."""
    *before, answer, _ = segments(sample)
    return "".join(part.text for part in before), answer.text


def _render(messages: list[Message], tools: list[dict[str, Any]] | None, **options: bool) -> str:
    return _template().render(messages=messages, tools=tools, **options)


@cache
def _template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string((DEMO_MODEL / "chat_template.jinja").read_text())

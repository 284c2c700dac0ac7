"""Prompts of the demo model's world by task, held out: the generators that it was trained on, with seeds of our own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import EngineRequest, SamplingParams
from tests.demo_model.tasks.json_objects import json_object
from tests.demo_model.tasks.retrieval import retrieval
from tests.demo_model.tasks.sample import END_OF_TURN, Sample, exchange, prompt_and_answer
from tests.demo_model.tasks.tool_calls import tool_calls
from tests.demo_model.world.draws import Draws, with_article
from tests.demo_model.world.prose import filler, fixed_story
from tests.demo_model.world.words import ANIMALS


@dataclass(frozen=True)
class Task:
    """answer_tokens: how many tokens of an answer a benchmark measures; few answers of the task are shorter by much."""

    answer_tokens: int
    generate: Callable[[Draws], Sample | str]  # a conversation, or a text to go on with
    temperature: float = 0.0


@dataclass(frozen=True)
class Prompt:
    """token_ids: int32 [num_prompt_tokens]."""

    token_ids: np.ndarray
    temperature: float
    seed: int


def prompts(task: Task, count: int, tokenizer: ChatTokenizer, seed: str, min_answer_tokens: int = 1) -> list[Prompt]:
    """Equal arguments give equal prompts, all different. Only those whose right answer has so many tokens."""
    draws = Draws(f"held out {seed}")
    found: dict[bytes, Prompt] = {}
    while len(found) < count:
        sample = task.generate(draws)
        if _num_answer_tokens(sample, tokenizer) >= min_answer_tokens:
            token_ids = _encode(sample, tokenizer)
            found.setdefault(token_ids.tobytes(), Prompt(token_ids, task.temperature, draws.getrandbits(64)))
    return list(found.values())


def _num_answer_tokens(sample: Sample | str, tokenizer: ChatTokenizer) -> float:
    """Without the stop token; a text could go on for ever."""
    if isinstance(sample, str):
        return float("inf")
    _, answer = prompt_and_answer(sample)
    return len(tokenizer.encode_text(answer.removesuffix(END_OF_TURN)))


def _encode(sample: Sample | str, tokenizer: ChatTokenizer) -> np.ndarray:
    if isinstance(sample, str):
        return tokenizer.encode_text(sample)
    kwargs: dict[str, Any] = {"enable_thinking": sample.thinking}
    if sample.tools:
        kwargs["tools"] = sample.tools
    return tokenizer.encode_chat(sample.messages[:-1], template_kwargs=kwargs)


def _story(draws: Draws) -> Sample:
    """One of those that the model has by heart."""
    animal = draws.choice(ANIMALS)
    return Sample(exchange(f"Tell me a story about {with_article(animal)}.", fixed_story(animal)), "chat_story")


def _needle(num_tokens: int) -> Callable[[Draws], Sample]:
    """A fact in a text, or one of several. The generator's texts are a tenth too short."""
    return lambda draws: retrieval(draws, 0.9 * num_tokens, single=True)


def _tool_call(draws: Draws) -> Sample:
    while (sample := tool_calls(draws)).task not in ("tool_call", "tool_parallel"):
        pass
    return sample


def _sentences(draws: Draws) -> str:
    """They have nothing to do with each other: there is always something to choose."""
    return " ".join(filler(draws) for _ in range(4))


TASKS = {
    "stories": Task(64, _story),
    "needles": Task(12, _needle(512)),
    "tools": Task(40, _tool_call),
    "json": Task(24, json_object),
    "sampled": Task(48, _sentences, temperature=1.0),
}
"""The tasks that benchmarks measure."""

RETRIEVAL = Task(8, _needle(333))
"""Needles in texts as short as those in which drafts were first measured (tests/engine/worker/test_mtp.py)."""

QUESTIONS = Task(12, retrieval)
"""Several questions about such a text, some of them two at once: answers of up to 50 tokens."""

BEHIND = 4
"""So many tokens of the right answer are left when a row has ended: the last step may give as many too many."""


def requests(name: str, count: int, tokenizer: ChatTokenizer, num_tokens: int | None) -> list[EngineRequest]:
    """Return requests of one of TASKS, without stop tokens: each generates num_tokens; None: as many as the task
    says."""
    task = TASKS[name]
    num_tokens = num_tokens or task.answer_tokens
    chosen = prompts(task, count, tokenizer, "bench", min(num_tokens, task.answer_tokens) + BEHIND)
    return [
        EngineRequest(f"{name} {i}", p.token_ids, SamplingParams(num_tokens, p.temperature, seed=p.seed), ())
        for i, p in enumerate(chosen)
    ]

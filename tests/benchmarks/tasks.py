"""Prompts of the demo model's world by task, held out: the generators that it was trained on, with seeds of our own."""

import importlib
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import engine
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import EngineRequest, SamplingParams

RECIPE = Path(engine.__path__[0]) / "demo_model" / "recipe"
RECIPE_MODULES = ("data", "world")

Sample = dict[str, Any] | str
"""A sample of the recipe: messages, the last of which is the answer, tools, think, task. Or a text to go on with."""


@dataclass(frozen=True)
class Task:
    """answer_tokens: how many tokens of an answer a benchmark measures; few answers of the task are shorter by much."""

    answer_tokens: int
    generate: Callable[[random.Random], Sample]
    temperature: float = 0.0


@dataclass(frozen=True)
class Prompt:
    """token_ids: int32 [num_prompt_tokens]."""

    token_ids: np.ndarray
    temperature: float
    seed: int


@cache
def recipe() -> Any:
    """The recipe's `data.py`. Its folder is no package, and its modules have names that nobody else shall see."""
    sys.path.insert(0, str(RECIPE))
    try:
        return importlib.import_module("data")
    finally:
        sys.path.remove(str(RECIPE))
        for name in RECIPE_MODULES:
            sys.modules.pop(name, None)


def prompts(task: Task, count: int, tokenizer: ChatTokenizer, seed: str, min_answer_tokens: int = 1) -> list[Prompt]:
    """Equal arguments give equal prompts, all different. Only those whose right answer has so many tokens."""
    rng = random.Random(f"held out {seed}")
    found: dict[bytes, Prompt] = {}
    while len(found) < count:
        sample = task.generate(rng)
        if _num_answer_tokens(sample, tokenizer) >= min_answer_tokens:
            token_ids = _encode(sample, tokenizer)
            found.setdefault(token_ids.tobytes(), Prompt(token_ids, task.temperature, rng.getrandbits(64)))
    return list(found.values())


def _num_answer_tokens(sample: Sample, tokenizer: ChatTokenizer) -> float:
    """Without the stop token; a text could go on for ever."""
    if isinstance(sample, str):
        return float("inf")
    _, answer = recipe().prompt_text(sample)
    return len(tokenizer.encode_text(answer.removesuffix(recipe().IM_E)))


def _encode(sample: Sample, tokenizer: ChatTokenizer) -> np.ndarray:
    if isinstance(sample, str):
        return tokenizer.encode_text(sample)
    kwargs: dict[str, Any] = {"enable_thinking": sample["think"]}
    if sample["tools"]:
        kwargs["tools"] = sample["tools"]
    return tokenizer.encode_chat(sample["messages"][:-1], template_kwargs=kwargs)


def _story(rng: random.Random) -> Sample:
    """One of those that the model has by heart."""
    animal, data = rng.choice(recipe().ANIMALS), recipe()
    question = f"Tell me a story about {data.art(animal)}."
    return data.S([data.U(question), data.A(data.fixed_story(animal))], "chat_story")


def _needle(num_tokens: int) -> Callable[[random.Random], Sample]:
    """A fact in a text, or one of several. The recipe counts its fillers a tenth too short."""
    return lambda rng: recipe().retrieval(rng, 0.9 * num_tokens, single=True)


def _tool_call(rng: random.Random) -> Sample:
    while (sample := recipe().tools_task(rng))["task"] not in ("tool_call", "tool_parallel"):
        pass
    return sample


def _sentences(rng: random.Random) -> Sample:
    """They have nothing to do with each other: there is always something to choose."""
    return " ".join(recipe().filler(rng) for _ in range(4))


TASKS = {
    "stories": Task(64, _story),
    "needles": Task(12, _needle(512)),
    "tools": Task(40, _tool_call),
    "json": Task(24, lambda rng: recipe().json_task(rng)),
    "sampled": Task(48, _sentences, temperature=1.0),
}
"""What benchmarks measure."""

RETRIEVAL = Task(8, _needle(333))
"""Needles in texts as short as those of the recipe's own measurements (`e4.py`)."""

QUESTIONS = Task(12, lambda rng: recipe().retrieval(rng, 300))
"""Several questions about such a text, some of them two at once: answers of up to 50 tokens."""

BEHIND = 4
"""So many tokens of the right answer are left when a row has ended: the last step may give as many too many."""


def requests(name: str, count: int, tokenizer: ChatTokenizer, num_tokens: int | None) -> list[EngineRequest]:
    """Of one of TASKS, without stop tokens: each gives num_tokens, None for those of the task."""
    task = TASKS[name]
    num_tokens = num_tokens or task.answer_tokens
    chosen = prompts(task, count, tokenizer, "bench", min(num_tokens, task.answer_tokens) + BEHIND)
    return [
        EngineRequest(f"{name} {i}", p.token_ids, SamplingParams(num_tokens, p.temperature, seed=p.seed), ())
        for i, p in enumerate(chosen)
    ]

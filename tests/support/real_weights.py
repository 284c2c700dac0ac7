"""Real checkpoints and real texts, and the greedy answers that mlx-lm generates for them with its own caches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
from mlx_lm import load
from mlx_lm.convert import convert
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model

from engine.config import EngineConfig
from engine.process_lock import ProcessLock
from engine.protocol import Boundary, EngineRequest, SamplingParams
from engine.worker.model_runner import MLXRunner, load_runner
from tests.support import smollm2
from tests.support.driver import Driver

ROOT = Path(__file__).parents[2]
TIE = 1e-4
"""Largest difference of the logprobs of the two best tokens at which either of them is right: rounding of float32."""
PIECE = 256
"""Tokens of a text that one forward of the library computes."""
LOCK_TIMEOUT_S = 900.0
NO_CACHE: dict[str, Any] = {"prefix_cache": {"enabled": False}}

DOCUMENTS = ("README.md", "engine/README.md", "deployments/README.md", "engine/FAST_PATHS.md")
SOURCES = ("engine/async_engine.py", "engine/core/scheduler.py", "engine/worker/prefill.py", "deployments/ingress.py")
QUESTION = "Summarize the following text in a few sentences.\n\n"


@dataclass(frozen=True)
class Place:
    """One token of a greedy answer, and the token that was second best there."""

    token: int
    second: int
    margin: float
    """Difference of their logprobs."""


GreedyAnswer = Callable[[Sequence[int], int], list[Place]]
"""Returns the greedy answer of so many tokens to a prompt."""


class Library:
    """A checkpoint in mlx-lm.

    Args:
        path: The checkpoint.
        expand: Expand quantized weights, with mlx-lm's own function.
    """

    def __init__(self, path: Path, expand: bool = False):
        loaded: Any = load(str(path))
        self.model, self.tokenizer = loaded[0], loaded[1]
        if expand:
            self.model = dequantize_model(self.model)
        self._answers: dict[tuple[int, ...], list[Place]] = {}

    def answer(self, token_ids: Sequence[int], num_tokens: int) -> list[Place]:
        """Return the greedy answer to a prompt by `generate_step`, which does not end at stop tokens."""
        key = tuple(token_ids)
        known = self._answers.get(key, [])
        if len(known) < num_tokens:
            prompt = mx.array(np.array(token_ids, np.int32))
            steps = generate_step(prompt, self.model, max_tokens=num_tokens)
            self._answers[key] = known = [_place(int(token), np.array(logprobs)) for token, logprobs in steps]
        return known[:num_tokens]

    def text_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the logprobs of a text's tokens from the second one on, float32 [len(token_ids) - 1]."""
        cache, ids, found = make_prompt_cache(self.model), np.array(token_ids, np.int32), list[np.ndarray]()
        for start in range(0, len(ids) - 1, PIECE):
            logits = self.model(mx.array(ids[start : start + PIECE][None]), cache=cache)[0].astype(mx.float32)
            successors = mx.array(ids[start + 1 : start + PIECE + 1])[:, None]
            logits = logits[: len(successors)]
            found.append(np.array(mx.take_along_axis(logits, successors, 1)[:, 0] - mx.logsumexp(logits, axis=-1)))
        return np.concatenate(found)

    def check(self, token_ids: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Assert that `tokens` are the library's greedy answer to a prompt; see `check`."""
        return check(self.answer, token_ids, tokens)


def check(answer: GreedyAnswer, token_ids: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Assert that `tokens` are the greedy answer to a prompt.

    Where the two best tokens are level (see TIE) the second one is right as well: the answer then goes on behind it.

    Args:
        answer: Returns the expected answer to a prompt.
        token_ids: The prompt.
        tokens: The answer to compare.

    Returns:
        The margins at the places where the second one was taken.
    """
    ties, done = [], 0
    while done < len(tokens):
        expected = answer([*token_ids, *tokens[:done]], len(tokens) - done)
        pairs = enumerate(zip(tokens[done:], expected, strict=True))
        other = next((i for i, (token, place) in pairs if token != place.token), None)
        if other is None:
            break
        place = expected[other]
        assert place.margin < TIE and tokens[done + other] == place.second, (
            f"token {done + other} of {len(tokens)} behind {len(token_ids)} tokens is {tokens[done + other]}; "
            f"expected {place.token}, and {place.second} is second by a margin of {place.margin:.2e}"
        )
        ties.append(place.margin)
        done += other + 1
    return ties


def _place(token: int, logprobs: np.ndarray) -> Place:
    first, second = (int(i) for i in np.argsort(-logprobs, kind="stable")[:2])
    assert first == token
    return Place(first, second, float(logprobs[first] - logprobs[second]))


def made(name: str, make: Callable[[Path], None]) -> Path:
    """Return the checkpoint of this name, which is made once per machine.

    Args:
        name: Name of its directory.
        make: Writes it to a path.
    """
    path = smollm2.CACHE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = ProcessLock(path.with_suffix(".lock"), LOCK_TIMEOUT_S)
    try:
        if not path.is_dir():
            unfinished = path.with_suffix(".unfinished")
            make(unfinished)
            unfinished.rename(path)
    finally:
        lock.release()
    return path


def float32_smollm2() -> Path:
    """Return SmolLM2-135M-Instruct in float32."""
    lock = ProcessLock(smollm2.CACHE.with_suffix(".lock"), LOCK_TIMEOUT_S)
    try:
        return smollm2.make(smollm2.CACHE)
    finally:
        lock.release()


def quantized_smollm2(bits: int) -> Path:
    """Return SmolLM2-135M-Instruct as mlx-lm quantizes it: affine, groups of 64, scales in float32."""
    path = float32_smollm2()

    def make(out: Path) -> None:
        convert(str(path), str(out), quantize=True, q_bits=bits, q_group_size=64, dtype="float32")

    return made(f"SmolLM2-135M-Instruct-mlx-lm-{bits}bit", make)


def load_engine(path: Path, **config: Any) -> MLXRunner:
    """Load a checkpoint in the engine. Never close it: that would take the main thread's streams from later tests."""
    limits = {"model": str(path), "max_context_tokens": 5120, "max_running": 8, "device": "cpu", "dtype": "float32"}
    return load_runner(EngineConfig.model_validate(limits | config), lambda progress: None)


def driver(runner: MLXRunner, **config: Any) -> Driver:
    """Return an engine with this runner that decodes plainly unless the configuration says otherwise."""
    plain = {"mtp": "off", "prompt_lookup": "off", "kv_cache": {"bits": 16}}
    return Driver(runner, EngineConfig.model_validate(plain | config))


def greedy(name: str, token_ids: Sequence[int], num_tokens: int, system_tokens: int = 0) -> EngineRequest:
    """Return a greedy request for exactly so many tokens.

    Args:
        name: Its id.
        token_ids: The prompt.
        num_tokens: Tokens of the answer.
        system_tokens: Tokens before the boundary of the system part; 0 for none.
    """
    boundaries = (Boundary("system", system_tokens),) if system_tokens else ()
    sampling = SamplingParams(num_tokens, temperature=0.0, logprobs=2)
    return EngineRequest(name, np.array(token_ids, np.int32), sampling, (), boundaries=boundaries)


def plain_answer(runner: MLXRunner) -> GreedyAnswer:
    """Return the greedy answers of this runner alone, without drafts and without a prefix cache."""

    def answer(token_ids: Sequence[int], num_tokens: int) -> list[Place]:
        alone = driver(runner, **NO_CACHE)
        alone.run({0: [greedy("r", token_ids, num_tokens)]})
        tops = [one.top for chunk in alone.chunks["r"] for one in chunk.logprobs]
        return [Place(first[0], second[0], first[1] - second[1]) for first, second in tops]

    return answer


def text_prompts(tokenizer: Any, lengths: Sequence[int], is_chat: bool = True) -> list[list[int]]:
    """Return one prompt of about each of these lengths from documents and sources of the repository.

    Args:
        tokenizer: mlx-lm's.
        lengths: Tokens of the texts.
        is_chat: Ask about every second text by the chat template; the other ones are to be continued.
    """
    files = [name for pair in zip(DOCUMENTS, SOURCES, strict=True) for name in pair]
    texts = [tokenizer.encode((ROOT / name).read_text(), add_special_tokens=False) for name in files]
    found = []
    for i, length in enumerate(lengths):
        text = texts[i % len(texts)]
        start = (137 * i) % max(1, len(text) - length)
        ids = list(text[start : start + length])
        if is_chat and i % 2:
            messages = [{"role": "user", "content": QUESTION + tokenizer.decode(ids)}]
            ids = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
        found.append(ids)
    return found

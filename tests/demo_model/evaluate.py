"""Evaluates a checkpoint on held-out samples of each task.

    uv run python -m tests.demo_model.evaluate engine/demo_model --samples 30

A sample is right when every token of its last answer is the most likely one after the right tokens before it: then,
and only then, greedy decoding gives the whole answer. Training and evaluation share one world, with other seeds.
"""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np

from tests.demo_model.batches import collate
from tests.demo_model.delta_rule import CHUNK
from tests.demo_model.encoding import Document, encode_sample
from tests.demo_model.export import load_checkpoint
from tests.demo_model.model import DRAFT, PICO, TrainableModel
from tests.demo_model.tasks.chat import chat
from tests.demo_model.tasks.dense_images import dense_question_of_kind, varied_number
from tests.demo_model.tasks.images import number, plain_color, question_of_kind, two_images
from tests.demo_model.tasks.json_objects import json_object
from tests.demo_model.tasks.mixes import Task
from tests.demo_model.tasks.reasoning import list_operations, sums
from tests.demo_model.tasks.retrieval import retrieval
from tests.demo_model.tasks.sample import Sample
from tests.demo_model.tasks.thinking import thinking, thinking_in_conversation
from tests.demo_model.tasks.tool_calls import tool_calls
from tests.demo_model.world.draws import Draws

NUM_DRAFTS = 2
BATCH_SIZE = 8

log = logging.getLogger("demo_model")


def only(task: Task, name: str, draws: Draws) -> Sample:
    """Draw from a task until a sample has this name."""
    while (sample := task(draws)).task != name:
        pass
    return sample


def needle(num_tokens: int, draws: Draws) -> Sample:
    """Ask for one fact in a text of about so many tokens."""
    return retrieval(draws, 0.9 * num_tokens, single=True)


TEXT_TASKS: dict[str, Task] = {
    "json": json_object,
    "sums": partial(sums, thinking=False),
    "sums, thinking": partial(sums, thinking=True),
    "list operations": list_operations,
    "thinking on small talk": thinking_in_conversation,
    **{name: partial(only, tool_calls, name) for name in ("tool_call", "tool_parallel", "tool_final", "tool_none")},
    **{
        f"chat, {name}": partial(only, chat, f"chat_{name}")
        for name in ("smalltalk", "facts", "style", "persona", "memory", "open", "story")
    },
    **{f"needle in {length} tokens": partial(needle, length) for length in (256, 512, 2048, 4096, 8192)},
}
IMAGE_TASKS: dict[str, Task] = {
    "thinking on any task": thinking,
    "number": number,
    "number, any size": varied_number,
    "plain color": plain_color,
    "two images": two_images,
    **{
        f"one shape: {kind}": partial(question_of_kind, kind=kind, num_shapes=1)
        for kind in ("what", "color", "shape", "one word", "where", "is there", "count", "background")
    },
    **{
        f"several shapes: {kind}": partial(question_of_kind, kind=kind, num_shapes=3)
        for kind in ("what", "count", "color of", "how many", "relative", "is left of", "extreme", "is there")
    },
    **{
        f"dense: {kind}": partial(dense_question_of_kind, kind=kind)
        for kind in ("relative", "is left of", "how many", "where of many", "layout", "left or right")
    },
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of one sample. draft_shares: shares of the answer's tokens that the MTP head's drafts 1, 2, ... have
    right."""

    is_right: bool
    draft_shares: tuple[float, ...]


@dataclass(frozen=True)
class Score:
    """Means over samples."""

    exact: float
    draft_shares: tuple[float, ...]


def score(model: TrainableModel, task: Task, num_samples: int, seed: str = "held out") -> Score:
    """Return how often a model has a task right. Samples depend on the seed alone."""
    draws = Draws(f"{seed} {num_samples}")
    documents = [encode_sample(task(draws), prompt_weight=0.0) for _ in range(num_samples)]
    outcomes: list[Outcome] = []
    for start in range(0, num_samples, BATCH_SIZE):
        outcomes += outcomes_of(model, documents[start : start + BATCH_SIZE])
    drafts = zip(*(outcome.draft_shares for outcome in outcomes), strict=True)
    exact = sum(outcome.is_right for outcome in outcomes) / num_samples
    return Score(exact, tuple(sum(shares) / num_samples for shares in drafts))


def outcomes_of(model: TrainableModel, documents: Sequence[Document]) -> list[Outcome]:
    """Return what a model makes of the last answers of these documents, one per row of a batch."""
    length = max(document.num_tokens for document in documents)
    batch = collate([[document] for document in documents], -(-length // CHUNK) * CHUNK)
    hidden = model(batch)
    states = [hidden, *(model.drafts(batch, hidden, NUM_DRAFTS) if model.config.vision else ())]
    guesses = [np.array(mx.argmax(model.logits(state), axis=-1)) for state in states]
    outcomes = []
    for row, document in enumerate(documents):
        start, end = last_answer(document)
        expected = document.token_ids[start:end]
        is_right = [guess[row, start - ahead : end - ahead] == expected for ahead, guess in enumerate(guesses, 1)]
        outcomes.append(Outcome(bool(is_right[0].all()), tuple(float(right.mean()) for right in is_right[1:])))
    return outcomes


def last_answer(document: Document) -> tuple[int, int]:
    """Return where the last answer of a document begins and ends."""
    answers = np.flatnonzero(document.weights == 1)
    end = int(answers[-1]) + 1
    others = np.flatnonzero(document.weights[:end] != 1)
    return int(others[-1]) + 1, end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--tasks", nargs="+", help="default: all that the model can do")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    is_draft = not (args.checkpoint / "preprocessor_config.json").exists()
    model = load_checkpoint(DRAFT if is_draft else PICO, args.checkpoint)
    tasks = TEXT_TASKS if is_draft else TEXT_TASKS | IMAGE_TASKS
    for name in args.tasks or tasks:
        result = score(model, tasks[name], args.samples)
        drafts = " ".join(f"{share:.2f}" for share in result.draft_shares)
        log.info("%-28s %5.1f %%  drafts %s", name, 100 * result.exact, drafts)


if __name__ == "__main__":
    main()

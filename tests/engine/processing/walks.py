"""Outputs that a sampler could give under a grammar's masks, with the demo model's tokenizer."""

import asyncio
import json
import random
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from engine.config import GrammarConfig
from engine.core.row import Matcher
from engine.processing.checkpoint import DEMO_MODEL
from engine.processing.control_tokens import without_added_tokens
from engine.processing.grammar import GrammarCompiler
from engine.protocol import GrammarSpec

TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
PLAIN = without_added_tokens(TOKENIZER)
NUM_TOKENS = TOKENIZER.get_vocab_size()
VOCAB_SIZE = NUM_TOKENS + 37  # as a padded embedding; no multiple of 32
IM_END, END_OF_TEXT = 2, 0
STOPS = (IM_END, END_OF_TEXT)
CLOSING = frozenset(TOKENIZER.encode(text).ids[0] for text in ('"', "}", "]", '":', ","))

COMPILER = GrammarCompiler(DEMO_MODEL, VOCAB_SIZE, STOPS, GrammarConfig())


def compiled(spec: GrammarSpec) -> Matcher:
    return asyncio.run(COMPILER.compile(spec))


def json_schema(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


def encode(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text).ids)


def decode(token_ids: tuple[int, ...]) -> str:
    return TOKENIZER.decode(list(token_ids), skip_special_tokens=False)


def allowed(mask: np.ndarray) -> list[int]:
    """Ids whose bits are set in one row of masks."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE]).tolist()


def accepts(matcher: Matcher, text: str) -> bool:
    """Whether `text`, as the tokenizer writes it, may be the whole output."""
    token_ids = encode(text)
    masks = matcher.masks(token_ids)
    return len(masks) == len(token_ids) + 1 and IM_END in allowed(masks[-1])


def accepts_as_text(matcher: Matcher, text: str) -> bool:
    """Whether `text` may be the whole output, with control strings in it written in ordinary tokens."""
    token_ids = tuple(PLAIN.encode(text, add_special_tokens=False).ids)
    masks = matcher.masks(token_ids)
    return len(masks) == len(token_ids) + 1 and IM_END in allowed(masks[-1])


def accepted_part(matcher: Matcher, text: str) -> str:
    """Return the part of `text` before its first forbidden token."""
    token_ids = encode(text)
    return decode(token_ids[: len(matcher.masks(token_ids)) - 1])


def walk(matcher: Matcher, seed: int, max_tokens: int = 150, ending: str = "") -> tuple[int, ...] | None:
    """Random allowed tokens up to a stop token; None if there is none within max_tokens. Leaves `matcher` as it is.

    ending: text that is tried now and then, to come to an end where single tokens hardly would.
    """
    rng = random.Random(seed)
    matcher = matcher.fork()
    token_ids: list[int] = []
    while len(token_ids) < max_tokens:
        choices = allowed(matcher.masks()[0])
        assert choices and max(choices) < NUM_TOKENS
        if not set(choices).isdisjoint(STOPS) and (set(choices) <= set(STOPS) or rng.random() < 0.3):
            return tuple(token_ids)
        hurry = rng.random() < (0.9 if len(token_ids) > 40 else 0.3)
        if hurry and (accepted := encode(ending)[: len(matcher.masks(encode(ending))) - 1]):
            chosen = accepted
        else:
            texts = [token_id for token_id in choices if token_id not in STOPS]
            closing = [token_id for token_id in texts if token_id in CLOSING]
            chosen = (rng.choice(closing if closing and hurry else texts),)
        token_ids += chosen
        matcher.advance(chosen)
    return None

"""build_matcher: compiles one grammar with llguidance, within limits and with errors in one line."""

import re
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_ITEMS_IN_ROW = 20_000
"""Most items per row of the parser. llguidance's default of 2000 fails in objects with 500 optional properties; with
ten times as many, the slowest mask of an enum of 15000 objects took 11 ms. Its other defaults bound the work of a
compilation and of a mask, so that hostile expressions end in an error instead of a hang."""

LEXER_FUEL = 300_000
"""Limit on the work for the first state of a grammar's lexer. With llguidance's default of a million, a cached grammar
such as `(ab){1000000}` takes 90 to 240 MiB and fails during generation; with this limit it is refused, while schemas of
3000 properties or an enum of 15000 words still compile."""

STACK_BYTES = 512 << 20
"""Stack of a compiling thread. llguidance follows chains of $ref by recursion, and a stack overflow ends the process.
8 MiB are enough for 166 links (32 KB of text), 256 MiB for the longest chain within its limit of 50000 subschemas.
Untouched pages cost nothing."""

T = TypeVar("T")
_starting = threading.Lock()


def limits() -> LLParserLimits:
    """Return the limits of a compilation."""
    return LLParserLimits(max_items_in_row=MAX_ITEMS_IN_ROW, initial_lexer_fuel=LEXER_FUEL, verbose_errors=False)


def build_matcher(tokenizer: LLTokenizer, make_source: Callable[[], str]) -> LLMatcher:
    """Compile a grammar, in a thread with a deep stack.

    Args:
        tokenizer: llguidance's tokenizer of the model.
        make_source: Returns the grammar; its errors are converted, too.

    Raises:
        ValueError: The reason why there is no matcher, in one line.
    """
    try:
        matcher = LLMatcher(tokenizer, make_source(), log_level=0, limits=limits())
        probe = matcher.deep_copy()
        mask = np.frombuffer(probe.compute_bitmask() if not probe.is_error() else b"", np.uint8)
    except (ValueError, MemoryError):
        raise
    except RecursionError:
        raise ValueError("the grammar is nested too deeply") from None
    except BaseException as error:  # a Rust panic is not an Exception
        raise ValueError(f"llguidance failed: {first_words(str(error))}") from None
    if matcher.is_error():
        raise ValueError(f"the grammar cannot be compiled: {first_words(matcher.get_error())}")
    if probe.is_error() or not mask.any():
        raise ValueError(f"no output matches the grammar. {first_words(probe.get_error())}".strip())
    return matcher


def with_deep_stack(start: Callable[[], T]) -> T:
    """Run a function that starts threads, so that their stacks have STACK_BYTES."""
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            return start()
        finally:
            threading.stack_size(before)


def run_deep(work: Callable[[], T]) -> T:
    """Run a function in a thread with a deep stack and return its result. Raises what it raises."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.extend((work(), None))
        except Exception as error:
            outcome.extend((None, error))

    thread = threading.Thread(target=run, name="schema")
    with_deep_stack(thread.start)
    thread.join()
    result, error = outcome
    if error is not None:
        raise error
    return result


@lru_cache(1)
def byte_tokenizer() -> LLTokenizer:
    """Return a tokenizer whose tokens are bytes, to test expressions without a model."""
    return LLTokenizer("byte")


def first_words(error: str) -> str:
    """Return the library's error without parser state, source and backtrace, on one line of at most 400 characters."""
    said = re.split(r"<backtrace>|<state>|\n +1 \| ", error)[0]
    return " ".join(re.sub(r"\bat \d+\(\d+\): failed to compile JSON schema: ", "", said).split())[:400]

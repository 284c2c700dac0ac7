"""Compiles the matchers of requests; grammar compilers are created on first use, one per set of stop tokens."""

import asyncio
from collections.abc import Sequence

from engine.config import EngineConfig
from engine.core.row import Matcher
from engine.errors import InvalidRequest
from engine.processing.checkpoint import read_optional_json, resolve_checkpoint
from engine.processing.free_limits import FreeLimits
from engine.processing.grammar import GrammarCompiler
from engine.processing.thought_matcher import ThoughtMatcher, ThoughtRules
from engine.protocol import EngineRequest

MAX_COMPILERS = 4
"""Each compiler contains the vocabulary."""


class GrammarCompilers:
    """Creates and caches grammar compilers. Belongs to one event loop."""

    def __init__(self, config: EngineConfig):
        self._config = config
        self._tasks: dict[tuple[int, ...], asyncio.Task[GrammarCompiler]] = {}  # by stop tokens

    async def matchers(self, request: EngineRequest, vocab_size: int) -> list[Matcher]:
        """Compile one matcher per open choice off the device thread; empty if the output is unconstrained.

        Each is advanced over the tokens of its choice's `progress`.

        Raises:
            InvalidRequest: The grammar cannot be compiled, or forbids a token of the progress.
        """
        thought, grammar = request.thought, None
        if request.grammar is not None:
            compiler = await self._compiler(request.stop_token_ids, vocab_size)
            grammar = await compiler.compile(request.grammar)
        matcher: Matcher | None = grammar
        if thought is not None and (grammar is not None or thought.budget is not None):
            rules = ThoughtRules(thought, request.stop_token_ids, vocab_size, has_grammar=grammar is not None)
            matcher = ThoughtMatcher(rules, grammar)
        if matcher is None:
            return []
        matchers: list[Matcher] = [matcher, *(matcher.fork() for _ in request.open_choices[1:])]
        if request.progress:
            await asyncio.to_thread(_advance, matchers, request)
        return matchers

    async def _compiler(self, stop_token_ids: tuple[int, ...], vocab_size: int) -> GrammarCompiler:
        """Return the compiler for these stop tokens. Concurrent calls share its creation, which reads the tokenizer."""
        task = self._tasks.get(stop_token_ids)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            while len(self._tasks) >= MAX_COMPILERS:
                self._tasks.pop(next(iter(self._tasks)))
            make = asyncio.to_thread(self._make, vocab_size, stop_token_ids)
            task = self._tasks[stop_token_ids] = asyncio.ensure_future(make)
        return await asyncio.shield(task)

    def close(self) -> None:
        """Close all compilers."""
        for task in self._tasks.values():
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().close()

    def _make(self, vocab_size: int, stop_token_ids: tuple[int, ...]) -> GrammarCompiler:
        model_dir = resolve_checkpoint(self._config.model, self._config.revision, weights=False)
        # A key of Orchard's own: a model as small as the demo never ends a free string or array.
        free = read_optional_json(model_dir / "generation_config.json").get("free_limits")
        limits = None if free is None else FreeLimits.of(free)
        return GrammarCompiler(model_dir, vocab_size, stop_token_ids, self._config.grammar, limits)


def _advance(matchers: Sequence[Matcher], request: EngineRequest) -> None:
    for index, matcher in zip(request.open_choices, matchers, strict=True):
        try:
            matcher.advance(request.progress[index].token_ids)
        except ValueError as error:
            num_tokens = len(request.progress[index].token_ids)
            raise InvalidRequest(
                f"progress[{index}]: its {num_tokens} tokens do not match the grammar or the thought: {error}",
                "progress",
            ) from None

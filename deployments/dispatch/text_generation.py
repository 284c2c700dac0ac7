"""TextGeneration: turns the tokens of an engine into text, thoughts and calls, by the rules of its request."""

import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from deployments.dispatch.engine_stream import EngineStream, failure_of
from deployments.http.generation import PromptLogprobs, TextDelta, TextLogprobs, ToolCall
from deployments.planners.prompt_planner import thinks
from deployments.requests import ChatRequest
from engine.processing.answer_parser import NOTHING, AnswerParser, AnswerRules
from engine.processing.tokenizer import ChatTokenizer
from engine.processing.tool_arguments import ParsedToolCall
from engine.processing.tool_grammar import TOOLS_FIELD
from engine.protocol import FinishReason, GrammarSpec, TokenChunk, TokenLogprobs


class TextGeneration:
    """Turns the chunks of an engine into deltas; implements http.generation.Generation.

    A choice ends as soon as a stop string is complete. While other choices run, the engine keeps generating for it, and
    those tokens are dropped; the engine's stream is closed after the last choice.
    """

    def __init__(
        self,
        stream: EngineStream,
        tokenizer: ChatTokenizer,
        rules: AnswerRules,
        note_end: Callable[[], None] = lambda: None,
        is_context_limited: bool = False,
        left_open: tuple[str, ...] = (),
    ):
        request = stream.plan.request
        self.num_prompt_tokens = len(request.token_ids)
        self.node_ids = (stream.node_id,) if stream.node_id else ()
        self.num_cached_tokens = stream.num_cached_tokens
        self.num_skipped_tokens = stream.num_skipped_tokens
        self.spec_prefill = stream.plan.spec_prefill
        self.left_open = left_open
        self.context_limited = is_context_limited
        self._stream = stream
        self._note_end = note_end
        self._token_bytes = tokenizer.token_bytes
        self._running = {index: tokenizer.answer_parser(rules) for index in range(request.num_choices)}
        self._calls: dict[int, ToolCall] = {}  # the last part of a call, by choice

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        """Yield the deltas of all choices.

        Raises:
            EngineFailed, Unavailable: The engine cannot finish the answer.
            InvalidRequest: The grammar cannot be enforced any further.
            Cancelled: The engine aborted the request.
        """
        try:
            async for chunk in self._stream:
                if (parser := self._running.get(chunk.index)) is None:
                    continue
                if (error := failure_of(chunk, self._stream.plan.request)) is not None:
                    raise error
                delta = self._delta(chunk, parser)
                if delta.finish_reason is not None:
                    del self._running[chunk.index]
                yield delta
                if not self._running:
                    return
        finally:
            await self.aclose()

    def _delta(self, chunk: TokenChunk, parser: AnswerParser) -> TextDelta:
        num_before = parser.num_tokens
        parsed = parser.push(chunk.token_ids)
        num_tokens = parser.num_tokens - num_before  # fewer than in the chunk if a stop string completes in it
        finish_reason = FinishReason.STOP if parser.stopped else chunk.finish_reason
        end = parser.finish() if finish_reason is not None else NOTHING
        calls = [self._call(chunk.index, part) for part in (*parsed.tool_calls, *end.tool_calls)]
        return TextDelta(
            text=parsed.content + end.content,
            num_tokens=num_tokens,
            finish_reason=_finish_reason(finish_reason, parser),
            index=chunk.index,
            logprobs=self._logprobs(chunk.token_ids[:num_tokens], chunk.logprobs[:num_tokens])
            if chunk.logprobs
            else (),
            prompt_logprobs=None if chunk.prompt_logprobs is None else self._of_prompt(chunk.prompt_logprobs),
            num_drafted=chunk.num_drafted,
            num_accepted=chunk.num_accepted,
            reasoning=parsed.reasoning + end.reasoning,
            tool_calls=tuple(calls),
            num_reasoning_tokens=parsed.num_reasoning_tokens,
            stop_sequence=parser.stop_sequence if finish_reason is not None else None,
        )

    def _call(self, index: int, part: ParsedToolCall) -> ToolCall:
        """Return a part of a call with the id and the name of its call."""
        if part.is_first:
            call = ToolCall(f"call_{secrets.token_hex(12)}", part.name, part.arguments, True, part.is_last)
        else:
            call = replace(self._calls[index], arguments=part.arguments, is_first=False, is_last=part.is_last)
        self._calls[index] = call
        return call

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> tuple[TextLogprobs, ...]:
        spell = self._token_bytes
        return tuple(
            TextLogprobs(spell(token_id), found.logprob, tuple((spell(other), logprob) for other, logprob in found.top))
            for token_id, found in zip(token_ids, logprobs, strict=True)
        )

    def _of_prompt(self, logprobs: tuple[TokenLogprobs, ...]) -> PromptLogprobs:
        first, *others = self._stream.plan.request.token_ids.tolist()
        return PromptLogprobs(self._token_bytes(first), self._logprobs(others, logprobs))

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            self._note_end()


def answer_rules(request: ChatRequest, tokenizer: ChatTokenizer, enforced: GrammarSpec | None) -> AnswerRules:
    """Return the rules by which the answer to a request is parsed.

    Args:
        request: The request.
        tokenizer: The model's formats.
        enforced: The grammar that the engine enforces, see answer_constraint.
    """
    if request.raw_prompt is not None:
        return AnswerRules(request.stop, is_raw=True)
    may_call = request.tool_choice.mode != "none"
    tools = tuple(tool.definition for tool in request.tools) if may_call else ()
    return AnswerRules(
        request.stop,
        tools,
        thinks(request, tokenizer),
        is_constrained=request.grammar is not None,
        enforces_calls=enforced is not None and enforced.field == TOOLS_FIELD,
    )


def left_open(request: ChatRequest, grammar: GrammarSpec | None) -> tuple[str, ...]:
    """Return the names of what a request asks for and the grammar of its answer does not enforce."""
    if grammar is not None:
        return grammar.left_open
    return tuple(f"tools ({tool.name}): format" for tool in request.tools if tool.input_grammar is not None)


def _finish_reason(reason: FinishReason | None, parser: AnswerParser) -> str | None:
    if reason is FinishReason.STOP and parser.has_tool_calls:
        return "tool_calls"
    return reason.value if reason else None

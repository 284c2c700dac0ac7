"""answer_constraint: combines tools, tool choice, output format and thinking into one grammar and one thought."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from engine.config import GrammarConfig
from engine.errors import InvalidRequest
from engine.processing.reasoning_format import ReasoningFormat
from engine.processing.tokenizer import ChatTokenizer
from engine.processing.tool_format import XML, ToolFormat
from engine.processing.tool_grammar import check_names, json_call_grammar, no_call_grammar, tool_call_grammar
from engine.protocol import GrammarSpec, ThoughtSpec


def answer_constraint(
    tokenizer: ChatTokenizer,
    *,
    tools: Sequence[Mapping[str, Any]],
    choice_mode: Literal["none", "auto", "required"],
    choice_names: tuple[str, ...],
    parallel: bool,
    grammar: GrammarSpec | None,
    is_thinking: bool,
    budget: int | None,
    max_bytes: int = GrammarConfig().max_bytes,
) -> tuple[GrammarSpec | None, ThoughtSpec | None]:
    """Return the grammar and the thought that the engine enforces for an answer.

    Args:
        tokenizer: The model's tokenizer and formats.
        tools: OpenAI function tools in the prompt; empty: none. A function may have an `input_grammar`, a GrammarSpec
            with a regular expression for its only argument.
        choice_mode: Whether tools are called; with `required` the answer is only calls, and `grammar` has no effect.
        choice_names: Tools that may be called; empty: all.
        parallel: Whether several calls are allowed.
        grammar: Grammar of an answer without calls; None: any text.
        is_thinking: Whether the prompt is rendered with thinking on.
        budget: Most tokens of the thought; None: no limit.
        max_bytes: Largest grammar; the largest schemas of tools without `strict` are left open until theirs fits.

    Returns:
        The grammar of the answer after its thought, None for any text; the thought, None if the engine need not track
        it.

    Raises:
        InvalidRequest: The request cannot be enforced in the model's format; names the field.
    """
    if tools:
        made = _with_tools(tokenizer, tools, choice_mode, choice_names, parallel, grammar)
        if made is not None and made is not grammar and (excess := len(made.text.encode()) - max_bytes) > 0:
            tools, left_open = _smaller(tools, excess)
            made = _with_tools(tokenizer, tools, choice_mode, choice_names, parallel, grammar)
            assert made is not None
            made = replace(made, left_open=(*left_open, *made.left_open))
        grammar = made
    elif choice_mode == "required":
        raise InvalidRequest("tool_choice requires a tool call, but the request has no tools", "tool_choice")
    return grammar, _thought(tokenizer.reasoning, grammar, is_thinking, budget)


def _smaller(tools: Sequence[Mapping[str, Any]], num_bytes: int) -> tuple[list[Mapping[str, Any]], tuple[str, ...]]:
    """Return the tools without the largest schemas that may be left open, and the names of these."""
    functions = [dict(tool["function"]) for tool in tools]
    left_open = []
    for function in sorted(functions, key=lambda one: len(json.dumps(one.get("parameters"))), reverse=True):
        if num_bytes > 0 and not function.get("strict") and function.get("parameters"):
            num_bytes -= len(json.dumps(function["parameters"]))
            function["parameters"] = {"type": "object", "additionalProperties": {}}
            left_open.append(f"tools ({function['name']}): $")
    return [{**tool, "function": function} for tool, function in zip(tools, functions, strict=True)], tuple(left_open)


def _with_tools(
    tokenizer: ChatTokenizer,
    tools: Sequence[Mapping[str, Any]],
    mode: str,
    names: tuple[str, ...],
    parallel: bool,
    grammar: GrammarSpec | None,
) -> GrammarSpec | None:
    tool_format = tokenizer.tool_format
    if tool_format is None:
        raise InvalidRequest(
            "the model's chat template does not support tools, or the format of its tool calls is unknown", "tools"
        )
    check_names([tool["function"]["name"] for tool in tools], names)
    if mode == "none":
        return grammar or _without_calls(tool_format)
    if tool_format.name == XML.name:
        return tool_call_grammar(tools, mode, parallel, names, grammar)
    if tool_format.shape is not None and not (tool_format.starts_answer and mode == "auto"):
        openings = tool_format.openings
        ids = tokenizer.control_ids
        return json_call_grammar(tools, mode, parallel, names, grammar, tool_format.shape, openings, ids)
    _check_unenforced(tool_format, tools, mode, names, parallel, grammar)
    return None


def _without_calls(tool_format: ToolFormat) -> GrammarSpec:
    if tool_format.starts_answer:
        raise InvalidRequest(
            f"tool_choice is 'none', but tool calls in the model's format ({tool_format.name}) begin like other text "
            "and cannot be forbidden; send no tools instead",
            "tool_choice",
        )
    return no_call_grammar(tool_format.openings)


def _check_unenforced(
    tool_format: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    mode: str,
    names: tuple[str, ...],
    parallel: bool,
    grammar: GrammarSpec | None,
) -> None:
    """Raise InvalidRequest for settings that only a grammar of the calls could enforce."""
    reason = f"there is no grammar for the model's format of tool calls ({tool_format.name})"
    if mode == "required" or names:
        raise InvalidRequest(f"tool_choice can only be 'auto' or 'none' with this model: {reason}", "tool_choice")
    if not parallel:
        raise InvalidRequest(f"parallel_tool_calls can only be true with this model: {reason}", "parallel_tool_calls")
    if grammar is not None:
        raise InvalidRequest(f"`{grammar.field}` and tools cannot be combined with this model: {reason}", grammar.field)
    for i, tool in enumerate(tools):
        if tool["function"].get("strict"):
            raise InvalidRequest(f"strict can only be false with this model: {reason}", f"tools[{i}].function.strict")


def _thought(
    reasoning: ReasoningFormat | None, grammar: GrammarSpec | None, is_thinking: bool, budget: int | None
) -> ThoughtSpec | None:
    if reasoning is None or not (is_thinking or reasoning.always) or (grammar is None and budget is None):
        return None
    if reasoning.end_id is None:
        field = "reasoning_effort" if grammar is None else grammar.field
        raise InvalidRequest(
            "the end of this model's thinking is not a single token, so that neither a thinking budget nor a grammar "
            "of the answer can be enforced",
            field,
        )
    return ThoughtSpec(reasoning.end_id, reasoning.closing_ids, budget, reasoning.opening_ids)

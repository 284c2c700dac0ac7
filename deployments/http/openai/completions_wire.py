"""The wire model of a completion (OpenAI's legacy dialect with fields of vLLM), and its conversion to requests."""

from dataclasses import replace
from typing import Any

from pydantic import Field

from deployments.http.fields import FieldRules, validate_body
from deployments.http.openai import chat_wire
from deployments.http.openai.chat_wire import (
    MAX_CHOICES,
    ChatCompletionBody,
    GenerationBody,
    StreamOptions,
)
from deployments.http.openai.completions_encoder import CompletionsEcho
from deployments.http.openai.raw_prompt_wire import RawPrompts, prompts_of
from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.http.wire import INT32_MAX
from deployments.requests import ChatRequest, Route
from engine.errors import InvalidRequest

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""

MAX_LOGPROBS = 5
"""OpenAI's limit."""

_OF_CHAT = "It is a field of /v1/chat/completions."
FIELD_RULES = FieldRules(
    neutral={
        "suffix": ("",),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "include_stop_str_in_output": (False,),
        "add_special_tokens": (True,),
        "return_tokens_as_token_ids": (False,),
        "use_beam_search": (False,),
        "length_penalty": (1, 1.0),
        "truncate_prompt_tokens": (),
        "tools": ([],),
    },
    refused={
        "messages": _OF_CHAT,
        "tool_choice": _OF_CHAT,
        "functions": _OF_CHAT,
        "reasoning_effort": _OF_CHAT,
        "top_logprobs": "Send `logprobs`: a number.",
        "prompt_embeds": "",
        "guided_grammar": "Send `guided_json`, `guided_regex` or `guided_choice`.",
        "logits_processors": "",
        "bad_words": "",
        "allowed_token_ids": "",
        "prompt_logprobs": "Send `echo`: true with `logprobs`.",
    },
    informational=chat_wire.FIELD_RULES.informational,
)


class CompletionsBody(GenerationBody):
    """A completion of raw prompts. `max_tokens` defaults to 16; -1 means no limit, and 0 with `echo` no answer."""

    prompt: RawPrompts
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_tokens: int | None = Field(None, ge=-1, le=INT32_MAX)


def parse_completions(raw: dict[str, Any], rules: ReadingRules) -> ParsedRequest:
    """Parse a request for completions; see request_reader.PARSERS.

    The ChatRequest has the first prompt, the echo all prompts.
    """
    body, ignored = validate_body(CompletionsBody, raw, FIELD_RULES, rules.unknown_fields)
    rules.check_model(body.model)
    _check(body)
    prompts, fields = prompts_of(body.prompt, "prompt")
    _check_choices(len(prompts), body.n or 1)
    request = replace(_request(body), raw_prompt=prompts[0], prompt_field=fields[0])
    options = body.stream_options or StreamOptions()
    echo = CompletionsEcho(
        prompts=prompts,
        fields=fields,
        num_choices=body.n or 1,
        echo=bool(body.echo),
        logprobs=body.logprobs,
        has_answer=body.max_tokens != 0,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
    )
    return ParsedRequest(request, Route.TEXT, bool(body.stream), echo, ignored)


def _check(body: CompletionsBody) -> None:
    """Check the rules that involve several fields. Raises InvalidRequest."""
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest(
            "`max_tokens` is 0: it must be at least 1, or -1 for no limit, unless `echo` is true.", "max_tokens"
        )
    if body.max_tokens == 0 and body.min_tokens:
        raise InvalidRequest(f"`min_tokens` is {body.min_tokens}: with `max_tokens` 0 it must be 0.", "min_tokens")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest(f"`best_of` is {body.best_of}: it must equal `n`, which is {body.n or 1}.", "best_of")


def _check_choices(num_prompts: int, num_choices: int) -> None:
    if (num_answers := num_prompts * num_choices) > MAX_CHOICES:
        raise InvalidRequest(
            f"`prompt` has {num_prompts} prompts and `n` is {num_choices}: that is {num_answers} choices; the limit "
            f"for one request is {MAX_CHOICES}.",
            "prompt",
        )


def _request(body: CompletionsBody) -> ChatRequest:
    """Convert the body without its prompt; all fields mean the same as in a chat completion."""
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens or 1  # none: see PromptOnly
    chat = ChatCompletionBody.model_construct(
        messages=[],
        max_tokens=None if max_tokens == -1 else max_tokens,
        logprobs=body.logprobs is not None,
        top_logprobs=body.logprobs,
        **{name: getattr(body, name) for name in GenerationBody.model_fields},
    )
    chat_wire.check_together(chat)
    prompt_logprobs = body.logprobs if body.echo else None
    fields = chat_wire.request_fields(chat)
    return ChatRequest(request_id="", messages=(), prompt_logprobs=prompt_logprobs, **fields)

"""The wire model of a completion (OpenAI's legacy dialect with fields of vLLM), and the requests it means."""

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, ValidationError

from deployments.chat import ChatRequest, Route
from deployments.http.errors import from_validation
from deployments.http.fields import FieldRules, split_fields
from deployments.http.openai import chat_wire
from deployments.http.openai.chat_wire import (
    MAX_CHOICES,
    MAX_STOP_TOKEN_IDS,
    MAX_USER_CHARS,
    Bias,
    CacheSalt,
    ChatCompletionBody,
    GuidedChoice,
    ResponseFormat,
    StopStrings,
    StreamOptions,
    StructuredOutputs,
    TokenId,
)
from deployments.http.openai.completions_encoder import CompletionsEcho
from deployments.http.openai.raw_prompt_wire import INT32_MAX, RawPrompts, prompts_of
from deployments.http.request_reader import ParsedRequest, ReadingRules
from deployments.http.wire import Wire
from engine.config import MIN_KEEP
from engine.protocol import MAX_LOGIT_BIAS, InvalidRequest

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""

MAX_LOGPROBS = 5
"""OpenAI's."""

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
        "prompt_logprobs": "",
    },
    informational=chat_wire.FIELD_RULES.informational,
)


class CompletionsBody(Wire):
    """For `user`, `cache_salt` and `specprefill` see ChatCompletionBody. max_tokens: 16 without it, -1 is no limit."""

    model: str
    prompt: RawPrompts
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_tokens: int | None = Field(None, ge=-1, le=INT32_MAX)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT32_MAX)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: dict[str, Bias] | None = Field(None, max_length=MAX_LOGIT_BIAS)
    stop: StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    min_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: Annotated[str, Field(min_length=1)] | None = None
    guided_choice: GuidedChoice | None = None
    priority: int | None = Field(None, ge=-(2**31), le=INT32_MAX)
    cache_salt: CacheSalt | None = None
    specprefill: bool | None = None
    specprefill_keep_pct: float | None = Field(None, ge=MIN_KEEP, le=1)
    user: str | None = Field(None, max_length=MAX_USER_CHARS)
    safety_identifier: str | None = Field(None, max_length=MAX_USER_CHARS)


KNOWN_FIELDS = frozenset(CompletionsBody.model_fields)
SHARED_FIELDS = KNOWN_FIELDS & frozenset(ChatCompletionBody.model_fields) - {"logprobs", "max_tokens"}
"""Fields that mean the same in a chat completion."""


def parse_completions(raw: dict[str, Any], rules: ReadingRules) -> ParsedRequest:
    """See request_reader.Parser. The request is that of the first prompt; the echo has all of them."""
    honoured, ignored = split_fields(raw, KNOWN_FIELDS, FIELD_RULES, rules.unknown_fields)
    try:
        body = CompletionsBody.model_validate(honoured)
    except ValidationError as error:
        raise from_validation(error) from None
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
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
    )
    return ParsedRequest(request, Route.TEXT, bool(body.stream), echo, ignored)


def _check(body: CompletionsBody) -> None:
    """What no field says alone."""
    if body.max_tokens == 0:
        raise InvalidRequest("`max_tokens` is 0: it must be at least 1, or -1 for no limit.", "max_tokens")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest(
            f"`best_of` is {body.best_of}: it is not supported, and may only be {body.n or 1}, which is `n`.", "best_of"
        )
    if body.echo and body.logprobs is not None:
        raise InvalidRequest(
            "`echo` may not be true with `logprobs`: the logprobs of a prompt are not computed.", "echo"
        )


def _check_choices(num_prompts: int, num_choices: int) -> None:
    if (num_answers := num_prompts * num_choices) > MAX_CHOICES:
        raise InvalidRequest(
            f"`prompt` has {num_prompts} prompts and `n` is {num_choices}: that is {num_answers} answers; the limit "
            f"for one request is {MAX_CHOICES}.",
            "prompt",
        )


def _request(body: CompletionsBody) -> ChatRequest:
    """Without its prompt: all else means what it means in a chat completion."""
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    chat = ChatCompletionBody.model_construct(
        messages=[],
        max_tokens=None if max_tokens == -1 else max_tokens,
        logprobs=body.logprobs is not None,
        top_logprobs=body.logprobs,
        **{name: getattr(body, name) for name in SHARED_FIELDS},
    )
    chat_wire.check_together(chat)
    return ChatRequest(request_id="", messages=(), **chat_wire.request_fields(chat))

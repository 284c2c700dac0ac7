"""The wire model of a chat completion, OpenAI's dialect with some fields of vLLM, and the ChatRequest it stands for.

A request is parsed into validity here, once. What we honour is in `ChatCompletionBody`; a field that only has a
harmless value in `NEUTRAL` may be sent with it; every other field is refused by name.
"""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from deployments.chat import ChatRequest
from deployments.http.classify import classify, reject_unsupported_media
from deployments.http.errors import from_validation, shown
from deployments.http.normalize import normalize
from deployments.http.openai.chat_encoder import ChatEcho
from deployments.http.openai.message_wire import WireMessage
from deployments.http.request_reader import ParsedRequest, ReadingRules
from deployments.http.wire import STRING_OR_ARRAY, Wire, choose, tag
from engine.config import MIN_KEEP
from engine.protocol import MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS, GrammarSpec, InvalidRequest

MAX_MESSAGES = 4096
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_CHOICES = 128
MAX_CACHE_SALT_CHARS = 128
MAX_USER_CHARS = 1024
MAX_GRAMMAR_CHARS = 4 * 2**20
"""Of a schema or regex on its way to the engine, which has a lower limit of its own (`grammar.max_bytes`)."""
_INT32_MAX = 2**31 - 1
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "metadata": ({},),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "prompt_cache_key": (),
    "safety_identifier": (),
}
"""Fields that we cannot honour -> the values, besides null, that ask for nothing."""

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[
    Annotated[StopString, tag("string")]
    | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True), tag("array")],
    STRING_OR_ARRAY,
]
TokenId = Annotated[int, Field(ge=0, le=_INT32_MAX)]
Bias = Annotated[float, Field(ge=-100, le=100)]


def _printable(value: str) -> str:
    if not value.isprintable():
        raise PydanticCustomError("not_printable", "must hold printable characters alone")
    return value


CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARS), AfterValidator(_printable)]


class StreamOptions(Wire):
    include_usage: bool | None = None


class TemplateKwargs(Wire):
    enable_thinking: bool | None = None


class PlainFormat(Wire):
    type: Literal["text", "json_object"]


class JsonSchema(Wire):
    """The schema is enforced whatever `strict` says; `name` and `description` are labels that no model sees."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    description: str | None = None


class SchemaFormat(Wire):
    type: Literal["json_schema"]
    json_schema: JsonSchema


def _format(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else "text"
    return _FORMAT_TAGS.get(kind) if isinstance(kind, str) else None


_FORMAT_TAGS = {"text": "plain", "json_object": "plain", "json_schema": "schema"}
ResponseFormat = Annotated[
    Annotated[PlainFormat, tag("plain")] | Annotated[SchemaFormat, tag("schema")],
    choose(_format, f"must be one of: {', '.join(_FORMAT_TAGS)}", "type"),
]


class StructuredOutputs(Wire):
    """vLLM's field, with those of its constraints that we have: exactly one is given."""

    json_: dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = Field(None, min_length=1)


class ChatCompletionBody(Wire):
    """`user` names the client's end user, whose fair share of the engine the request takes; without it `cache_salt`
    does. It never changes a token. Neither does `cache_salt`, vLLM's field: a request shares the cached prefixes of
    prompts only with requests of the same salt, or, without one, with those without.
    `specprefill` asks for a sparse prompt, or forbids it; at least the part `specprefill_keep_pct` of it is computed.
    """

    model: str
    messages: Annotated[list[WireMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=_INT32_MAX)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: dict[str, Bias] | None = Field(None, max_length=MAX_LOGIT_BIAS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    stop: StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    min_tokens: int | None = Field(None, ge=0, le=_INT32_MAX)
    max_tokens: int | None = Field(None, ge=1, le=_INT32_MAX)
    max_completion_tokens: int | None = Field(None, ge=1, le=_INT32_MAX)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = Field(None, ge=-(2**31), le=_INT32_MAX)
    chat_template_kwargs: TemplateKwargs | None = None
    cache_salt: CacheSalt | None = None
    specprefill: bool | None = None
    specprefill_keep_pct: float | None = Field(None, ge=MIN_KEEP, le=1)
    user: str | None = Field(None, max_length=MAX_USER_CHARS)


def parse_chat(raw: dict[str, Any], rules: ReadingRules) -> ParsedRequest:
    """See request_reader.Parser."""
    body = parse_chat_completion(raw)
    rules.check_model(body.model)
    reject_unsupported_media(raw["messages"], rules.media_kinds)
    messages = normalize(raw["messages"], rules.system_policy, rules.volatile_patterns, rules.keeps_late_system)
    request = ChatRequest(request_id="", messages=messages, **request_fields(body))
    options = body.stream_options
    echo = ChatEcho(
        include_usage=options is not None and bool(options.include_usage),
        num_choices=request.num_choices,
        logprobs=request.logprobs is not None,
    )
    return ParsedRequest(request, classify(messages), bool(body.stream), echo)


def parse_chat_completion(raw: dict[str, Any]) -> ChatCompletionBody:
    """Raises InvalidRequest for the first field that is wrong or that we cannot honour."""
    for name, harmless in NEUTRAL.items():
        value = raw.get(name)
        if value is not None and not any(_same_json(value, other) for other in harmless):
            allowed = " or ".join(["null", *map(json.dumps, harmless)])
            raise InvalidRequest(f"`{name}` is not supported: it is {shown(value)}, and may only be {allowed}.", name)
    try:
        body = ChatCompletionBody.model_validate({k: v for k, v in raw.items() if k not in NEUTRAL})
    except ValidationError as error:
        raise from_validation(error) from None
    _check_together(body)
    return body


def _same_json(value: Any, other: Any) -> bool:
    """Equality of Python that tells true from 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _check_together(body: ChatCompletionBody) -> None:
    """What no field says alone."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("`stream_options` may only be sent with `stream`: true.", "stream_options")
    short, long = body.max_tokens, body.max_completion_tokens
    if short is not None and long is not None and short != long:
        raise InvalidRequest(
            f"`max_tokens` is {short} and `max_completion_tokens` is {long}: send one of them.", "max_completion_tokens"
        )
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest(
            f"`top_logprobs` is {body.top_logprobs}: it may only be sent with `logprobs`: true.", "top_logprobs"
        )
    if body.specprefill is False and body.specprefill_keep_pct is not None:
        raise InvalidRequest(
            f"`specprefill_keep_pct` is {body.specprefill_keep_pct}: it may not be sent with `specprefill`: false.",
            "specprefill_keep_pct",
        )
    for key in body.logit_bias or ():
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequest(
                f"`logit_bias` has the key {shown(key)}: it must be a token id, in at most ten digits "
                "without sign, spaces or leading zeros.",
                "logit_bias",
            )
    _check_grammar(body)


def _check_grammar(body: ChatCompletionBody) -> None:
    """One grammar at most, and nothing beside it that it would make meaningless."""
    asked, form = body.structured_outputs, body.response_format
    names = [] if form is None or form.type == "text" else ["response_format"]
    if asked is not None:
        if (asked.json_ is None) == (asked.regex is None):
            raise InvalidRequest("`structured_outputs` must hold either `json` or `regex`.", "structured_outputs")
        names.append("structured_outputs")
    if len(names) > 1:
        raise InvalidRequest("There are `response_format` and `structured_outputs`: send one of them.", names[1])
    if names and body.min_tokens:
        raise InvalidRequest(
            f"`min_tokens` is {body.min_tokens}: it may not be sent with `{names[0]}`, which may allow no more tokens.",
            "min_tokens",
        )
    if names and body.stop_token_ids:
        raise InvalidRequest(
            f"`stop_token_ids` may not be sent with `{names[0]}`, which says itself where the answer ends.",
            "stop_token_ids",
        )
    if names and body.chat_template_kwargs is not None and body.chat_template_kwargs.enable_thinking:
        raise InvalidRequest(
            f"`chat_template_kwargs.enable_thinking` is true: it may not be sent with `{names[0]}`, which holds from "
            "the first token on.",
            "chat_template_kwargs.enable_thinking",
        )


def request_fields(body: ChatCompletionBody) -> dict[str, Any]:
    """How the fields of a ChatRequest follow from those of the wire that shape the answer."""
    kwargs = body.chat_template_kwargs
    return {
        "max_tokens": body.max_completion_tokens if body.max_tokens is None else body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": 0 if body.top_k == -1 else body.top_k,
        "min_p": body.min_p,
        "seed": None if body.seed is None else body.seed % 2**64,
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "repetition_penalty": body.repetition_penalty,
        "logit_bias": tuple((int(key), bias) for key, bias in (body.logit_bias or {}).items()),
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        "stop": (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "min_tokens": body.min_tokens or 0,
        "num_choices": body.n or 1,
        "grammar": _grammar(body),
        "priority": body.priority or 0,
        "template_kwargs": {} if kwargs is None else kwargs.model_dump(exclude_none=True),
        "tenant": body.cache_salt or "",
        "client": body.user or body.cache_salt or "",
        "spec_prefill": body.specprefill,
        "spec_prefill_keep": body.specprefill_keep_pct,
    }


def _grammar(body: ChatCompletionBody) -> GrammarSpec | None:
    asked = body.structured_outputs
    if asked is not None and asked.regex is not None:
        return _grammar_of("regex", asked.regex, "structured_outputs.regex")
    if asked is not None and asked.json_ is not None:
        return _schema(asked.json_, "structured_outputs.json")
    if isinstance(body.response_format, SchemaFormat):
        return _schema(body.response_format.json_schema.schema_, "response_format.json_schema.schema")
    if body.response_format is not None and body.response_format.type == "json_object":
        return GrammarSpec("json_object", field="response_format")
    return None


def _schema(schema: dict[str, Any], field: str) -> GrammarSpec:
    """The order of the keys is the client's: it is the order in which the model writes them."""
    return _grammar_of("json_schema", json.dumps(schema, ensure_ascii=False), field)


def _grammar_of(kind: Literal["json_schema", "regex"], text: str, field: str) -> GrammarSpec:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"`{field}` has {len(text)} characters; the limit is {MAX_GRAMMAR_CHARS}.", field)
    return GrammarSpec(kind, text, field)

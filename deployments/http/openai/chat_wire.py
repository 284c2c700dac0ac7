"""The wire model of a chat completion, OpenAI's dialect with fields of vLLM and others.

It is converted to a ChatRequest, which later code need not validate again.
"""

import re
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from deployments.http.classify import classify
from deployments.http.errors import shown
from deployments.http.fields import FieldRules, UnknownFields, validate_body
from deployments.http.normalize import normalize
from deployments.http.openai.chat_encoder import ChatEcho
from deployments.http.openai.grammar_wire import GuidedChoice, ResponseFormat, StructuredOutputs, grammar_of
from deployments.http.openai.message_wire import WireMessage, canonical_messages
from deployments.http.openai.thinking_wire import (
    Budget,
    Effort,
    ReasoningField,
    ThinkingField,
    agreed,
    from_effort,
    from_reasoning,
    from_switch,
    from_thinking,
)
from deployments.http.openai.tool_wire import (
    Functions,
    LegacyChoice,
    Tools,
    WireToolChoice,
    check_tools,
    custom_names,
    tool_choice,
)
from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.http.wire import (
    INT32_MAX,
    MAX_MESSAGES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_USER_CHARS,
    STRING_OR_ARRAY,
    CacheSalt,
    OpenWire,
    Wire,
    tag,
)
from deployments.requests import ChatRequest, Thinking
from engine.errors import InvalidRequest
from engine.protocol import MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS
from engine.spec_prefill_config import MIN_KEEP

MAX_STOP_TOKEN_IDS = 64
MAX_CHOICES = 128
MAX_TEMPLATE_KWARGS = 64
MAX_FIELD_CHARS = 64
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")

FIELD_RULES = FieldRules(
    neutral={
        "modalities": (["text"],),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "verbosity": ("medium",),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "include_stop_str_in_output": (False,),
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        "echo": (False,),
        "best_of": (1,),
        "use_beam_search": (False,),
        "length_penalty": (1, 1.0),
        "truncate_prompt_tokens": (),
    },
    hints={"verbosity": ("low", "high")},
    refused={
        "audio": "",
        "prediction": "",
        "web_search_options": "",
        "moderation": "",
        "suffix": "",
        "guided_grammar": "Send `guided_json`, `guided_regex` or `guided_choice`.",
        "logits_processors": "",
        "bad_words": "",
        "allowed_token_ids": "",
        "prompt_logprobs": "",
        "documents": "",
        "chat_template": "The model's own template is used.",
        "mm_processor_kwargs": "",
    },
    informational=frozenset(
        {
            "metadata",
            "prompt_cache_key",
            "prompt_cache_retention",
            "prompt_cache_options",
            "cache_control",
            "client_metadata",
            "guided_decoding_backend",
            "litellm_params",
            "usage",
        }
    ),
)

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[
    Annotated[Annotated[str, Field(max_length=MAX_STOP_CHARS)], tag("string")]
    | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True), tag("array")],
    STRING_OR_ARRAY,
]
"""An empty string means no stop string, like null."""
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Bias = Annotated[float, Field(ge=-100, le=100)]


MaxTokens = Annotated[
    Annotated[int, Field(ge=1, le=INT32_MAX)] | None, BeforeValidator(lambda value: None if value == -1 else value)
]
"""An upper limit; -1 and null mean no limit."""


class StreamOptions(Wire):
    """Options of a stream.

    `include_usage` adds a last chunk with the token counts. `continuous_usage_stats` (vLLM's field) adds the counts so
    far to each chunk with output.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TemplateKwargs(OpenWire):
    """Variables of the chat template; those that it does not know are ignored and reported."""

    model_config = ConfigDict(extra="allow")
    enable_thinking: bool | None = None

    @property
    def others(self) -> dict[str, Any]:
        return {name: value for name, value in (self.model_extra or {}).items() if value is not None}


class GenerationBody(Wire):
    """The fields that chat completions and completions have in common.

    `user`, else `safety_identifier`, else `cache_salt` names the client for fair scheduling; it never changes a token.
    Requests share cached prefixes only with requests of the same `cache_salt` (vLLM's field), or, without one, with
    other requests without one. `specprefill` requests or forbids sparse prefill; `specprefill_keep_pct` is the least
    fraction of the scored tokens that is computed.
    """

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
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


class ChatCompletionBody(GenerationBody):
    """A chat completion, with legacy `functions` and the fields by which clients request thinking."""

    messages: Annotated[list[WireMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    max_tokens: MaxTokens = None
    max_completion_tokens: MaxTokens = None
    tools: Tools | None = None
    tool_choice: WireToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Functions | None = None
    function_call: LegacyChoice | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingField | None = None
    reasoning: ReasoningField | None = None
    thinking_budget: Budget | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    continue_final_message: bool | None = None


def parse_chat(raw: dict[str, Any], rules: ReadingRules) -> ParsedRequest:
    """Parse a request for a chat completion; see request_reader.PARSERS."""
    body, ignored = parse_chat_completion(raw, rules.unknown_fields)
    rules.check_model(body.model)
    canonical = canonical_messages(body.messages, rules)
    messages = normalize(canonical, rules.system_policy, rules.volatile_patterns, rules.keeps_late_system)
    kwargs, unknown = template_kwargs(body, rules)
    ignored += unknown
    fields = request_fields(body)
    if (switch := kwargs.pop(SWITCH, None)) is not None:
        fields["thinking"] = _switched(fields["thinking"], switch)
    request = ChatRequest(request_id="", messages=messages, **fields, template_kwargs=kwargs)
    if body.continue_final_message:
        request = _continued(request)
    options = body.stream_options or StreamOptions()
    echo = ChatEcho(
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        num_choices=request.num_choices,
        logprobs=request.logprobs is not None,
        customs=custom_names(body.tools or ()),
    )
    return ParsedRequest(request, classify(messages), bool(body.stream), echo, ignored)


SWITCH = "thinking"
"""Name by which some templates know `enable_thinking`."""


def template_kwargs(body: ChatCompletionBody, rules: ReadingRules) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the variables that the template knows, and the paths of the others. Raises InvalidRequest."""
    sent = {} if body.chat_template_kwargs is None else body.chat_template_kwargs.others
    if len(sent) > MAX_TEMPLATE_KWARGS:
        raise InvalidRequest(
            f"`chat_template_kwargs` has {len(sent)} names; the limit is {MAX_TEMPLATE_KWARGS}.", "chat_template_kwargs"
        )
    for name in ("tools", "documents"):
        if name in sent:
            path = f"chat_template_kwargs.{name}"
            raise InvalidRequest(f"`{path}` is not supported: send tools in `tools`, documents in `messages`.", path)
    known = {name: value for name, value in sent.items() if name in rules.model.template_variables}
    return known, tuple(f"chat_template_kwargs.{name}"[:MAX_FIELD_CHARS] for name in sent if name not in known)


def _switched(asked: Thinking | None, switch: Any) -> Thinking | None:
    """Return the thinking with the template's own switch. Raises InvalidRequest if it contradicts another field."""
    path = f"chat_template_kwargs.{SWITCH}"
    if not isinstance(switch, bool):
        raise InvalidRequest(f"`{path}` is {shown(switch)}: it must be true or false.", path)
    return agreed(iter((asked, from_switch(switch, path))))


def parse_chat_completion(
    raw: dict[str, Any], unknown: UnknownFields = "report"
) -> tuple[ChatCompletionBody, tuple[str, ...]]:
    """Validate a body; return it and the names of its unknown fields. Raises InvalidRequest for the first bad field."""
    if raw.get("continue_final_message") is True and raw.get("add_generation_prompt") is False:
        raw = {name: value for name, value in raw.items() if name != "add_generation_prompt"}  # vLLM requires the pair
    body, ignored = validate_body(ChatCompletionBody, raw, FIELD_RULES, unknown)
    check_together(body)
    return body, ignored


def check_together(body: ChatCompletionBody) -> None:
    """Check the rules that involve several fields. Raises InvalidRequest."""
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
                f"`logit_bias` has the key {shown(key)}: it must be a token id of at most ten digits "
                "without sign, spaces or leading zeros.",
                "logit_bias",
            )
    _check_grammar(body)


def _check_grammar(body: ChatCompletionBody) -> None:
    """Check that there is at most one grammar, and no field that contradicts it. Raises InvalidRequest."""
    names = [name for name in _GRAMMAR_FIELDS if getattr(body, name) is not None]
    if body.response_format is not None and body.response_format.type == "text":
        names.remove("response_format")
    asked = body.structured_outputs
    if asked is not None and sum(value is not None and value is not False for _, value in asked) != 1:
        raise InvalidRequest(
            "`structured_outputs` must have exactly one of `json`, `regex`, `choice` and `json_object`.",
            "structured_outputs",
        )
    if len(names) > 1:
        raise InvalidRequest(f"`{names[0]}` and `{names[1]}` may not be sent together: send one of them.", names[1])
    names += [name for name in ("tools", "functions") if getattr(body, name)]
    for name in ("min_tokens", "stop_token_ids", "ignore_eos"):
        value = getattr(body, name)
        if names and value:
            raise InvalidRequest(
                f"`{name}` is {shown(value)}: it may not be sent with `{names[0]}`, which determines where the answer "
                "ends.",
                name,
            )


_GRAMMAR_FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice")


def request_fields(body: ChatCompletionBody) -> dict[str, Any]:
    """Return the fields of a ChatRequest besides its messages. Raises InvalidRequest."""
    user = body.user or body.safety_identifier
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
        "stop": tuple([body.stop] if isinstance(body.stop, str) and body.stop else body.stop or ()),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "min_tokens": body.min_tokens or 0,
        "num_choices": body.n or 1,
        "grammar": grammar_of(
            body.response_format,
            body.structured_outputs,
            body.guided_json,
            body.guided_regex,
            body.guided_choice,
        ),
        "priority": body.priority or 0,
        "tenant": body.cache_salt or "",
        "client": user or body.cache_salt or "",
        "ignore_eos": bool(body.ignore_eos),
        "thinking": _thinking(body),
        **_tool_fields(body),
        "spec_prefill": body.specprefill,
        "spec_prefill_keep": body.specprefill_keep_pct,
    }


def _continued(request: ChatRequest) -> ChatRequest:
    """Return the request with the answer continuing the final message, without a thought. Raises InvalidRequest."""
    last, field = request.messages[-1], "continue_final_message"
    text = last.get("content")
    if last["role"] != "assistant" or last.get("tool_calls") or not isinstance(text, str) or not text:
        raise InvalidRequest(
            f"`{field}` is true: the last message must be an assistant's, with text and no call.", field
        )
    if text != text.rstrip():
        raise InvalidRequest(f"`{field}` is true: the last message may not end with white space.", field)
    if request.grammar is not None:
        raise InvalidRequest(f"`{field}` may not be sent together with `{request.grammar.field}`.", field)
    if request.thinking is not None and request.thinking.mode == "on":
        raise InvalidRequest(f"`{field}` may not be sent while thinking is enabled.", field)
    thinking = None if request.thinking is None else replace(request.thinking, mode="off", budget=None)
    return replace(request, thinking=thinking, continue_final_message=True)


def _tool_fields(body: ChatCompletionBody) -> dict[str, Any]:
    """Return the fields of the tools; `functions` and `function_call` are legacy names of `tools` and `tool_choice`."""
    if body.functions and body.tools:
        raise InvalidRequest("`tools` and `functions` may not be sent together: send only `tools`.", "functions")
    legacy = [function.tool() for function in body.functions or ()]
    sent = body.tools or ()
    tools = check_tools([*(tool.tool(f"tools[{i}]") for i, tool in enumerate(sent)), *legacy])
    if body.tool_choice is None and body.function_call is not None:
        choice = tool_choice(body.function_call, tools, field="function_call")
    else:
        choice = tool_choice(body.tool_choice, tools, custom_names(sent))
    return {
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls is not False and not body.functions,
    }


def _thinking(body: ChatCompletionBody) -> Thinking | None:
    kwargs = body.chat_template_kwargs or TemplateKwargs()
    asked = (
        from_effort(body.reasoning_effort, "reasoning_effort") if body.reasoning_effort else None,
        from_thinking(body.thinking, "thinking") if body.thinking else None,
        from_reasoning(body.reasoning, "reasoning") if body.reasoning else None,
        _switch(body.enable_thinking, "enable_thinking"),
        _switch(kwargs.enable_thinking, "chat_template_kwargs.enable_thinking"),
    )
    return agreed(iter(asked), body.thinking_budget)


def _switch(value: bool | None, field: str) -> Thinking | None:
    return None if value is None else from_switch(value, field)

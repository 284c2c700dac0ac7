"""The wire models of tokenize and detokenize in vLLM's dialect, and their conversion to ChatRequests."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from deployments.http.fields import FieldRules, validate_body
from deployments.http.openai.chat_wire import TemplateKwargs, TokenId, parse_chat
from deployments.http.openai.message_wire import WireMessage
from deployments.http.openai.raw_prompt_wire import MAX_PROMPT_TOKENS
from deployments.http.openai.tool_wire import Tools
from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.http.wire import MAX_MESSAGES, Wire
from deployments.requests import ChatRequest, Route
from engine.errors import InvalidRequest


class TokenizeTextBody(Wire):
    """A raw prompt to tokenize. `model` is optional."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(Wire):
    """A conversation to tokenize; `model` is optional.

    Any other field of a chat completion is accepted, and those that affect the prompt have an effect.
    """

    model: str | None = None
    messages: Annotated[list[WireMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: Tools | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Wire):
    """Token ids to decode. `model` is optional."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True)]


@dataclass(frozen=True)
class TokenizeEcho:
    """The fields of the request's body that its answer depends on."""

    returns_texts: bool
    """Whether to return the text of each token."""


def parse_tokenize(raw: dict[str, Any], rules: ReadingRules) -> ParsedRequest:
    """Parse a request to tokenize a raw prompt or a conversation; see request_reader.PARSERS."""
    if "prompt" in raw and "messages" in raw:
        raise InvalidRequest("`prompt` and `messages` may not be sent together: send one of them.", "prompt")
    raw = {"model": rules.model_name} | {name: value for name, value in raw.items() if value is not None}
    return _parse_messages(raw, rules) if "messages" in raw else _parse_prompt(raw, rules)


def _parse_messages(raw: dict[str, Any], rules: ReadingRules) -> ParsedRequest:
    """Parse messages like a chat completion."""
    echo = _echo(raw.pop("return_token_strs", None))
    parsed = parse_chat(raw, rules)
    return ParsedRequest(parsed.request, parsed.route, False, echo, parsed.ignored)


def _parse_prompt(raw: dict[str, Any], rules: ReadingRules) -> ParsedRequest:
    body, ignored = validate_body(TokenizeTextBody, raw, FieldRules(), rules.unknown_fields)
    rules.check_model(body.model or rules.model_name)
    request = ChatRequest(
        request_id="", messages=(), raw_prompt=body.prompt, adds_special_tokens=body.add_special_tokens is not False
    )
    return ParsedRequest(request, Route.TEXT, False, _echo(body.return_token_strs), ignored)


def _echo(returns_texts: Any) -> TokenizeEcho:
    if not isinstance(returns_texts, bool | None):
        raise InvalidRequest("`return_token_strs` must be true or false.", "return_token_strs")
    return TokenizeEcho(bool(returns_texts))


def parse_detokenize(raw: dict[str, Any], rules: ReadingRules) -> ParsedRequest:
    """Parse a request to decode tokens, which become the raw prompt; see request_reader.PARSERS."""
    body, ignored = validate_body(DetokenizeBody, raw, FieldRules(), rules.unknown_fields)
    rules.check_model(body.model or rules.model_name)
    request = ChatRequest(request_id="", messages=(), raw_prompt=tuple(body.tokens), prompt_field="tokens")
    return ParsedRequest(request, Route.TEXT, False, None, ignored)

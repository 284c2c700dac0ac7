"""The OpenAI dialect: its wire model, and the app with its routes.

A request is parsed into validity here, once. What we honour is in `ChatCompletionBody`; a field that only has a
harmless value in `NEUTRAL` may be sent with it; every other field is refused by name.
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.chat import MEDIA_KINDS, Backend, ChatRequest, Generation, Message
from deployments.http.classify import classify, reject_unsupported_media
from deployments.http.config import HttpConfig
from deployments.http.errors import CHOICE, Converter, ErrorMap, ModelNotFound, NotReady, from_validation, shown
from deployments.http.normalize import ROLES, normalize
from deployments.http.security import BodyLimit, RequestId, parse_json_object
from deployments.http.stream import Completion, CompletionResponse
from engine.protocol import EngineFailed, InvalidRequest

MAX_MESSAGES = 4096
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
_INT32_MAX = 2**31 - 1

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
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


class Wire(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def _tag(name: str) -> Tag:
    """Tags turn up in the paths of errors; the NUL tells them from the client's own field names."""
    return Tag(f"\0{name}")


def _choose(by: Callable[[Any], str | None], rule: str, field: str = "") -> Discriminator:
    """by: value -> tag. field: where the rule is about a field of the value, for `errors.from_validation`."""
    return Discriminator(
        lambda value: None if (tag := by(value)) is None else f"\0{tag}",
        custom_error_type=f"{CHOICE}{field}",
        custom_error_message=rule,
    )


def _role(message: Any) -> str | None:
    role = message.get("role") if isinstance(message, dict) else "user"
    return role if isinstance(role, str) else None


def _type(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else "text"
    return _PART_TAGS.get(kind) if isinstance(kind, str) else None


def _form(value: Any) -> str | None:
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else None


_PART_TAGS = dict.fromkeys(MEDIA_KINDS, "media") | {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "image_url": "image_url",
    "input_image": "image_url",
    "image": "image",
}
_FORMS = _choose(_form, "must be a string or an array")


class TextPart(Wire):
    type: str
    text: str


class ImageSource(Wire):
    url: str = Field(min_length=1)
    detail: Literal["auto", "high"] | None = None  # pictures are always read at their full size


Picture = Annotated[ImageSource, BeforeValidator(lambda value: {"url": value} if isinstance(value, str) else value)]


class ImageUrlPart(Wire):
    type: str
    image_url: Picture


class ImagePart(Wire):
    type: str
    image: Picture


class MediaPart(Wire):
    """Video, audio and files: whoever can read that kind knows its shape."""

    model_config = ConfigDict(extra="allow")
    type: str


Part = Annotated[
    Annotated[TextPart, _tag("text")]
    | Annotated[ImageUrlPart, _tag("image_url")]
    | Annotated[ImagePart, _tag("image")]
    | Annotated[MediaPart, _tag("media")],
    _choose(_type, f"must be one of: {', '.join(sorted(_PART_TAGS))}", "type"),
]
Content = Annotated[Annotated[str, _tag("string")] | Annotated[list[Part], _tag("array")], _FORMS]


class FunctionCall(Wire):
    name: str
    arguments: str


class ToolCall(Wire):
    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # clients that add up a stream's deltas leave it in


class PlainMessage(Wire):
    role: Literal["system", "developer", "user"]
    content: Content
    name: str | None = None


class AssistantMessage(Wire):
    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolMessage(Wire):
    role: Literal["tool"]
    content: Content
    tool_call_id: str = Field(min_length=1)
    name: str | None = None


class FunctionMessage(Wire):
    role: Literal["function"]
    content: Content
    name: str = Field(min_length=1)


WireMessage = Annotated[
    Annotated[PlainMessage, _tag("system")]
    | Annotated[PlainMessage, _tag("developer")]
    | Annotated[PlainMessage, _tag("user")]
    | Annotated[AssistantMessage, _tag("assistant")]
    | Annotated[ToolMessage, _tag("tool")]
    | Annotated[FunctionMessage, _tag("function")],
    _choose(_role, f"must be one of: {', '.join(ROLES)}", "role"),
]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[
    Annotated[StopString, _tag("string")]
    | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), _tag("array")],
    _FORMS,
]


class StreamOptions(Wire):
    include_usage: bool | None = None


class TemplateKwargs(Wire):
    enable_thinking: bool | None = None


class ChatCompletionBody(Wire):
    """`user` names the client's end user and never changes a token."""

    model: str
    messages: list[WireMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=_INT32_MAX)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: StopStrings | None = None
    max_tokens: int | None = Field(None, ge=1, le=_INT32_MAX)
    max_completion_tokens: int | None = Field(None, ge=1, le=_INT32_MAX)
    chat_template_kwargs: TemplateKwargs | None = None
    user: str | None = None


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
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("`stream_options` may only be sent with `stream`: true.", "stream_options")
    short, long = body.max_tokens, body.max_completion_tokens
    if short is not None and long is not None and short != long:
        raise InvalidRequest(
            f"`max_tokens` is {short} and `max_completion_tokens` is {long}: send one of them.", "max_completion_tokens"
        )
    return body


def _same_json(value: Any, other: Any) -> bool:
    """Equality of Python that tells true from 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _sampling_fields(body: ChatCompletionBody) -> dict[str, Any]:
    """How the fields of a ChatRequest follow from those of the wire that shape the answer."""
    kwargs = body.chat_template_kwargs
    return {
        "max_tokens": body.max_completion_tokens if body.max_tokens is None else body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": 0 if body.top_k == -1 else body.top_k,
        "min_p": body.min_p,
        "seed": None if body.seed is None else body.seed % 2**64,
        "stop": (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        "template_kwargs": {} if kwargs is None else kwargs.model_dump(exclude_none=True),
    }


class OpenAIRoutes:
    """The endpoints, and what they need to know of the model."""

    def __init__(
        self,
        backend: Backend,
        config: HttpConfig,
        media_kinds: frozenset[str],
        keeps_late_system: bool,
        errors: ErrorMap,
    ):
        self._backend = backend
        self._config = config
        self._media_kinds = media_kinds
        self._keeps_late_system = keeps_late_system
        self._errors = errors
        self._created = int(time.time())

    async def chat_completions(self, request: Request) -> Response:
        raw = parse_json_object(await request.body())
        body = parse_chat_completion(raw)
        self._check_model(body.model)
        completion = Completion(
            id=f"chatcmpl-{secrets.token_hex(16)}",
            model=self._backend.model_name,
            created=int(time.time()),
            stream=bool(body.stream),
            include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        )
        messages = self._normalized(raw["messages"])
        chat = ChatRequest(request_id=completion.id, messages=messages, **_sampling_fields(body))
        return CompletionResponse(lambda: self._start(chat), completion, self._errors, request.state.request_id)

    def _normalized(self, raw: list[Message]) -> tuple[Message, ...]:
        reject_unsupported_media(raw, self._media_kinds)
        config = self._config
        return normalize(raw, config.system_policy, config.volatile_patterns, self._keeps_late_system)

    async def _start(self, chat: ChatRequest) -> Generation:
        try:
            return await self._backend.start(chat, classify(chat.messages))
        except Exception as error:
            converted = self._errors.convert(error)
            if isinstance(converted, EngineFailed) and (reason := await self._backend.not_ready()) is not None:
                raise NotReady(reason) from error
            raise

    def _check_model(self, name: str) -> None:
        if name != self._backend.model_name:
            raise ModelNotFound(name, self._backend.model_name)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return JSONResponse(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._backend.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "orchard",
        }

    async def live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(self, request: Request) -> Response:
        reason = await self._backend.not_ready()
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": reason}, 503)

    async def status(self, request: Request) -> Response:
        return JSONResponse(await self._backend.status())


def create_app(
    backend: Backend,
    config: HttpConfig,
    media_kinds: frozenset[str],
    keeps_late_system: bool = False,
    converters: Mapping[type[Exception], Converter] | None = None,
) -> FastAPI:
    """The whole HTTP face of a backend.

    media_kinds: what the model reads besides text. keeps_late_system: see normalize. converters: make our errors of
    the transport's. Under Ray this is called from `__serve_build_asgi_app__`, when the backend exists.
    """
    errors = ErrorMap(converters)
    routes = OpenAIRoutes(backend, config, media_kinds, keeps_late_system, errors)
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.add_route("/v1/chat/completions", errors.guard(routes.chat_completions), ["POST"])
    app.add_route("/v1/models", errors.guard(routes.models), ["GET"])
    app.add_route("/v1/models/{model:path}", errors.guard(routes.model), ["GET"])
    app.add_route("/v1/status", errors.guard(routes.status), ["GET"])
    app.add_route("/health/live", errors.guard(routes.live), ["GET"])
    app.add_route("/health/ready", errors.guard(routes.ready), ["GET"])
    app.add_exception_handler(HTTPException, errors.handle_http_exception)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes, errors=errors)
    app.add_middleware(RequestId)
    return app

"""The wire model of an embedding request in OpenAI's dialect, and its conversion to an EmbedRequest."""

from typing import Any, Literal

from pydantic import Field

from deployments.http.fields import FieldRules, validate_body
from deployments.http.openai.raw_prompt_wire import RawPrompts, prompts_of
from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.http.wire import INT32_MAX, MAX_USER_CHARS, Wire
from deployments.requests import ChatRequest, EmbedRequest, Route

FIELD_RULES = FieldRules(
    neutral={
        "add_special_tokens": (True,),
        "truncate_prompt_tokens": (),
        "normalize": (True,),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "service_tier": ("auto", "default"),
    },
    refused={
        "messages": "Send the text as `input`.",
        "input_type": "Write the instruction that the model expects into `input`.",
    },
    informational=frozenset({"metadata", "litellm_params"}),
)


class EmbeddingsBody(Wire):
    """An embedding request.

    `dimensions` shortens the vectors of an embedding model; `prompt_name` names one of its prompts, such as query.
    """

    model: str
    input: RawPrompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=INT32_MAX)
    prompt_name: str | None = Field(None, min_length=1, max_length=256)
    priority: int | None = Field(None, ge=-(2**31), le=INT32_MAX)
    user: str | None = Field(None, max_length=MAX_USER_CHARS)
    safety_identifier: str | None = Field(None, max_length=MAX_USER_CHARS)


def parse_embeddings(raw: dict[str, Any], rules: ReadingRules) -> ParsedRequest:
    """Parse an embedding request; see request_reader.PARSERS.

    The echo is the EmbedRequest, and whether to write vectors as base64.
    """
    body, ignored = validate_body(EmbeddingsBody, raw, FIELD_RULES, rules.unknown_fields)
    rules.check_model(body.model)
    prompts, fields = prompts_of(body.input, "input")
    client = body.user or body.safety_identifier or ""
    wanted = EmbedRequest(
        request_id="",
        prompts=prompts,
        fields=fields,
        num_dimensions=body.dimensions,
        prompt_name=body.prompt_name,
        client=client,
        priority=body.priority or 0,
    )
    request = ChatRequest(request_id="", messages=(), client=client)
    return ParsedRequest(request, Route.TEXT, False, (wanted, body.encoding_format == "base64"), ignored)

"""The fields that Ollama's chat and generate have in common, and their conversion to those of a ChatRequest."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from deployments.http.effort import EFFORT_BUDGETS, template_level
from deployments.http.fields import FieldRules
from deployments.http.grammar import schema_grammar
from deployments.http.ollama.options_wire import OllamaOptions, sampling_fields
from deployments.http.wire import Wire, choose, tag
from deployments.requests import Thinking
from engine.errors import InvalidRequest
from engine.protocol import MAX_TOP_LOGPROBS, GrammarSpec

NEUTRAL: dict[str, tuple[Any, ...]] = {"truncate": (False,), "shift": (False,), "_debug_render_only": (False,)}
HINTS: dict[str, tuple[Any, ...]] = {"truncate": (True,), "shift": (True,)}
"""A conversation that outgrows the context is refused, never cut."""

INFORMATIONAL = frozenset({"keep_alive"})
"""The model stays loaded as long as the server runs."""

FIELD_RULES = FieldRules(neutral=NEUTRAL, hints=HINTS, informational=INFORMATIONAL)


def _think_form(value: Any) -> str | None:
    return "switch" if isinstance(value, bool) else "level" if value in ("low", "medium", "high", "max") else None


Think = Annotated[
    Annotated[bool, tag("switch")] | Annotated[Literal["low", "medium", "high", "max"], tag("level")],
    choose(_think_form, 'must be true, false, "low", "medium", "high" or "max"'),
]


def _format_form(value: Any) -> str | None:
    return "schema" if isinstance(value, dict) else "name" if value in ("", "json") else None


Format = Annotated[
    Annotated[Literal["", "json"], tag("name")] | Annotated[dict[str, Any], tag("schema")],
    choose(_format_form, 'must be "json", a JSON schema or an empty string'),
]


class GenerationBody(Wire):
    """The fields of chat and generate. An answer is streamed unless `stream` is false.

    Without `think` a model thinks if its template can.
    """

    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = None
    format: Format | None = None
    options: OllamaOptions | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)


@dataclass(frozen=True)
class GenerationEcho:
    """The fields of the request's body that its answer depends on."""

    model: str
    """The name by which the client asked for the model."""
    logprobs: bool = False
    is_load: bool = False
    """Whether there is no prompt: Ollama's way to ask that the model is loaded."""


def generation_fields(body: GenerationBody) -> dict[str, Any]:
    """Return the fields of a ChatRequest besides its messages. Raises InvalidRequest."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest(
            f"`top_logprobs` is {body.top_logprobs}: it may only be sent with `logprobs`: true.", "top_logprobs"
        )
    return {
        **sampling_fields(body.options),
        "grammar": _grammar(body.format),
        "thinking": thinking_of(body.think),
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }


def thinking_of(think: bool | str | None) -> Thinking:
    """Return the thinking that the field `think` asks for."""
    match think:
        case None:
            return Thinking("auto", field="think")
        case bool():
            return Thinking("on" if think else "off", field="think")
        case level:
            return Thinking("on", EFFORT_BUDGETS[level], template_level(level), "think")


def _grammar(form: str | dict[str, Any] | None) -> GrammarSpec | None:
    if isinstance(form, dict):
        return schema_grammar(form, "format")
    return GrammarSpec("json_object", field="format") if form else None

"""Types of text that rerank and score share in their wire models, and the fields that neither model has."""

from typing import Annotated, Any

from pydantic import Field

from deployments.http.fields import FieldRules
from deployments.http.openai.raw_prompt_wire import MAX_PROMPTS
from deployments.http.wire import INT32_MAX, MAX_USER_CHARS, OpenWire, Wire, choose, tag
from engine.errors import InvalidRequest

MAX_INSTRUCTION_CHARS = 16_384

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "padding": ("do_not_pad",),
    "mm_processor_kwargs": ({},),
    "service_tier": ("auto", "default"),
}
REFUSED = {
    "softmax": "Send `use_activation`: one score has no softmax.",
    "chat_template": "The checkpoint's own template is used.",
    "chat_template_kwargs": "Send a reranker's instruction as `instruction`.",
}
INFORMATIONAL = frozenset({"metadata", "litellm_params", "cache_salt"})
"""Nothing of these prompts is cached, so a salt changes nothing."""


def field_rules(neutral: dict[str, tuple[Any, ...]], refused: dict[str, str]) -> FieldRules:
    """Return the rules of one route: the common ones and its own."""
    return FieldRules({**NEUTRAL, **neutral}, refused={**REFUSED, **refused}, informational=INFORMATIONAL)


class TextObject(OpenWire):
    """A text as an object; fields that would have to be scored besides `text` must be null."""

    text: str
    image: None = None
    image_url: None = None
    video: None = None
    video_url: None = None
    content: None = None


def _form(value: Any) -> str | None:
    return "string" if isinstance(value, str) else "object" if isinstance(value, dict) else None


ScoredText = Annotated[
    Annotated[str, tag("string")] | Annotated[TextObject, tag("object")],
    choose(_form, "must be a string or an object with `text`"),
]
ScoredTexts = Annotated[list[ScoredText], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


class ScoringBody(Wire):
    """The fields of both requests."""

    model: str
    instruction: str | None = Field(None, min_length=1, max_length=MAX_INSTRUCTION_CHARS)
    use_activation: bool | None = None
    activation: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), le=INT32_MAX)
    user: str | None = Field(None, max_length=MAX_USER_CHARS)
    safety_identifier: str | None = Field(None, max_length=MAX_USER_CHARS)

    @property
    def has_activation(self) -> bool:
        """Whether scores are probabilities. Raises InvalidRequest if the two fields for it disagree."""
        sent = {value for value in (self.use_activation, self.activation) if value is not None}
        if len(sent) > 1:
            raise InvalidRequest(
                "`activation` is the older name of `use_activation`: both must have the same value.", "activation"
            )
        return sent != {False}

    @property
    def client(self) -> str:
        return self.user or self.safety_identifier or ""


def text_of(value: str | TextObject) -> str:
    """Return the text of a value of either form."""
    return value if isinstance(value, str) else value.text

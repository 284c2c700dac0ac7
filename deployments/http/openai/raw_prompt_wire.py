"""The wire model of raw prompts: texts or token ids, one or several."""

from typing import Annotated, Any

from pydantic import Field

from deployments.http.wire import INT32_MAX, choose, tag

MAX_PROMPTS = 2048
"""Prompts of one request, OpenAI's limit for embeddings."""

MAX_PROMPT_TOKENS = 2**20
"""Token ids of one prompt; the planner applies the lower limit of the context."""


def _form(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    if isinstance(first, str):
        return "texts"
    if isinstance(first, list):
        return "token lists"
    return "tokens" if isinstance(first, int) and not isinstance(first, bool) else None


TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, le=INT32_MAX)]], Field(min_length=1, max_length=MAX_PROMPT_TOKENS, fail_fast=True)
]
RawPrompts = Annotated[
    Annotated[str, tag("text")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), tag("texts")]
    | Annotated[TokenIds, tag("tokens")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), tag("token lists")],
    choose(_form, "must be a string, an array of strings, an array of token ids, or an array of such arrays"),
]

RawPrompt = str | tuple[int, ...]


def prompts_of(value: str | list[Any], field: str) -> tuple[tuple[RawPrompt, ...], tuple[str, ...]]:
    """Return the prompts, and the client's field of each."""
    if isinstance(value, str):
        return (value,), (field,)
    if isinstance(value[0], int):
        return (tuple(value),), (field,)
    prompts = tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in value)
    return prompts, tuple(f"{field}[{index}]" for index in range(len(prompts)))

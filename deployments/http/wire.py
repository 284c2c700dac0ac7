"""Bases of the wire models of all dialects: strictness, tags of unions, choices by a field."""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Discriminator, Tag

from deployments.http.errors import CHOICE


class Wire(BaseModel):
    """A value of a request body. Types are not converted, and unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class OpenWire(Wire):
    """A value inside of a message, in which clients send back all kinds of fields: unknown ones are dropped."""

    model_config = ConfigDict(extra="ignore")


def tag(name: str) -> Tag:
    """Tags turn up in the paths of errors; the NUL tells them from the client's own field names."""
    return Tag(f"\0{name}")


def choose(by: Callable[[Any], str | None], rule: str, field: str = "") -> Discriminator:
    """by: value -> tag. field: where the rule is about a field of the value, for `errors.from_validation`."""
    return Discriminator(
        lambda value: None if (tag := by(value)) is None else f"\0{tag}",
        custom_error_type=f"{CHOICE}{field}",
        custom_error_message=rule,
    )


def _form(value: Any) -> str | None:
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else None


STRING_OR_ARRAY = choose(_form, "must be a string or an array")

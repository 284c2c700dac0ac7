"""Base classes, limits and common fields of the wire models of all dialects, and discriminators for their unions."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from deployments.http.errors import CHOICE

INT32_MAX = 2**31 - 1
MAX_MESSAGES = 4096
MAX_TOOLS = 1024
"""Tools of one request."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_USER_CHARS = 1024
MAX_CACHE_SALT_CHARS = 128


class Wire(BaseModel):
    """A value of a request body: no type conversion, unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class OpenWire(Wire):
    """A value inside a message: unknown fields are dropped, since clients send back fields of other servers."""

    model_config = ConfigDict(extra="ignore")


def tag(name: str) -> Tag:
    """Return a union tag. Its NUL prefix distinguishes it from field names in the paths of errors."""
    return Tag(f"\0{name}")


def choose(by: Callable[[Any], str | None], rule: str, field: str = "") -> Discriminator:
    """Return the discriminator of a union.

    Args:
        by: Maps a value to a tag; None: no member accepts the value.
        rule: Error message for such a value.
        field: Field of the value that discriminates, for `errors.from_validation`; '' for the value itself.
    """
    return Discriminator(
        lambda value: None if (tag := by(value)) is None else f"\0{tag}",
        custom_error_type=f"{CHOICE}{field}",
        custom_error_message=rule,
    )


def tag_among(*kinds: str) -> Callable[[Any], str | None]:
    """Return a discriminator by `type`; a value that is no object counts as the first kind, which then refuses it."""

    def tag_of(value: Any) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else kinds[0]
        return kind if kind in kinds else None

    return tag_of


def _form(value: Any) -> str | None:
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else None


STRING_OR_ARRAY = choose(_form, "must be a string or an array")


def _printable(value: str) -> str:
    if not value.isprintable():
        raise PydanticCustomError("not_printable", "must contain only printable characters")
    return value


CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARS), AfterValidator(_printable)]
"""vLLM's field: requests share cached prefixes only with requests of the same salt."""

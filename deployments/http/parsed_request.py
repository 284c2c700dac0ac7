"""ParsedRequest: a parsed body of any dialect; ReadingRules: the server's settings by which it was parsed."""

import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from deployments.http.errors import ModelNotFound
from deployments.http.fields import UnknownFields
from deployments.http.model_facts import ModelFacts
from deployments.http.normalize import DEFAULT_VOLATILE_PATTERNS, SystemPolicy
from deployments.http.response_store import StoreResponses
from deployments.requests import ChatRequest, PackedMessages, Route
from engine.errors import InvalidRequest

LATEST = ":latest"
"""May follow every name of the model: clients take names from Ollama's list, and send them to other routes as well."""


@dataclass(frozen=True)
class ModelDefaults:
    """Facts of the checkpoint that the HTTP API depends on."""

    template_variables: frozenset[str] = frozenset()
    """Names that occur in the chat template."""
    temperature: float = 1.0
    """The temperature of requests that set none."""
    top_p: float = 1.0
    """The top_p of requests that set none."""
    facts: ModelFacts = field(default_factory=ModelFacts)


@dataclass(frozen=True)
class ReadingRules:
    """The server's settings that affect how a body is parsed."""

    model_name: str
    """The name of the model in answers."""
    media_kinds: frozenset[str]
    """Kinds of media that the model reads besides text."""
    keeps_late_system: bool = False
    """See `normalize`."""
    system_policy: SystemPolicy = "hoist"
    volatile_patterns: tuple[re.Pattern[str], ...] = DEFAULT_VOLATILE_PATTERNS
    aliases: frozenset[str] = frozenset()
    """Additional names that `model` may have."""
    unknown_fields: UnknownFields = "report"
    """Whether unknown fields at the top of a body are ignored and reported, or refused."""
    model: ModelDefaults = ModelDefaults()
    store_responses: StoreResponses = "asked"
    """Which responses are stored, see HttpConfig."""

    @cached_property
    def may_backtrack(self) -> bool:
        """Whether a pattern is the operator's own, whose matching time is unbounded."""
        return not set(self.volatile_patterns) <= set(DEFAULT_VOLATILE_PATTERNS)

    def check_media(self, kind: str, path: str) -> None:
        """Raise InvalidRequest for a kind of media, such as `image`, that the model does not read."""
        if kind not in self.media_kinds:
            raise InvalidRequest(f"`{path}` is {kind} input, but this model accepts only: {self.accepted_input}.", path)

    @property
    def accepted_input(self) -> str:
        """Kinds of input that the model reads, for errors."""
        return ", ".join(["text", *sorted(self.media_kinds)])

    def check_model(self, asked: str) -> None:
        """Raise ModelNotFound for a name that is neither the model's nor an alias, also without LATEST."""
        names = {self.model_name, *self.aliases}
        if asked not in names and asked.removesuffix(LATEST) not in names:
            raise ModelNotFound(asked, self.model_name)


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed body of any dialect. It is pickled between processes."""

    request: ChatRequest
    """As its body says. `HttpContext.read` adds the rest: id, session, tenant and client of the API key."""
    route: Route
    stream: bool
    echo: Any = None
    """Fields of the body that the dialect's encoder depends on."""
    ignored: tuple[str, ...] = ()
    """Names of unknown fields at the top of the body."""
    max_rows: int | None = None
    """Choices that its API key may have in flight, which `HttpContext.read` adds; None: any number."""

    def packed(self) -> "ParsedRequest":
        """Return a copy with packed messages, which are cheap to pickle."""
        return replace(self, request=replace(self.request, messages=PackedMessages.of(self.request.messages)))

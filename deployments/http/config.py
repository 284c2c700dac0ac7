"""HttpConfig: every setting of the HTTP API."""

import re
from typing import Annotated

from pydantic import Field, model_validator

from deployments.http.fields import UnknownFields
from deployments.http.normalize import DEFAULT_VOLATILE_PATTERNS, SystemPolicy
from deployments.http.response_store import StoreResponses
from deployments.http.unread_bodies import BodyLimits
from engine.config import Frozen

ApiKey = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
"""SHA-256 of an API key, so that the configuration file does not contain the key itself."""
EnvironmentVariable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9.\-_]+$|^[0-9A-Fa-f:.]+$")]
Origin = Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.\-]*://[A-Za-z0-9.\-_:\[\]]+$|^null$")]


class HttpConfig(Frozen):
    """The section `http` of the arguments."""

    max_body_bytes: int = Field(
        default=32 * 2**20, ge=1024, description="largest request body in bytes, images as data: URLs included"
    )
    system_policy: SystemPolicy = Field(
        default="hoist",
        description="system messages after other roles: hoist to the front, inline as marked user text, or error",
    )
    served_model_names: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(
        default=(),
        description="additional model names that requests may use, such as claude-sonnet-4-5 or gpt-5",
    )
    unknown_fields: UnknownFields = Field(
        default="report",
        description="unknown fields at the top of a body: report (ignore, name in the header X-Orchard-Ignored and "
        "count in /v1/status) or refuse (400)",
    )
    volatile_patterns: tuple[re.Pattern[str], ...] = Field(
        default=DEFAULT_VOLATILE_PATTERNS,
        description="regular expressions of system message lines to remove because they change with each request and "
        "would invalidate the prefix cache; a list replaces the default, [] removes nothing",
    )
    open: bool = Field(default=False, description="allow listening on non-loopback addresses without API keys")
    api_keys: tuple[ApiKey, ...] = Field(
        default=(),
        description="SHA-256 hashes of administrative API keys, each 'sha256:' and 64 hex digits; with any key set, "
        "every route except /health/* and the page requires one, in 'Authorization: Bearer' or 'x-api-key'",
    )
    api_keys_file: str | None = Field(
        default=None,
        pattern=r"^[/~]",
        description="file with more keys and their limits, on every node with an ingress; its mode must deny access to "
        "other users; for its format see Security in deployments/README.md",
    )
    api_keys_env: EnvironmentVariable | None = Field(
        default=None,
        description="name of an environment variable, set where Ray is started, with more administrative keys, plain "
        "and separated by commas",
    )
    allowed_hosts: tuple[HostName, ...] = Field(
        default=(),
        description="host names without port that the Host header may have, besides loopback names and IP addresses; "
        "if empty, and with API keys or open, any name",
    )
    allowed_origins: tuple[Origin, ...] = Field(
        default=(),
        description="origins of web pages (scheme://host:port) that may send requests, besides the server's own",
    )
    max_unread_bodies: int = Field(
        default=1024, ge=1, le=65536, description="most request bodies that may be arriving at the same time, per node"
    )
    max_unread_bytes: int = Field(
        default=512 * 2**20, ge=1024, description="most bytes of all request bodies that are arriving, per node"
    )
    min_body_bytes_per_s: int = Field(
        default=64 * 2**10,
        ge=1,
        description="lowest rate of an arriving request body in bytes per second; slower ones are rejected (408)",
    )
    body_grace_s: float = Field(
        default=5.0, gt=0, le=3600, description="seconds in which a body may be slower than min_body_bytes_per_s"
    )
    max_share_per_address: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="fraction of the limits on arriving bodies and on choices in flight that one client address may "
        "use; loopback is exempt; 1: no limit",
    )
    send_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=3600,
        description="seconds after which the connection of a client that does not read its response is closed",
    )
    stream_comment_s: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        description="seconds without an event after which a stream sends a comment, so that clients do not time out; "
        "the first comment commits the status 200",
    )
    store_responses: StoreResponses = Field(
        default="asked",
        description="which responses of /v1/responses are stored for previous_response_id and GET; asked: those whose "
        "request says `store: true`, and those that continue a stored one; all: also those whose request says nothing; "
        "off: none",
    )
    stored_responses_max: int = Field(default=1000, ge=1, le=1_000_000, description="most stored responses per node")
    stored_responses_mb: int = Field(
        default=256, ge=1, le=65536, description="MiB of memory for stored responses and their inputs, per node"
    )
    stored_responses_ttl_s: float = Field(
        default=3600.0, gt=0, le=31_536_000, description="seconds without use after which a stored response is deleted"
    )

    @model_validator(mode="after")
    def _check_body_fits(self) -> "HttpConfig":
        if self.max_unread_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_unread_bytes is {self.max_unread_bytes}: it must be at least max_body_bytes, "
                f"{self.max_body_bytes}"
            )
        return self

    @property
    def needs_key(self) -> bool:
        """Whether requests need an API key."""
        return bool(self.api_keys or self.api_keys_file or self.api_keys_env)

    @property
    def body_limits(self) -> BodyLimits:
        """The limits on arriving request bodies."""
        return BodyLimits(
            max_body_bytes=self.max_body_bytes,
            max_bodies=self.max_unread_bodies,
            max_bytes=self.max_unread_bytes,
            min_bytes_per_s=self.min_body_bytes_per_s,
            grace_s=self.body_grace_s,
            max_share_per_address=self.max_share_per_address,
        )

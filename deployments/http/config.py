"""Every knob of the HTTP faces."""

import re
from typing import Annotated

from pydantic import Field, model_validator

from deployments.http.fields import UnknownFields
from deployments.http.normalize import DEFAULT_VOLATILE_PATTERNS, SystemPolicy
from deployments.http.unread_bodies import BodyLimits
from engine.config import Frozen

ApiKey = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
"""SHA-256 of an API key, so that the file with the configuration does not hold the key itself."""
EnvironmentVariable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9.\-_]+$|^[0-9A-Fa-f:.]+$")]
Origin = Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.\-]*://[A-Za-z0-9.\-_:\[\]]+$|^null$")]


class HttpConfig(Frozen):
    max_body_bytes: int = Field(
        default=32 * 2**20, ge=1024, description="bytes of one request; images come in it as data: URLs"
    )
    system_policy: SystemPolicy = Field(
        default="hoist", description="a system message behind another role: hoist, inline (marked user text) or error"
    )
    served_model_names: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(
        default=(),
        description="other names by which requests may ask for the model, such as claude-sonnet-4-5 or gpt-5",
    )
    unknown_fields: UnknownFields = Field(
        default="report",
        description="fields of a body that no dialect knows: report (ignored, named in the header X-Orchard-Ignored "
        "and counted in /v1/status) or refuse",
    )
    volatile_patterns: tuple[re.Pattern[str], ...] = Field(
        default=DEFAULT_VOLATILE_PATTERNS, description="lines of system messages to drop: they change with each request"
    )
    open: bool = Field(
        default=False, description="whether the server may listen on other addresses than loopback without API keys"
    )
    api_keys: tuple[ApiKey, ...] = Field(
        default=(),
        description="SHA-256 hashes of the API keys, each 'sha256:' and 64 hex digits; when set, every route but "
        "/health/* needs a key, in 'Authorization: Bearer' or 'x-api-key'; these keys are administrative",
    )
    api_keys_file: str | None = Field(
        default=None,
        pattern=r"^[/~]",
        description="file with further keys, a YAML or JSON list of ApiKeyEntry (see api_keys.py), on every node with "
        "an ingress; no other user may have access to it",
    )
    api_keys_env: EnvironmentVariable | None = Field(
        default=None,
        description="environment variable with further keys, plain and separated by commas; they are administrative",
    )
    allowed_hosts: tuple[HostName, ...] = Field(
        default=(),
        description="host names, without port, that requests may name in their Host header besides loopback names and "
        "IP addresses; when empty and with API keys or open, any name",
    )
    allowed_origins: tuple[Origin, ...] = Field(
        default=(),
        description="origins of web pages (scheme://host:port) that may send requests, besides the server's own",
    )
    max_unread_bodies: int = Field(
        default=64, ge=1, le=65536, description="request bodies that may arrive at the same time, per node"
    )
    max_unread_bytes: int = Field(
        default=512 * 2**20, ge=1024, description="bytes of the request bodies that arrive at the same time, per node"
    )
    min_body_bytes_per_s: int = Field(
        default=64 * 2**10,
        ge=1,
        description="rate floor of a request body in bytes per second; a slower one is refused (408)",
    )
    body_grace_s: float = Field(
        default=5.0, gt=0, le=3600, description="seconds in which a request body may be slower than the rate floor"
    )
    max_share_per_address: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="part of the room for request bodies and for answers that one client address may take; loopback is "
        "exempt, 1 switches it off",
    )
    send_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=3600,
        description="seconds without progress after which the connection of a client that does not read is closed",
    )
    stream_comment_s: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        description="seconds without an event after which a stream sends a comment, so that clients do not time out",
    )
    stored_responses_max: int = Field(
        default=1000,
        ge=0,
        le=1_000_000,
        description="responses of /v1/responses that a node keeps for previous_response_id and GET; 0: none",
    )
    stored_responses_mb: int = Field(
        default=256, ge=1, le=65536, description="MiB of memory that these responses and their input may take, per node"
    )
    stored_responses_ttl_s: float = Field(
        default=3600.0, gt=0, le=31_536_000, description="seconds without use after which a stored response is dropped"
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
        return BodyLimits(
            max_body_bytes=self.max_body_bytes,
            max_bodies=self.max_unread_bodies,
            max_bytes=self.max_unread_bytes,
            min_bytes_per_s=self.min_body_bytes_per_s,
            grace_s=self.body_grace_s,
            max_share_per_address=self.max_share_per_address,
        )

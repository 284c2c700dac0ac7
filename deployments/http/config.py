"""Every knob of the HTTP faces."""

import re
from typing import Annotated

from pydantic import Field, StringConstraints

from deployments.http.normalize import DEFAULT_VOLATILE_PATTERNS, SystemPolicy
from engine.config import Frozen

KeyHash = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
"""SHA-256 of an API key, so that the file with the configuration does not hold the key itself."""


class HttpConfig(Frozen):
    open: bool = Field(
        default=False, description="serve on other addresses than loopback to everybody who reaches them, without keys"
    )
    api_keys: tuple[KeyHash, ...] = Field(
        default=(),
        description="'sha256:' and the 64 hexadecimal digits of the hash of each valid key; with any of them set, "
        "every request but those for /health needs one",
    )
    max_body_bytes: int = Field(
        default=64 * 2**20, ge=1024, description="one request; pictures come in it as data: URLs"
    )
    system_policy: SystemPolicy = Field(
        default="hoist", description="a system message behind another role: hoist, inline (marked user text) or error"
    )
    volatile_patterns: tuple[re.Pattern[str], ...] = Field(
        default=DEFAULT_VOLATILE_PATTERNS, description="lines of system messages to drop: they change with each request"
    )

"""Every knob of the HTTP faces."""

import re

from pydantic import Field

from deployments.http.normalize import DEFAULT_VOLATILE_PATTERNS, SystemPolicy
from engine.config import Frozen


class HttpConfig(Frozen):
    max_body_bytes: int = Field(
        default=64 * 2**20, ge=1024, description="one request; pictures come in it as data: URLs"
    )
    system_policy: SystemPolicy = Field(
        default="hoist", description="a system message behind another role: hoist, inline (marked user text) or error"
    )
    volatile_patterns: tuple[re.Pattern[str], ...] = Field(
        default=DEFAULT_VOLATILE_PATTERNS, description="lines of system messages to drop: they change with each request"
    )

"""Digests of what a prompt was rendered with besides its messages, to explain why a cached prefix does not match."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from engine.processing.conversation import DEFAULT_KWARGS
from engine.protocol import PromptOrigin


def prompt_origin(template_kwargs: Mapping[str, Any]) -> PromptOrigin:
    """Return digests of the template variables besides the messages; '' for defaults only.

    The order of keys inside a value counts, since templates write them in that order.
    """
    chosen = {
        name: template_kwargs[name]
        for name in sorted(template_kwargs)
        if name != "tools" and (name, template_kwargs[name]) not in DEFAULT_KWARGS.items()
    }
    return PromptOrigin(tools=_digest(template_kwargs.get("tools")), template_kwargs=_digest(chosen))


def _digest(value: Any) -> str:
    if not value:
        return ""
    text = json.dumps(value, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

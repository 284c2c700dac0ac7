"""Redaction of the status and cache pages: every client sees figures, only administrators see texts, ids and paths."""

from typing import Any

PER_REQUEST = frozenset({"queue", "entries", "recent_misses"})
"""Lists with one item per request or client, hidden from the public; their lengths are among the figures."""

HIDDEN = frozenset({"config", "ignored_fields"})
"""Fields hidden from the public: they contain paths, or names that clients sent."""

PUBLIC_WORDS = frozenset({"state", "device"})
"""Text fields with fixed values of Orchard. Any other text may be a path, an id or part of a prompt."""


def public_view(page: dict[str, Any]) -> dict[str, Any]:
    """Return the page for a non-administrative request: numbers, booleans, nulls and the served model's name.

    A text field that is added to a page later stays hidden until PUBLIC_WORDS names it.
    """
    name = {"model": page["model"]} if "model" in page else {}
    return {**name, **_figures(page)}


def administrative_view(page: dict[str, Any]) -> dict[str, Any]:
    """Return the whole page except the hashes of API keys."""
    http = page.get("config", {}).get("http", {})
    if "api_keys" not in http:
        return page
    shown = {**http, "api_keys": f"{len(http['api_keys'])} configured"}
    return {**page, "config": {**page["config"], "http": shown}}


def _figures(found: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in found.items():
        if name in HIDDEN or (name in PER_REQUEST and isinstance(value, list | tuple)):
            continue
        if isinstance(value, dict):
            kept[name] = _figures(value)
        elif isinstance(value, list | tuple):
            kept[name] = [_figures(item) if isinstance(item, dict) else item for item in value if _is_shown(name, item)]
        elif _is_shown(name, value):
            kept[name] = value
    return kept


def _is_shown(name: str, value: Any) -> bool:
    return not isinstance(value, str | bytes) or name in PUBLIC_WORDS

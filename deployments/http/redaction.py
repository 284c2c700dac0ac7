"""What of the status and cache pages is shown to whom: figures to all, texts, ids and paths to administrators alone."""

from typing import Any

PER_REQUEST = frozenset({"queue", "entries", "recent_misses"})
"""Lists with one item per request or per client; their lengths are among the figures anyway."""

HIDDEN = frozenset({"config", "ignored_fields"})
"""Whole fields that the public does not see: paths, and names that clients have sent."""

PUBLIC_WORDS = frozenset({"state", "device"})
"""Fields whose values are words of our own. Every other text may be a path, an id or part of a prompt."""


def public_view(page: dict[str, Any]) -> dict[str, Any]:
    """The page for a request that is not administrative: its numbers, booleans and nulls, and the served model's name.

    A text field that is added to a page later stays hidden until it is named here.
    """
    name = {"model": page["model"]} if "model" in page else {}
    return {**name, **_figures(page)}


def administrative_view(page: dict[str, Any]) -> dict[str, Any]:
    """The whole page, but for secrets of the configuration, which no request may read."""
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

"""Reasoning effort: its budget of tokens, and its level in chat templates."""

EFFORT_BUDGETS: dict[str, int | None] = {"low": 1024, "medium": 8192, "high": None, "xhigh": None, "max": None}
"""Reasoning effort to most tokens of the thought; None: no limit."""


def template_level(effort: str) -> str:
    """Return the effort in the words of chat templates, which know low, medium and high."""
    return "high" if effort in ("xhigh", "max") else effort

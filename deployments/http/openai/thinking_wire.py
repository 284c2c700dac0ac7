"""The fields by which clients of chat completions request thinking, and their conversion to one Thinking."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from deployments.http.effort import EFFORT_BUDGETS, template_level
from deployments.http.wire import OpenWire
from deployments.requests import Thinking
from engine.errors import InvalidRequest

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

Budget = Annotated[int, Field(ge=0, le=2**31 - 1)]


class ThinkingField(OpenWire):
    """`thinking` of DeepSeek, GLM and Anthropic's dialect."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Budget | None = None


class ReasoningField(OpenWire):
    """`reasoning` of OpenRouter."""

    effort: Effort | None = None
    max_tokens: Budget | None = None
    enabled: bool | None = None


def from_effort(effort: str, field: str) -> Thinking:
    """Convert an effort: none and minimal turn thinking off, the others on, with the budget of EFFORT_BUDGETS."""
    if effort in ("none", "minimal"):
        return Thinking("off", field=field)
    return Thinking("on", EFFORT_BUDGETS[effort], template_level(effort), field)


def from_thinking(asked: ThinkingField, field: str) -> Thinking:
    """Convert the field `thinking`: enabled is on, disabled is off, any other type is auto."""
    modes: dict[str, Literal["off", "on", "auto"]] = {"enabled": "on", "disabled": "off"}
    return Thinking(modes.get(asked.type, "auto"), asked.budget_tokens, field=f"{field}.type")


def from_reasoning(asked: ReasoningField, field: str) -> Thinking | None:
    """Convert the field `reasoning` by the first of effort, max_tokens and enabled that is sent; None without any."""
    if asked.effort is not None:
        return from_effort(asked.effort, f"{field}.effort")
    if asked.max_tokens is not None:
        return Thinking("on" if asked.max_tokens else "off", asked.max_tokens, field=f"{field}.max_tokens")
    return None if asked.enabled is None else from_switch(asked.enabled, f"{field}.enabled")


def from_switch(is_on: bool, field: str) -> Thinking:
    """Convert a boolean field, such as `enable_thinking`."""
    return Thinking("on" if is_on else "off", field=field)


def agreed(asked: Iterator[Thinking | None], budget: int | None = None) -> Thinking | None:
    """Merge the requests of all fields; the smallest budget counts.

    Args:
        asked: Thinking of each field, None for a field that is not sent.
        budget: Value of `thinking_budget`, which overrides the other budgets.

    Raises:
        InvalidRequest: Two fields contradict each other.
    """
    found = [thinking for thinking in asked if thinking is not None]
    for other in found[1:]:
        if other.mode != found[0].mode:
            raise InvalidRequest(
                f"`{found[0].field}` sets thinking to {found[0].mode}, but `{other.field}` sets it to {other.mode}: "
                "send one of them.",
                other.field,
            )
    if budget is not None and (not found or found[0].mode != "off"):
        return Thinking("on" if budget else "off", budget, field="thinking_budget")
    budgets = [thinking.budget for thinking in found if thinking.budget is not None]
    efforts = [thinking.effort for thinking in found if thinking.effort is not None]
    if not found:
        return None
    return Thinking(found[0].mode, min(budgets, default=None), next(iter(efforts), None), found[0].field)

"""The durations of an answer in nanoseconds, from the timeline of its request."""

from deployments.http.timeline import RequestTimeline, sum_by_name

AFTER_THE_START = ("prefill", "decode", "preempted", "engine", "return", "move", "send")
"""Stretches of a timeline that do not belong to `load_duration`."""


def load_durations(timeline: RequestTimeline) -> dict[str, int]:
    """Return `total_duration` and `load_duration`, the time before the engine begins: the model is loaded already."""
    sums = sum_by_name(timeline.stretches())
    load_s = sum(seconds for name, seconds in sums.items() if name not in AFTER_THE_START)
    return {"total_duration": _ns(timeline.spent_s), "load_duration": _ns(load_s)}


def answer_durations(timeline: RequestTimeline) -> dict[str, int]:
    """Return the durations of an answer: also of the prompt's computation, and of the tokens'.

    Without the engine's phases, the first token divides the time between both.
    """
    found, sums = load_durations(timeline), sum_by_name(timeline.stretches())
    if "decode" in sums:
        prompt, answer = _ns(sums.get("prefill", 0.0)), _ns(sums["decode"])
    else:
        first = _ns(timeline.first_token_s or 0.0)
        prompt, answer = first - found["load_duration"], found["total_duration"] - first
    return {**found, "prompt_eval_duration": max(0, prompt), "eval_duration": max(1, answer)}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)

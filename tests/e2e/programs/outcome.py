"""Judges a run: whether the program works, which unusual fields it sent, and how it reacted to a refusal."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tests.e2e.programs.catalogue import EDITED_TEXT, NOTES_TEXT
from tests.e2e.programs.recorder import Exchange
from tests.e2e.programs.run import Run

USUAL = {
    "/v1/chat/completions": {"model", "messages", "stream", "stream_options", "max_tokens", "temperature", "tools"},
    "/v1/responses": {"model", "input", "instructions", "stream", "max_output_tokens", "tools", "store"},
    "/v1/messages": {"model", "messages", "system", "stream", "max_tokens", "tools"},
}
"""Fields at the top of a body that nearly every client of a dialect sends."""
USUAL_TYPES = {"function", "message", "text", "input_text", "output_text", "function_call", "function_call_output"}
IDENTIFIERS = {"metadata", "client_metadata", "prompt_cache_key", "user"}
"""Fields with ids of an installation or a session."""
MAX_SHOWN = 60
LAST_EVENTS = {"/v1/messages": ("message_stop",), "/v1/responses": ("response.completed", "response.incomplete")}
"""Streams of other dialects end with [DONE]."""
TOO_LONG = re.compile(r"prompt is too long|maximum context length|exceed context limit")
CANNOT = re.compile(r"chat template does not support")
TOLD = re.compile(r"context|too long|too large|token", re.IGNORECASE)
"""Words by which a program tells its user so."""
MAX_WORDS = 160
MIN_SHOWN_CHARS = 12
"""Fewest letters and digits of an answer that must be found in the program's output."""


def outcome(run: Run) -> str:
    """Return `answered`, `answered after a refusal`, `too long` (the program tells that the prompt does not fit), `the
    model cannot` (the program shows that its template does not support what it asks for), or `failed: ` with what is
    wrong."""
    refused = [one for one in run.exchanges if one.status >= 400]
    last = next((one for one in reversed(run.exchanges) if one.is_generation), None)
    words = last.error_message if last is not None and last.status == 400 else ""
    if TOO_LONG.search(words):
        return (
            "too long"
            if TOLD.search(run.output)
            else f"failed: it hides that the prompt is too long: {_last_words(run)}"
        )
    if CANNOT.search(words) and _letters(words) in _letters(run.output):
        return "the model cannot"
    if problem := next(_problems(run, last), None):
        return f"failed: {problem}"
    return "answered after a refusal" if refused else "answered"


def outcome_of_tool(run: Run) -> str:
    """Return the outcome of a run in which a tool of the program reads a file: its text must come back."""
    found = outcome(run)
    bodies = [json.dumps(one.body) for one in run.exchanges if one.is_generation]
    if found.startswith("failed") or any(NOTES_TEXT in body for body in bodies):
        return found
    if not any('"tools": [{' in body for body in bodies):
        return "has no tools"
    return "failed: the text of the file has not come back"


def outcome_of_edit(run: Run) -> str:
    """Return the outcome of a run in which a tool of the program changes a file: the file must have the new text."""
    found = outcome(run)
    if found.startswith("failed") or run.notes.strip() == EDITED_TEXT:
        return found
    return f"failed: the file says {run.notes.strip()!r}"


def ending(run: Run) -> str:
    """Return how a program ends that has been refused: it answers, shows the server's words, or says its own."""
    found = outcome(run)
    if found.startswith("answered"):
        return "answers"
    refused = next((one for one in reversed(run.exchanges) if one.status >= 400), None)
    if refused is None:
        return found
    if _letters(refused.error_message) in _letters(run.output):
        return "ends and shows these words"
    if run.case.is_screen:
        return "shows other words on its screen"
    return f"ends with its own words: {_last_words(run)}"


def _problems(run: Run, last: Exchange | None) -> Iterator[str]:
    if last is None:
        yield f"it asked nothing; its last words: {_last_words(run)}"
        return
    if last.status >= 400:
        yield f"{last.status} {last.error_message}"
    for one in run.exchanges:
        if one.status == 0 or one.status >= 500:
            yield f"{one.method} {one.path}: {one.status} {one.error_message}"
        if one.status < 400 and (flaw := stream_flaw(one)):
            yield f"{one.path}: {flaw}"
    if run.exit_code != 0:
        how = "did not end by itself" if run.exit_code is None else f"ended with {run.exit_code}"
        yield f"it {how} after {run.seconds:.0f} s; its last words: {_last_words(run)}"
    texts = [_letters(text)[:MIN_SHOWN_CHARS] for text in map(answer_text, run.exchanges) if text.strip()]
    if texts and not any(text in _letters(run.output) for text in texts):
        yield f"it shows none of the answers; the last one began with {texts[-1]}"


def stream_flaw(one: Exchange) -> str | None:
    """Return what is wrong with a stream: an error event, or that its end is missing.

    A program may close the connection as soon as it has read the last event.
    """
    if not one.is_stream or not one.is_generation:
        return None
    if not one.is_whole and not _has_its_end(one):
        return "the program broke the stream off"
    if error := next((event for event in one.events() if event.get("error") or event.get("type") == "error"), None):
        return f"an error in the stream: {json.dumps(error)[:300]}"
    return None if _has_its_end(one) else f"the stream ends with {one.answer[-100:]!r}"


def _has_its_end(one: Exchange) -> bool:
    if one.path not in LAST_EVENTS:
        return one.answer.rstrip().endswith(b"data: [DONE]")
    return any(f"event: {name}\n".encode() in one.answer for name in LAST_EVENTS[one.path]) and one.answer.endswith(
        b"\n\n"
    )


def answer_text(one: Exchange) -> str:
    """Return the text of an answer, without thoughts and calls."""
    if one.status != 200 or not one.is_generation:
        return ""
    if not one.is_stream:
        body = json.loads(one.answer)
        parts = body.get("content") or [part for item in body.get("output", ()) for part in item.get("content", ())]
        whole = "".join(choice["message"].get("content") or "" for choice in body.get("choices", ()))
        return whole + "".join(part.get("text", "") for part in parts)
    return "".join(_delta(event) for event in one.events())


def _delta(event: Any) -> str:
    if event.get("type") == "response.output_text.delta":
        return event["delta"]
    if event.get("type") == "content_block_delta":
        return event["delta"].get("text", "")
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))


def _letters(text: str) -> str:
    """Return letters and digits alone: screens wrap lines, and render markup and blanks in their own way."""
    return "".join(filter(str.isalnum, text))


def _last_words(run: Run) -> str:
    """Return the last line of the output that has letters."""
    lines = [line.strip() for line in run.output.splitlines() if any(map(str.isalpha, line))]
    return lines[-1][:MAX_WORDS] if lines else "(nothing)"


def unusual(run: Run) -> str:
    """Describe the largest request of a run by what not every client sends: fields, types, roles, betas."""
    asked = [one for one in run.exchanges if one.is_generation and isinstance(one.body, dict)]
    if not asked:
        return ""
    one = max(asked, key=lambda asked: len(json.dumps(asked.body)))
    fields = [_field(name, value) for name, value in one.body.items() if name not in USUAL.get(one.path, set())]
    tools = one.body.get("tools") or []
    types = sorted({item["type"] for item in _items(one.body) if item.get("type", "text") not in USUAL_TYPES})
    listed = [f"{len(tools)} tools", f"{len(json.dumps(one.body)) / 1000:.0f} kB", *fields]
    if types:
        listed.append("types " + ", ".join(f"`{kind}`" for kind in types))
    if any(message.get("role") == "system" for message in (one.body.get("messages") or [])[1:]):
        listed.append("late `system` messages")
    if beta := one.headers.get("anthropic-beta"):
        listed.append(f"beta `{beta}`")
    if len(asked) > 1:
        listed.append(f"{len(asked)} requests")
    return ", ".join(listed)


def _items(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield tools, input items and blocks of content: what has a type."""
    for entry in (*(body.get("tools") or ()), *(body.get("input") or ()), *(body.get("messages") or ())):
        if isinstance(entry, dict):
            yield {key: value for key, value in entry.items() if key == "type"}
            content = entry.get("content")
            yield from (block for block in content or () if isinstance(content, list))


def _field(name: str, value: Any) -> str:
    """Return a field with its value, if that is short and no identifier."""
    text = json.dumps(value)
    return f"`{name}`" if len(text) > MAX_SHOWN or name in IDENTIFIERS else f"`{name}: {text}`"


def refusals(run: Run) -> list[str]:
    """Describe each refusal by the server's words and by what the next request of that path leaves out or changes."""
    steps = []
    for position, one in enumerate(run.exchanges):
        if one.status >= 400 and one.is_generation:
            later = next((other for other in run.exchanges[position + 1 :] if other.path == one.path), None)
            steps.append(f"{one.status} “{one.error_message}”: {_step(one, later)}")
    return [f"{step} ({steps.count(step)} times)" if steps.count(step) > 1 else step for step in dict.fromkeys(steps)]


def _step(refused: Exchange, later: Exchange | None) -> str:
    if later is None:
        return "ends"
    wait_s = round(later.began - refused.began)
    when = f"asks again after {wait_s} s" if wait_s else "asks again"
    if not isinstance(refused.body, dict) or not isinstance(later.body, dict):
        return when
    without = [f"without `{name}`" for name in refused.body if name not in later.body]
    changed = [f"with other `{name}`" for name, value in later.body.items() if refused.body.get(name) != value]
    return f"{when} {', '.join([*without, *changed]) or 'unchanged'}"


def fields_to_refuse(exchanges: Sequence[Exchange]) -> list[str]:
    """Return the fields of a program's first request that not every client sends."""
    asked = next((one for one in exchanges if one.is_generation and isinstance(one.body, dict)), None)
    return [name for name in asked.body if name not in USUAL.get(asked.path, set())] if asked else []

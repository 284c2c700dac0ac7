"""Bodies that real clients have sent: each is accepted or refused by a rule, and a turn begins like the one before it.

captured.jsonl.gz: one request a line. Texts are `<text N chars>` in it, binary data `<base64 N bytes>`.
"""

import gzip
import json
import re
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from deployments.http.parsed_request import ParsedRequest
from deployments.http.request_reader import read_request
from engine.errors import InvalidRequest
from tests.deployments.http.anthropic.conftest import RULES

REFUSED = {
    ("anthropic", "anthropic_refuse_thread"): "thread",
    ("anthropic", "anthropic_refuse_thread_lost"): "thread",
    ("anthropic", "anthropic_toolrunnerparallel"): "thread",
    ("claude", "claude_screen"): "safeguards",
    ("claude", "claude_screen_safeguards"): "safeguards",
}
"""Client and case -> the field by which some of its requests are refused."""
IGNORED = {"anthropic_beta": ("context_management.edits.0 (clear_tool_uses_20250919)",)}


def filled(value: Any) -> Any:
    if isinstance(value, str):
        value = re.sub(r"<text (\d+) chars>", lambda found: "x" * int(found[1]), value)
        return re.sub(r"<base64 \d+ bytes>", "AA==", value)
    if isinstance(value, list):
        return [filled(inner) for inner in value]
    return {key: filled(inner) for key, inner in value.items()} if isinstance(value, dict) else value


@cache
def captured() -> list[dict[str, Any]]:
    lines = gzip.decompress((Path(__file__).parent / "captured.jsonl.gz").read_bytes()).splitlines()
    return [filled(json.loads(line)) for line in lines]


def read(captured: dict[str, Any]) -> ParsedRequest:
    kind = "count_tokens" if captured["path"].endswith("count_tokens") else "messages"
    return read_request(json.dumps({**captured["body"], "model": RULES.model_name}).encode(), kind, RULES)


def test_captured_requests_are_accepted_or_refused_by_the_expected_field():
    refused = Counter()
    for one in captured():
        try:
            assert read(one).ignored == IGNORED.get(one["case"], ())
        except InvalidRequest as error:
            assert error.field == REFUSED[one["client"], one["case"]], error.message
            assert error.field in one["body"]
            refused[error.field] += 1
    assert refused == {"thread": 4, "safeguards": 4}
    assert len(captured()) == 109


def test_a_turn_begins_with_all_of_the_turn_before_it():
    """Two requests are turns of one conversation if the later one has more messages and the same tools in front."""
    num_pairs = 0
    for one, next_one in pairwise(captured()):
        if (one["client"], one["case"]) != (next_one["client"], next_one["case"]):
            continue
        if len(next_one["body"]["messages"]) <= len(one["body"]["messages"]):
            continue
        before, after = (read(turn).request for turn in (without_refused(one), without_refused(next_one)))
        shown, shown_after = ([tool for tool in turn.tools if not tool.is_deferred] for turn in (before, after))
        if shown == shown_after:
            assert after.messages[: len(before.messages)] == before.messages, one["case"]
            num_pairs += 1
    assert num_pairs == 19


def without_refused(captured: dict[str, Any]) -> dict[str, Any]:
    """As the client sends it again once the fields are refused."""
    body = {name: value for name, value in captured["body"].items() if name not in REFUSED.values()}
    return {**captured, "body": body}


def test_tools_found_by_claude_codes_search_are_shown_in_the_last_message_and_stay_deferred():
    [found] = [one for one in captured() if (one["case"], one["n"]) == ("claude_toolsearch", 2)]
    request = read(found).request
    assert [tool.name for tool in request.tools if tool.is_deferred] == ["NotebookEdit", "WebFetch"]
    assert '"name": "WebFetch"' in request.messages[-1]["content"]

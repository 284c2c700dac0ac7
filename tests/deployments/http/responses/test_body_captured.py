"""Bodies that real clients have sent: all are accepted.

captured.jsonl holds one request per line, recorded from unmodified clients. Texts are `<text N chars>`.
"""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.http.responses.body import parse_responses
from tests.e2e.clients.captured import GRAMMAR

CAPTURED = [json.loads(line) for line in (Path(__file__).parent / "captured.jsonl").read_text().splitlines()]
RULES = ReadingRules("orchard-demo", frozenset({"image"}), aliases=frozenset({"gpt-5.5", "gpt-6-sol"}))

IGNORED = re.compile(r"tools\[\d+\] \((?:web_search|tool_search)\)|text\.verbosity|reasoning\.context")


def read(request: dict[str, Any]) -> ParsedRequest:
    body = json.dumps(request["body"])
    for definition in set(re.findall(r'"definition": ("<text \d+ chars>")', body)):
        body = body.replace(definition, json.dumps(GRAMMAR))
    return parse_responses(json.loads(body), RULES)


def named(request: dict[str, Any]) -> str:
    return f"{request['case']}-{request['n']}"


@pytest.mark.parametrize("request_", CAPTURED, ids=named)
def test_a_captured_body_is_accepted_and_only_hints_and_tools_of_openais_servers_are_ignored(request_):
    parsed = read(request_)
    assert all(map(IGNORED.fullmatch, parsed.ignored))
    assert parsed.request.messages or parsed.echo.is_open


def conversations() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Neighbouring requests of one case in which the later one repeats the items of the earlier one."""
    return [
        (first, second)
        for first, second in pairwise(CAPTURED)
        if first["case"] == second["case"]
        and isinstance(first["body"]["input"], list)
        and len(second["body"]["input"]) > len(first["body"]["input"])
        and first["body"].get("tools") == second["body"].get("tools")
    ]


@pytest.mark.parametrize(("first", "second"), conversations(), ids=lambda request: named(request))
def test_later_turn_of_a_conversation_begins_with_the_earlier_messages(first, second):
    earlier, later = read(first).request, read(second).request
    assert tuple(later.messages[: len(earlier.messages)]) == tuple(earlier.messages)
    assert earlier.tools == later.tools


def test_captures_contain_at_least_five_conversations():
    assert len(conversations()) >= 5

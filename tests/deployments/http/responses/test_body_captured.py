"""Bodies that real clients have sent: all are accepted, or refused by the field that we mean to refuse.

captured.jsonl holds one request per line, recorded from unmodified clients. Texts are `<text N chars>`.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.http.responses.body import parse_responses
from engine.protocol import InvalidRequest

CAPTURED = [json.loads(line) for line in (Path(__file__).parent / "captured.jsonl").read_text().splitlines()]
RULES = ReadingRules("orchard-demo", frozenset({"image"}), aliases=frozenset({"gpt-5.5", "gpt-6-sol"}))

REFUSED = {
    "codex_codemode": "reasoning.context",
    "codex_gptname": "tools[3].type",  # custom
    "codex_patch": "tools[3].type",  # custom
}
"""Case -> the field that it is refused by: Codex sends these under names of OpenAI's models alone."""


def read(request: dict[str, Any]) -> ParsedRequest:
    return parse_responses(request["body"], RULES)


def named(request: dict[str, Any]) -> str:
    return f"{request['case']}-{request['n']}"


@pytest.mark.parametrize("request_", CAPTURED, ids=named)
def test_captured_body_is_accepted_or_refused_by_the_expected_field(request_):
    field = REFUSED.get(request_["case"])
    if field is None:
        parsed = read(request_)
        assert all(name.startswith("tools[") for name in parsed.ignored)
        assert parsed.request.messages or parsed.echo.is_open
        return
    with pytest.raises(InvalidRequest) as refused:
        read(request_)
    assert refused.value.field == field


def conversations() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Neighbouring requests of one case in which the later one repeats the items of the earlier one."""
    accepted = [request for request in CAPTURED if request["case"] not in REFUSED]
    return [
        (first, second)
        for first, second in pairwise(accepted)
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

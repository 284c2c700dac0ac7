"""Tools and tool choices of a request for a response."""

import pytest

from deployments.requests import Tool, ToolChoice
from engine.errors import InvalidRequest
from tests.deployments.http.responses.conftest import parse

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "description": "d", "parameters": PARAMETERS, "strict": True}
AGENTS = {"type": "namespace", "name": "agents", "description": "", "tools": [{"type": "function", "name": "wait"}]}


def lark(definition: str) -> dict[str, str]:
    return {"type": "grammar", "syntax": "lark", "definition": definition}


SEARCH = {"type": "web_search", "external_web_access": True, "search_content_types": ["text"]}


def test_functions_and_namespaces_are_offered_and_a_web_search_is_reported_as_ignored():
    parsed = parse(tools=[WEATHER, AGENTS, SEARCH])
    assert parsed.request.tools == (Tool("weather", "d", PARAMETERS, True), Tool("agents.wait"))
    assert parsed.echo.namespaces == (("agents.wait", "agents", "wait"),)
    assert parsed.ignored == ("tools[2] (web_search)",)
    assert parsed.echo.settings["tools"] == [WEATHER, AGENTS, SEARCH]


NAMED = [{"type": "function", "name": "weather"}]
CHOICES = [
    (None, ToolChoice()),
    ("auto", ToolChoice()),
    ("none", ToolChoice("none")),
    ("required", ToolChoice("required")),
    ({"type": "function", "name": "weather"}, ToolChoice("required", ("weather",))),
    ({"type": "function", "name": "agents.wait"}, ToolChoice("required", ("agents.wait",))),
    ({"type": "function", "name": "wait", "namespace": "agents"}, ToolChoice("required", ("agents.wait",))),
    (
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}, *NAMED]},
        ToolChoice("auto", ("weather",)),
    ),
    (
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "agents"}]},
        ToolChoice("required", ("agents.wait",)),
    ),
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, ToolChoice("none")),
]


@pytest.mark.parametrize(("sent", "choice"), CHOICES)
def test_a_tool_choice_is_honoured(sent, choice):
    assert parse(tools=[WEATHER, AGENTS, SEARCH], tool_choice=sent).request.tool_choice == choice


@pytest.mark.parametrize(
    ("tools", "sent"),
    [
        ([WEATHER, SEARCH], {"type": "web_search"}),
        ([SEARCH], "required"),
        ([], "required"),
        ([WEATHER, SEARCH], {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]}),
        ([WEATHER], {"type": "function", "name": "other"}),
        ([AGENTS], {"type": "function", "name": "wait"}),
        ([WEATHER], {"type": "custom", "name": "weather"}),
        ([WEATHER], "any"),
        ([WEATHER], 3),
    ],
)
def test_tool_choice_that_cannot_be_honoured_is_refused(tools, sent):
    with pytest.raises(InvalidRequest) as refused:
        parse(tools=tools, tool_choice=sent)
    assert refused.value.field == "tool_choice"


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({"type": "custom", "name": "c", "format": {"type": "grammar"}}, "tools[1].format.syntax"),
        ({"type": "custom", "name": "c", "format": {"type": "json"}}, "tools[1].format.type"),
        ({"type": "custom", "name": "c", "format": lark("start: missing")}, "tools[1].format.definition"),
        ({"type": "custom", "name": "c", "format": lark("start: %json {}")}, "tools[1].format.definition"),
        ({"type": "custom", "name": "weather"}, "tools[1].name"),
        ({"type": "quantum", "name": "x"}, "tools[1].type"),
        ({"name": "f"}, "tools[1].type"),
        ({"type": "function", "function": {"name": "f"}}, "tools[1].name"),
        ({"type": "function", "name": "a b"}, "tools[1].name"),
        ({"type": "function", "name": "weather"}, "tools[1].name"),
        ({**AGENTS, "tools": [{"type": "web_search", "name": "c"}]}, "tools[1].tools[0].type"),
        ({**AGENTS, "tools": AGENTS["tools"] * 2}, "tools[1].tools[1].name"),
        (3, "tools[1]"),
    ],
)
def test_a_tool_that_cannot_be_offered_is_refused_by_its_path(tool, field):
    with pytest.raises(InvalidRequest) as refused:
        parse(tools=[WEATHER, tool])
    assert refused.value.field == field


def test_an_ignored_search_is_named_in_a_header(respond):
    response = respond(tools=[WEATHER, SEARCH], keep_alive=1)
    assert response.status_code == 200
    assert response.headers["x-orchard-ignored"] == "keep_alive, tools[1] (web_search)"
    assert response.json()["tools"] == [WEATHER, SEARCH]

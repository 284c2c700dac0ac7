"""An agent's long conversation in the Anthropic dialect: how much of each prompt is computed and how much cached."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.clients.questions import MODEL, TOOL_DESCRIPTION, TOOL_NAME, TOOL_SCHEMA

if TYPE_CHECKING:
    import anthropic

pytestmark = pytest.mark.server

SLACK_TOKENS = 24
"""Computed again in a turn: the opening of the answer before, which history writes differently."""

CITIES = ["Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Oslo", "Tokyo", "Cairo", "Lima"]
CACHED: Any = {"cache_control": {"type": "ephemeral"}}
SYSTEM: Any = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.330.abc; cc_entrypoint=cli;"},
    {"type": "text", "text": "Use the tools when needed.", **CACHED},
]
TOOLS: Any = [
    {"name": TOOL_NAME, "description": TOOL_DESCRIPTION, "input_schema": TOOL_SCHEMA},
    {
        "name": "set_timer",
        "description": "Start a timer in minutes",
        "input_schema": {"type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]},
        **CACHED,
    },
]


@dataclass(frozen=True)
class Turn:
    """One request of the conversation, in prompt tokens."""

    is_question: bool
    """The user's, not the results of tools."""
    num_prompt_tokens: int
    num_computed_tokens: int
    stop_reason: str | None


class Agent:
    """Streams, lets `cache_control` move to the last block and answers each tool call, as Claude Code does."""

    def __init__(self, client: "anthropic.Anthropic", thinking: Any):
        self._client = client
        self._thinking = thinking
        self._messages: list[Any] = []
        self.turns: list[Turn] = []
        self.asked: list[str] = []

    def ask(self, text: str) -> str:
        """Goes on until the model answers with text. Every request is a turn."""
        message = self._request([{"type": "text", "text": text}], is_question=True)
        while results := [self._result(block) for block in message.content if block.type == "tool_use"]:
            message = self._request(results, is_question=False)
        return "".join(block.text for block in message.content if block.type == "text")

    def _request(self, content: list[Any], is_question: bool) -> Any:
        marked = [*content[:-1], {**content[-1], **CACHED}]
        with self._client.messages.stream(
            model=MODEL,
            max_tokens=32_000,
            system=SYSTEM,
            tools=TOOLS,
            thinking=self._thinking,
            metadata={"user_id": f"turn {len(self.turns)}"},
            messages=[*self._messages, {"role": "user", "content": marked}],
        ) as stream:
            message = stream.get_final_message()
        self._messages += [
            {"role": "user", "content": content},
            {"role": "assistant", "content": [block.to_dict() for block in message.content]},
        ]
        usage = message.usage
        computed = usage.input_tokens + (usage.cache_creation_input_tokens or 0)
        total = computed + (usage.cache_read_input_tokens or 0)
        self.turns.append(Turn(is_question, total, computed, message.stop_reason))
        return message

    def _result(self, call: Any) -> Any:
        self.asked.append(call.input["city"])
        text = f'{{"temperature": {10 + len(self.asked)}, "condition": "sunny"}}'
        return {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": text}]}


@pytest.fixture(scope="module")
def claude(base_url: str) -> "Iterator[anthropic.Anthropic]":
    import anthropic

    with anthropic.Anthropic(base_url=base_url, api_key="agent", max_retries=0, timeout=120) as claude:
        yield claude


def num_new_tokens(turns: list[Turn], drops_thoughts: bool) -> int:
    """Return the new tokens of the last turn. A template that drops thoughts when the user speaks writes all that
    follows the question before anew; the results of tools go on behind their thought."""
    *before, last = turns
    goes_on_from = [turn for turn in before if turn.is_question] if drops_thoughts and last.is_question else before
    return last.num_prompt_tokens - goes_on_from[-1].num_prompt_tokens


@pytest.mark.parametrize(
    ("kind", "num_questions"),
    [
        pytest.param("disabled", 10, marks=pytest.mark.night("with thoughts there are turns of both kinds")),
        pytest.param("adaptive", 10, marks=pytest.mark.night("the gate asks four of the questions")),
        ("adaptive", 4),
    ],
)
def test_each_turn_of_an_agent_computes_its_new_tokens_alone(
    claude: "anthropic.Anthropic", kind: str, num_questions: int
):
    agent, cities = Agent(claude, {"type": kind}), CITIES[:num_questions]
    for number, city in zip(itertools.count(11), cities, strict=False):
        assert f"with {number} degrees" in agent.ask(f"What is the weather in {city}?")
    assert agent.asked == cities
    assert [turn.stop_reason for turn in agent.turns] == ["tool_use", "end_turn"] * num_questions
    for number, turn in enumerate(agent.turns[1:], 2):
        num_new = num_new_tokens(agent.turns[:number], drops_thoughts=kind == "adaptive")
        assert turn.num_computed_tokens <= num_new + SLACK_TOKENS, agent.turns

"""The anthropic SDK on messages and count_tokens."""

import base64
import json
from typing import Any

import anthropic
import pytest
from anthropic import beta_tool

from tests.e2e.clients.questions import (
    CAPITAL,
    CAPITAL_QUESTION,
    CAPITAL_THOUGHT,
    EMMA,
    MODEL,
    PERSON_QUESTION,
    SHAPE,
    SHAPE_QUESTION,
    TOOL_NAME,
    TWO_CITIES,
    TWO_CITIES_QUESTION,
    WEATHER,
    WEATHER_QUESTION,
    WEATHER_RESULT,
    WEATHER_THOUGHT,
    Person,
)
from tests.support.sdks.anthropic_messages import TOOLS, ask, blocks, calls_of, results, said, text_of, user

pytestmark = [pytest.mark.server, pytest.mark.night("the gate runs this SDK over a scripted backend")]

STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@STREAMED
def test_a_question_is_answered(claude: anthropic.Anthropic, streamed: bool):
    message = ask(claude, [user(CAPITAL_QUESTION)], streamed)
    assert (text_of(message), message.stop_reason) == (CAPITAL, "end_turn")
    assert message.usage.output_tokens > 0


def test_system_prompt_in_blocks_reaches_the_model(claude: anthropic.Anthropic):
    system = [{"type": "text", "text": "You are Kira, a baker from Oakdale.", "cache_control": {"type": "ephemeral"}}]
    assert "Oakdale" in text_of(ask(claude, [user("Where do you live?")], system=system))


def test_events_come_in_their_order(claude: anthropic.Anthropic):
    stream = claude.messages.create(model=MODEL, max_tokens=50, messages=[user(CAPITAL_QUESTION)], stream=True)
    kinds = [event.type for event in stream]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


@STREAMED
def test_a_tool_call_and_its_result_lead_to_an_answer(claude: anthropic.Anthropic, streamed: bool):
    conversation = [user(WEATHER_QUESTION)]
    message = ask(claude, conversation, streamed, tools=TOOLS)
    assert message.stop_reason == "tool_use" and not text_of(message)
    assert calls_of(message) == [(TOOL_NAME, {"city": "Paris"})]
    answer = ask(claude, [*conversation, said(message), results(message)], streamed, tools=TOOLS)
    assert (text_of(answer), answer.stop_reason) == (WEATHER, "end_turn")


@STREAMED
def test_two_calls_of_one_message_have_ids_of_their_own(claude: anthropic.Anthropic, streamed: bool):
    conversation = [user(TWO_CITIES_QUESTION)]
    message = ask(claude, conversation, streamed, tools=TOOLS)
    assert calls_of(message) == [(TOOL_NAME, {"city": city}) for city in TWO_CITIES]
    assert len({block.id for block in blocks(message, "tool_use")}) == 2
    answer = ask(claude, [*conversation, said(message), results(message)], streamed, tools=TOOLS)
    assert "Paris" in text_of(answer)


def test_disable_parallel_tool_use_gives_one_call(claude: anthropic.Anthropic):
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = ask(claude, [user(TWO_CITIES_QUESTION)], tools=TOOLS, tool_choice=choice)
    assert calls_of(message) == [(TOOL_NAME, {"city": "Paris"})]


@STREAMED
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": TOOL_NAME}], ids=["any", "tool"])
def test_a_forced_tool_is_called_even_for_a_greeting(claude: anthropic.Anthropic, choice: Any, streamed: bool):
    message = ask(claude, [user("Hello!")], streamed, tools=TOOLS, tool_choice=choice)
    assert [name for name, _ in calls_of(message)][:1] == [TOOL_NAME] and message.stop_reason == "tool_use"


def test_tool_choice_none_gives_text(claude: anthropic.Anthropic):
    message = ask(claude, [user(WEATHER_QUESTION)], tools=TOOLS, tool_choice={"type": "none"}, max_tokens=60)
    assert not calls_of(message) and "<tool_call>" not in text_of(message)


def test_the_tool_runner_ends_with_an_answer(claude: anthropic.Anthropic):
    asked: list[str] = []

    @beta_tool
    def get_weather(city: str) -> str:
        """Get the weather for a city"""
        asked.append(city)
        return WEATHER_RESULT

    runner = claude.beta.messages.tool_runner(
        model=MODEL, max_tokens=200, messages=[user(WEATHER_QUESTION)], tools=[get_weather]
    )
    assert text_of(runner.until_done()) == WEATHER and asked == ["Paris"]


@STREAMED
@pytest.mark.parametrize(
    "thinking", [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}], ids=["enabled", "adaptive"]
)
def test_a_thought_is_a_block_of_its_own(claude: anthropic.Anthropic, thinking: Any, streamed: bool):
    message = ask(claude, [user(CAPITAL_QUESTION)], streamed, thinking=thinking)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking.strip() == CAPITAL_THOUGHT and message.content[0].signature
    assert text_of(message) == CAPITAL


def test_a_thought_of_omitted_display_is_empty_and_signed(claude: anthropic.Anthropic):
    thinking = {"type": "adaptive", "display": "omitted"}
    message = ask(claude, [user(CAPITAL_QUESTION)], thinking=thinking)
    [block] = blocks(message, "thinking")
    assert block.thinking == "" and block.signature and text_of(message) == CAPITAL


@STREAMED
def test_a_thought_comes_before_a_tool_call_and_goes_back_with_it(claude: anthropic.Anthropic, streamed: bool):
    options: dict[str, Any] = {"tools": TOOLS, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    conversation = [user(WEATHER_QUESTION)]
    message = ask(claude, conversation, streamed, **options)
    assert blocks(message, "thinking")[0].thinking.strip() == WEATHER_THOUGHT
    assert calls_of(message) == [(TOOL_NAME, {"city": "Paris"})]
    answer = ask(claude, [*conversation, said(message), results(message)], streamed, **options)
    assert text_of(answer) == WEATHER


def test_a_parsed_message_is_an_object_of_the_schema(claude: anthropic.Anthropic):
    message = claude.messages.parse(model=MODEL, max_tokens=200, messages=[user(PERSON_QUESTION)], output_format=Person)
    assert message.parsed_output == EMMA


def test_image_is_accepted_in_a_message_and_in_a_tool_result(claude: anthropic.Anthropic, red_circle_png: bytes):
    data = base64.b64encode(red_circle_png).decode()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    assert SHAPE in text_of(ask(claude, [user([image, {"type": "text", "text": SHAPE_QUESTION}])]))
    call = {"type": "tool_use", "id": "toolu_1", "name": TOOL_NAME, "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [image]}
    turns = [user(WEATHER_QUESTION), {"role": "assistant", "content": [call]}, user([result])]
    assert ask(claude, turns, tools=TOOLS).content


def test_a_stop_sequence_is_named(claude: anthropic.Anthropic):
    message = ask(claude, [user("Count from 1 to 9.")], stop_sequences=[" 5"])
    assert (text_of(message), message.stop_reason, message.stop_sequence) == ("1, 2, 3, 4,", "stop_sequence", " 5")


def test_answer_at_the_token_limit_ends_with_max_tokens(claude: anthropic.Anthropic):
    message = ask(claude, [user("Tell me a story.")], max_tokens=5)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 5)


def test_max_tokens_beyond_the_context_is_a_ceiling(claude: anthropic.Anthropic):
    assert text_of(ask(claude, [user(CAPITAL_QUESTION)], streamed=True, max_tokens=64_000)) == CAPITAL


def test_count_tokens_agrees_with_the_input_tokens_of_the_answer(claude: anthropic.Anthropic):
    fields: dict[str, Any] = {"model": MODEL, "messages": [user(WEATHER_QUESTION)], "tools": TOOLS}
    usage = claude.messages.create(max_tokens=1, **fields).usage
    total = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert claude.messages.count_tokens(**fields).input_tokens == total


def test_a_repeated_prompt_is_read_from_the_cache(claude: anthropic.Anthropic):
    long = "Read this text. " + "The old gate is quiet. " * 40 + CAPITAL_QUESTION
    ask(claude, [user(long)], max_tokens=4)
    usage = ask(claude, [user(long)], max_tokens=4).usage
    assert usage.cache_read_input_tokens > 100 > usage.input_tokens


def test_models_are_listed_in_anthropic_s_shape(claude: anthropic.Anthropic):
    [model, *_] = claude.models.list()
    assert (model.id, model.type) == (MODEL, "model")


def test_an_unknown_model_is_not_found(claude: anthropic.Anthropic):
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(model="claude-none", max_tokens=5, messages=[user("Hello!")])
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "not_found_error"
    assert "claude-none" in body["error"]["message"] and body["request_id"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"safeguards": [{"type": "dangerous_tool_use"}]}, "safeguards: Extra inputs are not permitted"),
        (
            {"mcp_servers": [{"type": "url", "url": "https://a.example", "name": "a"}]},
            "mcp_servers: Extra inputs are not permitted",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
        ({"messages": [{"role": "root", "content": "x"}]}, "messages.0.role"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_field_is_named_in_anthropic_s_words(claude: anthropic.Anthropic, fields: Any, says: str):
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model=MODEL, **{"max_tokens": 5, "messages": [user("Hello!")]}, extra_body=fields)
    body: Any = caught.value.body
    assert body["error"]["type"] == "invalid_request_error"
    assert says in body["error"]["message"], json.dumps(body)


def test_a_prompt_beyond_the_context_is_too_long(claude: anthropic.Anthropic):
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 32768 maximum"):
        ask(claude, [user("4 2 1 7 9 " * 7000)])


def test_a_thread_is_refused_with_the_code_that_the_sdk_knows(claude: anthropic.Anthropic):
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(
            model=MODEL, max_tokens=5, messages=[user("Hello!")], extra_body={"thread": {"type": "create"}}
        )
    body: Any = caught.value.body
    assert body["error"]["details"]["error_code"] == "thread_unsupported_request"

"""The openai SDK on chat completions, completions, embeddings and models."""

import json
import math
from typing import Any

import openai
import pytest

from tests.e2e.clients.questions import (
    CAPITAL,
    CAPITAL_QUESTION,
    CAPITAL_THOUGHT,
    EMMA,
    MODEL,
    PERSON_QUESTION,
    SHAPE,
    SHAPE_QUESTION,
    STORY_QUESTION,
    TOOL_NAME,
    TWO_CITIES,
    TWO_CITIES_QUESTION,
    WEATHER,
    WEATHER_QUESTION,
    WEATHER_THOUGHT,
    Person,
)
from tests.support.sdks.openai_chat import NAMED, TOOLS, calls_of, complete, results, thought_of, user

pytestmark = [pytest.mark.server, pytest.mark.night("the gate runs this SDK over a scripted backend")]

STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@STREAMED
def test_a_question_is_answered(client: openai.OpenAI, streamed: bool):
    choice = complete(client, [user(CAPITAL_QUESTION)], streamed)
    assert (choice.message.content, choice.finish_reason) == (CAPITAL, "stop")


@STREAMED
def test_a_tool_call_and_its_result_lead_to_an_answer(client: openai.OpenAI, streamed: bool):
    conversation = [user(WEATHER_QUESTION)]
    choice = complete(client, conversation, streamed, tools=TOOLS)
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    assert calls_of(choice.message) == [(TOOL_NAME, {"city": "Paris"})]
    conversation += [choice.message.to_dict(), *results(choice.message)]
    choice = complete(client, conversation, streamed, tools=TOOLS)
    assert (choice.message.content, choice.finish_reason) == (WEATHER, "stop")


@STREAMED
def test_two_calls_of_one_answer_have_ids_of_their_own(client: openai.OpenAI, streamed: bool):
    choice = complete(client, [user(TWO_CITIES_QUESTION)], streamed, tools=TOOLS, parallel_tool_calls=True)
    assert calls_of(choice.message) == [(TOOL_NAME, {"city": city}) for city in TWO_CITIES]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    conversation = [user(TWO_CITIES_QUESTION), choice.message.to_dict(), *results(choice.message)]
    assert "Paris" in complete(client, conversation, streamed, tools=TOOLS).message.content


def test_parallel_tool_calls_false_gives_one_call(client: openai.OpenAI):
    choice = complete(client, [user(TWO_CITIES_QUESTION)], tools=TOOLS, parallel_tool_calls=False)
    assert calls_of(choice.message) == [(TOOL_NAME, {"city": "Paris"})]


@STREAMED
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_tool_is_called_even_for_a_greeting(client: openai.OpenAI, choice: Any, streamed: bool):
    answer = complete(client, [user("Hello!")], streamed, tools=TOOLS, tool_choice=choice, max_tokens=200)
    [(name, arguments)] = calls_of(answer.message)[:1]
    assert name == TOOL_NAME and isinstance(arguments["city"], str)


def test_tool_choice_none_gives_text(client: openai.OpenAI):
    choice = complete(client, [user(WEATHER_QUESTION)], tools=TOOLS, tool_choice="none", max_tokens=60)
    assert choice.message.tool_calls is None and "<tool_call>" not in (choice.message.content or "")


@STREAMED
def test_a_thought_is_apart_from_the_content(client: openai.OpenAI, streamed: bool):
    choice = complete(client, [user(CAPITAL_QUESTION)], streamed, reasoning_effort="low")
    assert choice.message.content == CAPITAL
    assert thought_of(choice.message) == CAPITAL_THOUGHT


@STREAMED
def test_a_thought_comes_before_a_tool_call_and_goes_back_with_it(client: openai.OpenAI, streamed: bool):
    conversation = [user(WEATHER_QUESTION)]
    options: dict[str, Any] = {"tools": TOOLS, "reasoning_effort": "high", "tool_choice": "required"}
    message = complete(client, conversation, streamed, **options).message
    assert thought_of(message) == WEATHER_THOUGHT
    assert calls_of(message) == [(TOOL_NAME, {"city": "Paris"})]
    conversation += [message.to_dict(), *results(message)]
    assert complete(client, conversation, streamed, tools=TOOLS).message.content == WEATHER


@STREAMED
@pytest.mark.parametrize("effort", [None, "low"], ids=["at once", "thinking"])
def test_a_parsed_answer_is_an_object_of_the_schema(client: openai.OpenAI, streamed: bool, effort: Any):
    options = {} if effort is None else {"reasoning_effort": effort}
    if streamed:
        choice = complete(client, [user(PERSON_QUESTION)], True, response_format=Person, **options)
    else:
        choice = client.chat.completions.parse(
            model=MODEL, messages=[user(PERSON_QUESTION)], response_format=Person, **options
        ).choices[0]
    assert choice.message.parsed == EMMA


def test_json_mode_gives_an_object(client: openai.OpenAI):
    choice = complete(client, [user(PERSON_QUESTION)], response_format={"type": "json_object"})
    assert json.loads(choice.message.content) == EMMA.model_dump()


def test_an_image_is_seen(client: openai.OpenAI, red_circle: str):
    image = {"type": "image_url", "image_url": {"url": red_circle, "detail": "high"}}
    question = {"role": "user", "content": [{"type": "text", "text": SHAPE_QUESTION}, image]}
    assert SHAPE in complete(client, [question]).message.content


def test_an_unknown_model_is_not_found(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-none", messages=[user("Hello!")])
    assert caught.value.code == "model_not_found" and "gpt-none" in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 5}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"store": True}, "store"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_field_is_named(client: openai.OpenAI, fields: Any, param: str):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[user("Hello!")], **fields)
    assert (caught.value.param or "").startswith(param)


def test_an_unknown_field_is_ignored_and_reported(client: openai.OpenAI):
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=[user(CAPITAL_QUESTION)], extra_body={"shiny_new_field": 1}
    )
    assert raw.headers["x-orchard-ignored"] == "shiny_new_field"
    assert raw.parse().choices[0].message.content == CAPITAL


def test_a_prompt_is_completed_with_text_tokens_and_a_stream(client: openai.OpenAI):
    prompt = "<|im_start|>user\n"
    whole = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0)
    pieces = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0, stream=True)
    assert "".join(choice.text for piece in pieces for choice in piece.choices) == whole.choices[0].text
    listed = client.completions.create(model=MODEL, prompt=[prompt, prompt], max_tokens=8, temperature=0, echo=True)
    assert [choice.text for choice in listed.choices] == [prompt + whole.choices[0].text] * 2


def test_embeddings_are_normalised_and_the_same_in_base64(client: openai.OpenAI):
    texts = [CAPITAL_QUESTION, STORY_QUESTION, CAPITAL_QUESTION]
    packed = client.embeddings.create(model=MODEL, input=texts)  # the SDK asks for base64
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    first, second, third = (item.embedding for item in packed.data)
    assert math.isclose(sum(x * x for x in first), 1.0, rel_tol=1e-3)
    assert first == pytest.approx(third, abs=1e-5) and first != pytest.approx(second, abs=1e-2)
    assert plain.data[0].embedding == pytest.approx(first, abs=1e-5)
    assert plain.usage.prompt_tokens > 0


def test_the_model_is_listed_and_found_by_name(client: openai.OpenAI):
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-none")

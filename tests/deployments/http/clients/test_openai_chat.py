"""The openai SDK on chat completions, completions, embeddings and models."""

import json
from typing import Any

import pytest

from deployments.requests import Route, ToolChoice
from engine.errors import EngineFailed
from engine.processing.message import image_sources
from tests.deployments.http.clients.scripted import RAW_TEXT
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
from tests.support.sdks.openai_chat import NAMED, TOOLS, calls_of, complete, completion, results, thought_of, user

SDKS = ("openai",)

STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@STREAMED
def test_a_question_is_answered_with_usage(client, backend, streamed: bool):
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if streamed else {}
    answer = completion(client, [user(CAPITAL_QUESTION)], streamed, **options)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CAPITAL, "stop")
    assert (answer.id, answer.model) == (backend.asked[0].request_id, MODEL)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (7, 5)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 7


@STREAMED
def test_a_tool_call_and_its_result_lead_to_an_answer(client, backend, streamed: bool):
    conversation = [user(WEATHER_QUESTION)]
    choice = complete(client, conversation, streamed, tools=TOOLS)
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    assert calls_of(choice.message) == [(TOOL_NAME, {"city": "Paris"})]
    conversation += [choice.message.to_dict(), *results(choice.message)]
    choice = complete(client, conversation, streamed, tools=TOOLS)
    assert (choice.message.content, choice.finish_reason) == (WEATHER, "stop")
    [tool] = backend.asked[1].tools
    assert (tool.name, tool.parameters["required"]) == (TOOL_NAME, ["city"])
    assert backend.asked[1].messages[-1]["content"] == WEATHER_RESULT


@STREAMED
def test_two_calls_of_one_answer_have_ids_of_their_own(client, streamed: bool):
    choice = complete(client, [user(TWO_CITIES_QUESTION)], streamed, tools=TOOLS, parallel_tool_calls=True)
    assert calls_of(choice.message) == [(TOOL_NAME, {"city": city}) for city in TWO_CITIES]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    conversation = [user(TWO_CITIES_QUESTION), choice.message.to_dict(), *results(choice.message)]
    answer = complete(client, conversation, streamed, tools=TOOLS).message.content
    assert answer == " ".join(WEATHER.replace("Paris", city) for city in TWO_CITIES)


@pytest.mark.parametrize(
    ("choice", "means", "streamed"),
    [("required", ToolChoice("required"), False), (NAMED, ToolChoice("required", (TOOL_NAME,)), True)],
    ids=["required", "named"],
)
def test_a_forced_tool_is_called_even_for_a_greeting(client, backend, choice: Any, means: ToolChoice, streamed: bool):
    answer = complete(client, [user("Hello!")], streamed, tools=TOOLS, tool_choice=choice)
    assert (calls_of(answer.message), answer.finish_reason) == ([(TOOL_NAME, {"city": "Paris"})], "tool_calls")
    assert backend.asked[0].tool_choice == means


def test_options_limit_the_calls_to_one_or_none(client, backend):
    message = complete(client, [user(TWO_CITIES_QUESTION)], tools=TOOLS, parallel_tool_calls=False).message
    assert calls_of(message) == [(TOOL_NAME, {"city": "Paris"})]
    message = complete(client, [user(WEATHER_QUESTION)], tools=TOOLS, tool_choice="none").message
    assert message.tool_calls is None and message.content
    assert [request.tool_choice.mode for request in backend.asked] == ["auto", "none"]


@STREAMED
def test_a_thought_is_apart_from_the_content(client, backend, streamed: bool):
    choice = complete(client, [user(CAPITAL_QUESTION)], streamed, reasoning_effort="low")
    assert (thought_of(choice.message), choice.message.content) == (CAPITAL_THOUGHT, CAPITAL)
    assert backend.asked[0].thinking.effort == "low"


@STREAMED
def test_a_thought_comes_before_a_tool_call_and_goes_back_with_it(client, backend, streamed: bool):
    conversation = [user(WEATHER_QUESTION)]
    message = complete(client, conversation, streamed, tools=TOOLS, reasoning_effort="high").message
    assert (thought_of(message), calls_of(message)) == (WEATHER_THOUGHT, [(TOOL_NAME, {"city": "Paris"})])
    conversation += [message.to_dict(), *results(message)]
    assert complete(client, conversation, streamed, tools=TOOLS).message.content == WEATHER
    assert backend.asked[1].messages[1]["reasoning_content"] == WEATHER_THOUGHT


@pytest.mark.parametrize(("streamed", "effort"), [(False, None), (True, "low")], ids=["whole", "streamed thinking"])
def test_a_parsed_answer_is_an_object_of_the_schema(client, backend, streamed: bool, effort: Any):
    options: dict[str, Any] = {"response_format": Person, **({} if effort is None else {"reasoning_effort": effort})}
    if streamed:
        choice = complete(client, [user(PERSON_QUESTION)], True, **options)
    else:
        choice = client.chat.completions.parse(model=MODEL, messages=[user(PERSON_QUESTION)], **options).choices[0]
    assert choice.message.parsed == EMMA
    grammar = backend.asked[0].grammar
    assert grammar.kind == "json_schema" and list(json.loads(grammar.text)["properties"]) == list(Person.model_fields)


def test_json_mode_gives_an_object(client, backend):
    choice = complete(client, [user(PERSON_QUESTION)], response_format={"type": "json_object"})
    assert json.loads(choice.message.content) == EMMA.model_dump()
    assert backend.asked[0].grammar.kind == "json_object"


def test_an_image_reaches_the_backend(client, backend, red_circle: str):
    image = {"type": "image_url", "image_url": {"url": red_circle, "detail": "high"}}
    assert complete(client, [user([{"type": "text", "text": SHAPE_QUESTION}, image])]).message.content == SHAPE
    [(request, route)] = backend.requests
    assert route is Route.MLLM and [image.url for image in image_sources(request.messages)] == [red_circle]


def test_answer_at_the_token_limit_has_the_finish_reason_length(client):
    choice = complete(client, [user(CAPITAL_QUESTION)], max_tokens=3)
    assert choice.finish_reason == "length" and CAPITAL.startswith(choice.message.content)


def test_an_unknown_model_is_not_found(client):
    import openai

    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-none", messages=[user("Hello!")])
    assert caught.value.code == "model_not_found" and "gpt-none" in caught.value.message


def test_a_bad_field_is_named(client, backend):
    import openai

    tools: Any = [*TOOLS, {"type": "web_search"}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[user("Hello!")], tools=tools)
    assert caught.value.param == "tools[1].type" and "tools[1].type" in caught.value.message
    assert backend.asked == []


def test_error_in_the_middle_of_a_stream_is_raised_after_its_text(client, backend):
    import openai

    backend.failure = EngineFailed("The step failed.")
    contents: list[str] = []
    with pytest.raises(openai.APIError, match="engine failed") as caught:
        for chunk in client.chat.completions.create(model=MODEL, messages=[user(CAPITAL_QUESTION)], stream=True):
            contents += [chunk.choices[0].delta.content or ""]
    assert caught.value.code == "engine_failed"
    assert CAPITAL.startswith("".join(contents)) and "".join(contents)


def test_an_unknown_field_is_ignored_and_reported(client):
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=[user(CAPITAL_QUESTION)], extra_body={"shiny_new_field": 1}
    )
    assert raw.headers["x-orchard-ignored"] == "shiny_new_field"
    assert raw.parse().choices[0].message.content == CAPITAL


def test_a_prompt_is_completed_with_text_tokens_and_a_stream(client, backend):
    whole = client.completions.create(model=MODEL, prompt="They met ", max_tokens=20)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (RAW_TEXT, "stop")
    chunks = list(client.completions.create(model=MODEL, prompt="They met ", max_tokens=20, stream=True))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == RAW_TEXT and len(chunks) > 2
    prompts = ["They met ", "She sang "]
    listed = client.completions.create(model=MODEL, prompt=prompts, max_tokens=20, echo=True)
    assert [choice.text for choice in listed.choices] == [prompt + RAW_TEXT for prompt in prompts]
    client.completions.create(model=MODEL, prompt=[72, 105], max_tokens=20)
    assert [request.raw_prompt for request in backend.asked] == ["They met ", "They met ", *prompts, (72, 105)]


def test_embeddings_are_the_same_in_base64_and_in_floats(client, backend):
    texts = [CAPITAL_QUESTION, WEATHER_QUESTION]
    packed = client.embeddings.create(model=MODEL, input=texts)  # the SDK asks for base64
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    assert [item.embedding for item in packed.data] == [[0.0, 1.0, 0.0], [1.0, 1.0, 0.0]]
    assert [item.embedding for item in plain.data] == [item.embedding for item in packed.data]
    assert plain.usage.prompt_tokens == sum(map(len, texts))
    assert [request.prompts for request in backend.embeds] == [tuple(texts)] * 2


def test_the_model_is_listed_and_found_by_name(client):
    import openai

    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-none")

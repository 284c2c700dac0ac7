"""pydantic-ai's agents on all three faces."""

from typing import Any

import pytest

from engine.processing.message import image_sources
from tests.e2e.clients.questions import (
    EMMA,
    SHAPE,
    SHAPE_QUESTION,
    TWO_CITIES,
    TWO_CITIES_QUESTION,
    WEATHER,
    WEATHER_THOUGHT,
    get_weather,
)
from tests.support.sdks.pydantic_ai_agents import PERSON_QUESTIONS, THINKING, model_of, person_output, run, thoughts_of

SDKS = ("pydantic_ai.models.openai", "pydantic_ai.models.anthropic")

FACES = pytest.mark.parametrize("face", ["chat", "responses", "messages"])
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@FACES
@STREAMED
def test_thinking_agent_calls_its_tool_twice_and_answers_with_the_results(
    base_url: str, backend, face: str, streamed: bool
):
    from pydantic_ai import Agent

    agent = Agent(model_of(base_url, face), tools=[get_weather], instructions="Use the tools when needed.")
    settings: Any = THINKING[face]
    output, messages = run(agent, TWO_CITIES_QUESTION, streamed, model_settings=settings)
    assert output == " ".join(WEATHER.replace("Paris", city) for city in TWO_CITIES)
    assert [message.kind for message in messages] == ["request", "response"] * 2
    assert thoughts_of(messages[1]) == [WEATHER_THOUGHT]
    reasons = [message.finish_reason for message in (messages[1], messages[3])]
    assert reasons == ["stop" if face == "responses" else "tool_call", "stop"]  # a response has only its status
    said = backend.asked[1].messages[2]
    # for a model that it does not know it returns the reasoning item as text
    assert WEATHER_THOUGHT in said["content" if face == "responses" else "reasoning_content"]


@pytest.mark.parametrize(
    ("face", "way"),
    [
        ("chat", "tool"),
        ("chat", "native"),
        ("chat", "prompted"),
        ("responses", "tool"),
        ("responses", "native"),
        ("messages", "tool"),
        ("messages", "native"),
    ],
)
def test_an_output_is_an_object_of_the_schema(base_url: str, backend, face: str, way: str):
    from pydantic_ai import Agent

    output, _ = run(Agent(model_of(base_url, face), output_type=person_output(way)), PERSON_QUESTIONS[way])
    assert output == EMMA
    [request] = backend.asked
    assert (request.grammar is not None) == (way != "tool") and bool(request.tools) == (way == "tool")


@FACES
def test_an_image_reaches_the_backend(base_url: str, backend, face: str, red_circle: str, red_circle_png: bytes):
    from pydantic_ai import Agent, BinaryContent

    image = BinaryContent(red_circle_png, media_type="image/png")
    output, _ = run(Agent(model_of(base_url, face)), [SHAPE_QUESTION, image])
    assert output == SHAPE
    assert [image.url for image in image_sources(backend.asked[0].messages)] == [red_circle]


@FACES
def test_an_unknown_model_and_a_bad_field_are_errors_with_their_status(base_url: str, face: str):
    from pydantic_ai import Agent, ModelHTTPError

    with pytest.raises(ModelHTTPError) as caught:
        run(Agent(model_of(base_url, face, "none")), "Hello!")
    assert caught.value.status_code == 404
    with pytest.raises(ModelHTTPError, match="top_p") as caught:
        run(Agent(model_of(base_url, face)), "Hello!", model_settings={"top_p": 5.0})
    assert caught.value.status_code == 400

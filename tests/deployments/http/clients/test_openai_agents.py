"""openai-agents on chat completions and responses."""

import pytest

from engine.processing.message import image_sources
from tests.e2e.clients.questions import (
    EMMA,
    PERSON_QUESTION,
    SHAPE,
    SHAPE_QUESTION,
    TWO_CITIES,
    TWO_CITIES_QUESTION,
    WEATHER,
    WEATHER_QUESTION,
    Person,
)
from tests.support.sdks.openai_agents import run, weather_tool

SDKS = ("agents",)

FACES = pytest.mark.parametrize("face", ["chat", "responses"])
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@FACES
@STREAMED
def test_thinking_agent_calls_its_tool_twice_and_answers_with_the_results(
    base_url: str, backend, face: str, streamed: bool
):
    from agents import ModelSettings
    from openai.types.shared import Reasoning

    settings = ModelSettings(reasoning=Reasoning(effort="low"))
    result = run(
        base_url,
        face,
        TWO_CITIES_QUESTION,
        streamed,
        tools=[weather_tool()],
        instructions="Use the tools when needed.",
        model_settings=settings,
    )
    assert result.final_output == " ".join(WEATHER.replace("Paris", city) for city in TWO_CITIES)
    assert len(result.raw_responses) == len(backend.asked) == 2
    assert backend.asked[0].thinking.mode == "on"


@FACES
def test_a_second_run_goes_on_from_the_first(base_url: str, backend, face: str):
    first = run(base_url, face, WEATHER_QUESTION, tools=[weather_tool()])
    conversation = [*first.to_input_list(), {"role": "user", "content": "What is the weather in Oslo?"}]
    second = run(base_url, face, conversation, tools=[weather_tool()])
    assert second.final_output == WEATHER.replace("Paris", "Oslo")
    roles = [message["role"] for message in backend.asked[-1].messages]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant", "tool"]


@FACES
def test_an_output_is_an_object_of_the_schema(base_url: str, backend, face: str):
    assert run(base_url, face, PERSON_QUESTION, output_type=Person).final_output == EMMA
    assert backend.asked[0].grammar.kind == "json_schema"


@FACES
def test_an_image_reaches_the_backend(base_url: str, backend, face: str, red_circle: str):
    parts = [
        {"type": "input_text", "text": SHAPE_QUESTION},
        {"type": "input_image", "image_url": red_circle, "detail": "auto"},
    ]
    assert run(base_url, face, [{"role": "user", "content": parts}]).final_output == SHAPE
    assert [image.url for image in image_sources(backend.asked[0].messages)] == [red_circle]


@FACES
def test_an_unknown_model_and_a_bad_field_are_errors_of_the_sdk(base_url: str, face: str):
    import openai
    from agents import ModelSettings

    with pytest.raises(openai.NotFoundError):
        run(base_url, face, "Hello!", model="none")
    with pytest.raises(openai.BadRequestError) as caught:
        run(base_url, face, "Hello!", model_settings=ModelSettings(top_p=5))
    assert caught.value.param == "top_p"

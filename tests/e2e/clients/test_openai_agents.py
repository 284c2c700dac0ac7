"""openai-agents on chat completions and responses."""

import openai
import pytest
from agents import (
    ModelSettings,
)
from openai.types.shared import Reasoning

from tests.e2e.clients.questions import (
    CAPITAL,
    CAPITAL_QUESTION,
    EMMA,
    PERSON_QUESTION,
    SHAPE,
    SHAPE_QUESTION,
    WEATHER,
    WEATHER_QUESTION,
    Person,
)
from tests.support.sdks.openai_agents import run, weather_tool

pytestmark = [pytest.mark.server, pytest.mark.night("the gate runs this SDK over a scripted backend")]

FACES = pytest.mark.parametrize("face", ["chat", "responses"])
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])

get_weather = weather_tool()


@FACES
@STREAMED
def test_a_question_is_answered(base_url: str, face: str, streamed: bool):
    assert run(base_url, face, CAPITAL_QUESTION, streamed).final_output == CAPITAL


@FACES
@STREAMED
def test_tool_is_called_and_its_result_is_used_in_the_answer(base_url: str, face: str, streamed: bool):
    result = run(
        base_url, face, WEATHER_QUESTION, streamed, tools=[get_weather], instructions="Use the tools when needed."
    )
    assert result.final_output == WEATHER and len(result.raw_responses) == 2


@FACES
def test_a_second_run_goes_on_from_the_first(base_url: str, face: str):
    first = run(base_url, face, WEATHER_QUESTION, tools=[get_weather])
    conversation = [*first.to_input_list(), {"role": "user", "content": "What is the weather in Oslo?"}]
    assert "Oslo" in run(base_url, face, conversation, tools=[get_weather]).final_output


@FACES
def test_an_output_is_an_object_of_the_schema(base_url: str, face: str):
    assert run(base_url, face, PERSON_QUESTION, output_type=Person).final_output == EMMA


@FACES
@STREAMED
def test_a_thinking_agent_answers_and_calls_its_tool(base_url: str, face: str, streamed: bool):
    settings = ModelSettings(reasoning=Reasoning(effort="low"))
    result = run(base_url, face, WEATHER_QUESTION, streamed, tools=[get_weather], model_settings=settings)
    assert result.final_output == WEATHER


@FACES
def test_an_image_is_seen(base_url: str, face: str, red_circle: str):
    parts = [
        {"type": "input_text", "text": SHAPE_QUESTION},
        {"type": "input_image", "image_url": red_circle, "detail": "auto"},
    ]
    assert SHAPE in run(base_url, face, [{"role": "user", "content": parts}]).final_output


@FACES
def test_an_unknown_model_is_not_found(base_url: str, face: str):
    with pytest.raises(openai.NotFoundError):
        run(base_url, face, "Hello!", model="none")


@FACES
def test_a_bad_field_is_named(base_url: str, face: str):
    with pytest.raises(openai.BadRequestError) as caught:
        run(base_url, face, "Hello!", model_settings=ModelSettings(top_p=5))
    assert caught.value.param == "top_p"

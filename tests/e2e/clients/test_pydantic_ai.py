"""pydantic-ai's agents on all three faces."""

from typing import Any

import pytest
from pydantic_ai import Agent, BinaryContent, ModelHTTPError

from tests.e2e.clients.questions import (
    CAPITAL,
    CAPITAL_QUESTION,
    CAPITAL_THOUGHT,
    EMMA,
    SHAPE,
    SHAPE_QUESTION,
    WEATHER,
    WEATHER_QUESTION,
    get_weather,
)
from tests.support.sdks.pydantic_ai_agents import PERSON_QUESTIONS, THINKING, model_of, person_output, run, thoughts_of

pytestmark = [pytest.mark.server, pytest.mark.night("the gate runs this SDK over a scripted backend")]

FACES = pytest.mark.parametrize("face", ["chat", "responses", "messages"])
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@FACES
@STREAMED
def test_a_question_is_answered(base_url: str, face: str, streamed: bool):
    output, _ = run(Agent(model_of(base_url, face)), CAPITAL_QUESTION, streamed)
    assert output == CAPITAL


@FACES
@STREAMED
def test_tool_is_called_and_its_result_is_used_in_the_answer(base_url: str, face: str, streamed: bool):
    agent = Agent(model_of(base_url, face), tools=[get_weather], instructions="Use the tools when needed.")
    output, messages = run(agent, WEATHER_QUESTION, streamed)
    assert output == WEATHER and len(messages) == 4


@FACES
@pytest.mark.parametrize("way", ["tool", "native", "prompted"])
def test_an_output_is_an_object_of_the_schema(base_url: str, face: str, way: str):
    output, _ = run(Agent(model_of(base_url, face), output_type=person_output(way)), PERSON_QUESTIONS[way])
    assert output == EMMA


@FACES
@STREAMED
def test_a_thought_is_a_part_of_its_own(base_url: str, face: str, streamed: bool):
    settings: Any = THINKING[face]
    output, messages = run(Agent(model_of(base_url, face)), CAPITAL_QUESTION, streamed, model_settings=settings)
    assert (thoughts_of(messages[-1]), output) == ([CAPITAL_THOUGHT], CAPITAL)


@FACES
def test_an_image_is_seen(base_url: str, face: str, red_circle_png: bytes):
    image = BinaryContent(red_circle_png, media_type="image/png")
    output, _ = run(Agent(model_of(base_url, face)), [SHAPE_QUESTION, image])
    assert SHAPE in output


@FACES
def test_an_unknown_model_is_not_found(base_url: str, face: str):
    with pytest.raises(ModelHTTPError) as caught:
        run(Agent(model_of(base_url, face, "none")), "Hello!")
    assert caught.value.status_code == 404


@FACES
def test_a_bad_field_is_named(base_url: str, face: str):
    with pytest.raises(ModelHTTPError, match="top_p") as caught:
        run(Agent(model_of(base_url, face)), "Hello!", model_settings={"top_p": 5.0})
    assert caught.value.status_code == 400

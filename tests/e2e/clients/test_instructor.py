"""instructor: the same object by every mode that our dialects have."""

import anthropic
import openai
import pytest
from instructor.core import InstructorRetryException

from tests.e2e.clients.questions import EMMA
from tests.support.sdks.instructor_objects import from_anthropic, from_openai, partial_persons_of, person_of

pytestmark = [pytest.mark.server, pytest.mark.night("the gate runs this SDK over a scripted backend")]


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_openai_gives_an_object_of_the_schema(client: openai.OpenAI, mode: str):
    assert person_of(from_openai(client, mode), mode).model_dump() == EMMA.model_dump()


@pytest.mark.parametrize("mode", ["TOOLS", "JSON"])
def test_anthropic_gives_an_object_of_the_schema(claude: anthropic.Anthropic, mode: str):
    assert person_of(from_anthropic(claude, mode), mode, max_tokens=300).model_dump() == EMMA.model_dump()


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_a_streamed_object_ends_whole(client: openai.OpenAI, mode: str):
    partials = list(partial_persons_of(from_openai(client, mode), mode))
    assert partials[-1].model_dump() == EMMA.model_dump() and (len(partials) > 1 or mode == "TOOLS")


def test_an_unknown_model_is_an_error_of_the_sdk(client: openai.OpenAI):
    with pytest.raises((openai.NotFoundError, InstructorRetryException), match="none"):
        person_of(from_openai(client, "TOOLS"), "TOOLS", model="none")

"""instructor: the same object by every mode that our dialects have."""

import pytest

from tests.e2e.clients.questions import EMMA
from tests.support.sdks.instructor_objects import from_anthropic, from_openai, partial_persons_of, person_of

SDKS = ("instructor", "openai", "anthropic")


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_openai_gives_an_object_of_the_schema(client, backend, mode: str):
    assert person_of(from_openai(client, mode), mode).model_dump() == EMMA.model_dump()
    [request] = backend.asked
    assert bool(request.tools) == mode.endswith("TOOLS") and (request.grammar is None) == mode.endswith("TOOLS")


@pytest.mark.parametrize("mode", ["TOOLS", "JSON"])
def test_anthropic_gives_an_object_of_the_schema(claude, backend, mode: str):
    assert person_of(from_anthropic(claude, mode), mode, max_tokens=300).model_dump() == EMMA.model_dump()
    assert bool(backend.asked[0].tools) == (mode == "TOOLS")


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_a_streamed_object_ends_whole(client, mode: str):
    partials = list(partial_persons_of(from_openai(client, mode), mode))
    assert partials[-1].model_dump() == EMMA.model_dump() and (len(partials) > 1 or mode == "TOOLS")


def test_an_unknown_model_is_an_error_of_the_sdk(client):
    import openai
    from instructor.core import InstructorRetryException

    with pytest.raises((openai.NotFoundError, InstructorRetryException), match="none"):
        person_of(from_openai(client, "TOOLS"), "TOOLS", model="none")

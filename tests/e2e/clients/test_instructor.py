"""instructor: the same object by every mode that our dialects have."""

from collections.abc import Iterator
from typing import Any

import anthropic
import instructor
import openai
import pytest
from instructor import Mode
from instructor.core import InstructorRetryException

from tests.e2e.clients.questions import EMMA, MODEL, PERSON_QUESTION, Person, person_call_question

pytestmark = pytest.mark.server

OPENAI_MODES = (Mode.TOOLS, Mode.JSON, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS)
ANTHROPIC_MODES = (Mode.TOOLS, Mode.JSON)
BY_TOOL = {Mode.TOOLS, Mode.RESPONSES_TOOLS}


@pytest.fixture(scope="module")
def claude(base_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0) as claude:
        yield claude


def question(mode: Mode, name: str = "Person") -> Any:
    return [{"role": "user", "content": person_call_question(name) if mode in BY_TOOL else PERSON_QUESTION}]


@pytest.mark.parametrize("mode", OPENAI_MODES, ids=lambda mode: mode.name)
def test_openai_gives_an_object_of_the_schema(client: openai.OpenAI, mode: Mode):
    patched: Any = instructor.from_openai(client, mode=mode)
    person = patched.create(model=MODEL, messages=question(mode), response_model=Person, max_retries=0)
    assert person.model_dump() == EMMA.model_dump()


@pytest.mark.parametrize("mode", ANTHROPIC_MODES, ids=lambda mode: mode.name)
def test_anthropic_gives_an_object_of_the_schema(claude: anthropic.Anthropic, mode: Mode):
    patched: Any = instructor.from_anthropic(claude, mode=mode)
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 300, "max_retries": 0}
    person = patched.create(messages=question(mode), response_model=Person, **options)
    assert person.model_dump() == EMMA.model_dump()


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA], ids=lambda mode: mode.name)
def test_a_streamed_object_ends_whole(client: openai.OpenAI, mode: Mode):
    patched: Any = instructor.from_openai(client, mode=mode)
    partials = list(
        patched.create_partial(model=MODEL, messages=question(mode, "PartialPerson"), response_model=Person)
    )
    assert partials[-1].model_dump() == EMMA.model_dump() and (len(partials) > 1 or mode in BY_TOOL)


def test_an_unknown_model_is_an_error_of_the_sdk(client: openai.OpenAI):
    patched: Any = instructor.from_openai(client)
    with pytest.raises((openai.NotFoundError, InstructorRetryException), match="none"):
        patched.create(model="none", messages=question(Mode.TOOLS), response_model=Person, max_retries=0)

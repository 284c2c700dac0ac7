"""Objects of a schema by instructor, from the SDKs of both dialects."""

from typing import Any

from tests.e2e.clients.questions import MODEL, PERSON_QUESTION, Person, person_call_question


def question(mode: str, tool: str = "Person") -> Any:
    """Return the messages that a mode, such as "JSON_SCHEMA", needs; `tool` is the name that the schema gets."""
    text = person_call_question(tool) if mode.endswith("TOOLS") else PERSON_QUESTION
    return [{"role": "user", "content": text}]


def from_openai(client: Any, mode: str) -> Any:
    import instructor

    return instructor.from_openai(client, mode=instructor.Mode[mode])


def from_anthropic(claude: Any, mode: str) -> Any:
    import instructor

    return instructor.from_anthropic(claude, mode=instructor.Mode[mode])


def person_of(patched: Any, mode: str, **options: Any) -> Any:
    fields = {"model": MODEL, "messages": question(mode), "response_model": Person, "max_retries": 0, **options}
    return patched.create(**fields)


def partial_persons_of(patched: Any, mode: str) -> Any:
    """Return an iterator over the object while it grows."""
    return patched.create_partial(model=MODEL, messages=question(mode, "PartialPerson"), response_model=Person)

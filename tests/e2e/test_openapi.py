"""The OpenAPI document against its server: schemathesis makes requests of it, right ones and wrong ones."""

from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

if TYPE_CHECKING:
    from schemathesis import APIOperation, Case  # it takes seconds to import

pytestmark = [pytest.mark.server, pytest.mark.night("the gate freezes the document and tries its examples")]

NUM_EXAMPLES = 12
"""Examples of each operation, valid and invalid ones."""
SEED = 2026
TIMEOUT_S = 120.0
BUDGETS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MANY = ("n", "best_of")
STREAMS = "text/event-stream"
LINES = "application/x-ndjson"
SLOW = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large, HealthCheck.large_base_example)


def bounded(body: Any, path: str) -> Any:
    """The same with answers of a few tokens. What is wrong stays wrong."""
    if not isinstance(body, dict):
        return body
    if path.startswith("/api/"):
        options, limit = body.get("options", {}), {"num_predict": 4}
        return {**body, "options": {**options, **limit}} if isinstance(options, dict) else body
    lowered = {name: min(4, body[name]) for name in (*BUDGETS, *MANY) if type(body.get(name)) is int}
    budget = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return {budget: 4, **body, **lowered}


OF_RERANKERS = ("/rerank", "/score")


@pytest.fixture(scope="module")
def operations(http: httpx.Client, base_url: str) -> "list[APIOperation]":
    import schemathesis

    document = http.get("/openapi.json").raise_for_status().json()
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=base_url)
    return [
        schema[path][method.upper()]
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if set(operation["responses"]["200"]["content"]) != {STREAMS}  # it would not end
    ]


def check(case: "Case") -> None:
    """Raises an ExceptionGroup of what the document does not say."""
    from schemathesis import checks
    from schemathesis.specs.openapi import checks as of_openapi

    case.body = bounded(case.body, case.path)
    response = case.call(timeout=TIMEOUT_S)
    chosen: list[Any] = [checks.not_a_server_error, of_openapi.status_code_conformance]
    chosen += [of_openapi.content_type_conformance]
    if not response.headers.get("content-type", [""])[0].startswith((STREAMS, LINES)):
        chosen.append(of_openapi.response_schema_conformance)
    case.validate_response(response, checks=chosen)


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_every_operation_answers_as_the_document_says(
    operations: "list[APIOperation]", mode: str, subtests: pytest.Subtests
):
    from schemathesis import GenerationMode

    bounds = settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=SLOW,
    )
    for operation in operations:
        if mode == "negative" and not operation.body:
            continue  # there is nothing that could be wrong
        with subtests.test(operation.label):
            cases = operation.as_strategy(generation_mode=GenerationMode(mode))
            bounds(seed(SEED)(given(cases)(check)))()


def test_every_example_of_the_document_is_answered(http: httpx.Client):
    """Those of rerankers are refused with the reason: the demo is none (deployments/http/openai/test_rerank.py)."""
    document = http.get("/openapi.json").raise_for_status().json()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            examples = [content["example"]] if "example" in content else []
            examples += [example["value"] for example in content.get("examples", {}).values()]
            for example in examples:
                response = http.request(method, path, json=example)
                if path.endswith(OF_RERANKERS):
                    assert response.status_code == 400 and "scores no documents" in response.text
                    continue
                assert response.is_success, f"{method} {path}: {response.text[:300]}"

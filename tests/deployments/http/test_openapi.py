"""The OpenAPI document: it has every route that is served and no other, and its examples are accepted."""

import json
import re
from typing import Any

import jsonschema
import pytest
from fastapi import FastAPI
from pydantic import TypeAdapter

from deployments.http import app as http_app
from deployments.http.openapi import ApiDocument
from deployments.http.openapi_page import CONTENT_SECURITY_POLICY


@pytest.fixture
def document(send) -> dict[str, Any]:
    return send("GET", "/openapi.json").json()


def served(app: FastAPI) -> set[tuple[str, str]]:
    routes: list[Any] = list(app.routes)
    found = {(re.sub(r"{(\w+):\w+}", r"{\1}", route.path), method) for route in routes for method in route.methods}
    return {(path, method) for path, method in found if method not in ("HEAD", "OPTIONS")}


def test_document_describes_exactly_the_served_routes(make_app, document):
    described = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    assert described == served(make_app())


def test_schema_references_resolve_and_operation_ids_are_unique(document):
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert references <= document["components"]["schemas"].keys()
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids))


def test_every_body_has_an_example_that_schema_and_server_accept(send, document):
    num_bodies = 0
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if "requestBody" not in operation:
                continue
            content = operation["requestBody"]["content"]["application/json"]
            validator = jsonschema.Draft202012Validator({**content["schema"], "components": document["components"]})
            validator.validate(content["example"])
            answer = send(method.upper(), path, content=json.dumps(content["example"]))
            assert answer.status_code == 200, (path, answer.text)
            num_bodies += 1
    assert num_bodies >= 7


def test_every_example_validates_against_its_wire_model(make_app, monkeypatch):
    documents: list[ApiDocument] = []
    monkeypatch.setattr(http_app, "ApiDocument", lambda *args: documents.append(ApiDocument(*args)) or documents[-1])
    make_app()
    bodies = [operation for operation in documents[0].operations if operation.body_model is not None]
    assert len(bodies) >= 7
    for operation in bodies:
        TypeAdapter(operation.body_model).validate_python(operation.example)


def test_error_body_validates_against_the_documented_schema(send, document):
    answer = send("POST", "/v1/completions", content="{}")
    error = document["paths"]["/v1/completions"]["post"]["responses"][str(answer.status_code)]
    schema = {**error["content"]["application/json"]["schema"], "components": document["components"]}
    jsonschema.validate(answer.json(), schema)


def test_schema_allows_unknown_fields_unless_the_server_refuses_them(send, make_app, document):
    strict = send("GET", "/openapi.json", app=make_app(unknown_fields="refuse")).json()
    content = strict["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    name = content["schema"]["$ref"].rpartition("/")[2]
    assert strict["components"]["schemas"][name]["additionalProperties"] is False
    assert "additionalProperties" not in document["components"]["schemas"][name]


def test_docs_page_loads_no_external_resource_and_embeds_the_document(send, document):
    page = send("GET", "/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["Content-Security-Policy"] == CONTENT_SECURITY_POLICY
    assert not re.search(r"""(src|href)=["'](?!data:,)""", page.text) and "import(" not in page.text
    [data] = re.findall(r'<script type="application/json" id="document">(.*?)</script>', page.text, re.DOTALL)
    assert json.loads(data) == document


def test_document_and_page_need_a_key_where_the_server_has_keys(send, make_app):
    app = make_app(api_keys=["sha256:" + "0" * 64])
    assert [send("GET", path, app=app).status_code for path in ("/openapi.json", "/docs")] == [401, 401]

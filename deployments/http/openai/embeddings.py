"""POST /v1/embeddings."""

import asyncio
import base64
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from deployments.http.answer_response import AnswerResponse, Job
from deployments.http.api_keys import KeyIdentity
from deployments.http.context import HttpContext
from deployments.http.openai.embeddings_wire import EmbeddingsBody
from deployments.http.parsed_request import ParsedRequest
from deployments.http.plain_answer import PlainBody, plain_job
from deployments.protocol import ChatRequest, EmbedRequest

MAX_PARALLEL = 4
"""Inputs of one request that are in the engines at once, enough to keep an engine busy."""

PATH = "/v1/embeddings"
EXAMPLE = {"model": "demo", "input": ["A text.", "Another one."], "encoding_format": "float"}


class EmbeddingsEndpoint:
    """The endpoint /v1/embeddings."""

    def __init__(self, context: HttpContext):
        self._context = context

    def add_to(self, app: FastAPI) -> None:
        app.add_route(PATH, self._context.errors.guard(self.create), ["POST"])
        summary = "Compute the normalized hidden state of each input, of its last token or the mean."
        self._context.api.describe(PATH, "POST", EmbeddingsBody, summary, EXAMPLE)

    async def create(self, request: Request) -> Response:
        return AnswerResponse(self._context, request.state.request_id, "embeddings", self._job)

    async def _job(self, parsed: ParsedRequest) -> Job:
        wanted, is_base64 = parsed.echo
        id = self._context.new_id("embd-")
        num_parallel = min(len(wanted.prompts), MAX_PARALLEL, self._context.backend.in_flight.max_choices)
        wanted = replace(wanted, request_id=id, num_parallel=num_parallel)
        return plain_job(id, lambda key: self._embed(key, wanted, is_base64), num_parallel)

    async def _embed(self, key: KeyIdentity, wanted: EmbedRequest, is_base64: bool) -> PlainBody:
        await self._context.check_ready()
        backend = self._context.backend
        client = key.apply(ChatRequest("", (), client=wanted.client)).client
        found = await backend.embed(replace(wanted, client=client))
        body = await embeddings_body(found.vectors, is_base64, backend.model_name, found.num_prompt_tokens)
        return PlainBody(body, found.num_prompt_tokens)


async def embeddings_body(vectors: Sequence[bytes], is_base64: bool, model: str, num_prompt_tokens: int) -> bytes:
    """Return the body of the response as JSON. Yields to the event loop, as millions of numbers take a second."""
    data = []
    for index, vector in enumerate(vectors):
        data.append(b'{"object": "embedding", "index": %d, "embedding": %s}' % (index, _written(vector, is_base64)))
        await asyncio.sleep(0)
    usage = {"prompt_tokens": num_prompt_tokens, "total_tokens": num_prompt_tokens}
    rest = json.dumps({"model": model, "usage": usage}).encode()
    return b'{"object": "list", "data": [' + b", ".join(data) + b"], " + rest[1:]


def _written(vector: bytes, is_base64: bool) -> bytes:
    """Return a vector as JSON: base64 of little-endian float32, or numbers with nine digits, exact for float32."""
    if is_base64:
        return b'"' + base64.b64encode(vector) + b'"'
    return ("[" + ", ".join([f"{value:.9g}" for value in np.frombuffer(vector, "<f4").tolist()]) + "]").encode()

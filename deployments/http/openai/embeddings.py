"""POST /v1/embeddings."""

import base64
import json

from starlette.requests import Request
from starlette.responses import Response

from deployments.http.answer_response import AnswerResponse
from deployments.http.context import HttpContext
from deployments.http.embeddings import arrays, completed, embed
from deployments.http.job import PlainBody, PlainJob
from deployments.http.openai.embeddings_wire import EmbeddingsBody
from deployments.http.operation import Operation
from deployments.http.parsed_request import ParsedRequest
from deployments.requests import Embeddings, EmbedRequest

PATH = "/v1/embeddings"
EXAMPLE = {"model": "demo", "input": ["A text.", "Another one."], "encoding_format": "float"}


class EmbeddingsEndpoint:
    """The endpoint /v1/embeddings."""

    def __init__(self, context: HttpContext):
        self._context = context

    @property
    def operations(self) -> tuple[Operation, ...]:
        summary = "Compute the normalized hidden state of each input, of its last token or the mean."
        return (Operation("POST", PATH, self.create, summary, EmbeddingsBody, EXAMPLE),)

    async def create(self, request: Request) -> Response:
        return AnswerResponse(self._context, request.state.request_id, "embeddings", "embd-", self._job)

    async def _job(self, parsed: ParsedRequest) -> PlainJob:
        wanted, is_base64 = parsed.echo
        wanted = completed(self._context, wanted, parsed)
        return PlainJob(lambda: self._embed(wanted, is_base64), wanted.num_parallel)

    async def _embed(self, wanted: EmbedRequest, is_base64: bool) -> PlainBody:
        found = await embed(self._context, wanted)
        model = self._context.backend.model_name
        return PlainBody(await embeddings_body(found, is_base64, model), found.num_prompt_tokens)


async def embeddings_body(found: Embeddings, is_base64: bool, model: str) -> bytes:
    """Return the body of the response as JSON. Vectors in base64 are those bytes of little-endian float32."""
    if is_base64:
        written = [b'"' + base64.b64encode(vector) + b'"' for vector in found.vectors]
    else:
        written = [array async for array in arrays(found.vectors)]
    data = [
        b'{"object": "embedding", "index": %d, "embedding": %s}' % (index, vector)
        for index, vector in enumerate(written)
    ]
    usage = {"prompt_tokens": found.num_prompt_tokens, "total_tokens": found.num_prompt_tokens}
    rest = json.dumps({"model": model, "usage": usage}).encode()
    return b'{"object": "list", "data": [' + b", ".join(data) + b"], " + rest[1:]

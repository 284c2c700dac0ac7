"""Rows: the routes of Ollama's API, with bodies that are no JSON, fields that are wrong, and what it refuses."""

from typing import Any

from tests.e2e.hostile.faces import JSON, Case, Face, malformed, wrong_fields
from tests.e2e.hostile.rows import DROP, Http, RefusedByOllama, Row, Status

HELLO = {"role": "user", "content": "Hello!"}
FEW = {"num_predict": 4, "temperature": 0}
WHOLE = {"model": "demo", "stream": False, "think": False, "options": FEW}
CHAT = Face("/api/chat", {**WHOLE, "messages": [HELLO]})
GENERATE = Face("/api/generate", {**WHOLE, "prompt": "Hello!"})
EMBED = Face("/api/embed", {"model": "demo", "input": "Hello!"})
EMBEDDINGS = Face("/api/embeddings", {"model": "demo", "prompt": "Hello!"})
SHOW = Face("/api/show", {"model": "demo"})
MANY = 10**9


def _options(**options: Any) -> dict[str, Any]:
    return {"options": options}


def _images(*images: Any) -> dict[str, Any]:
    return {"messages": [{**HELLO, "images": list(images)}]}


BOTH: tuple[Case, ...] = (
    ({"model": DROP}, "model"),
    ({"model": ""}, "model"),
    ({"model": ["demo"]}, "model"),
    ({"stream": "yes"}, "stream"),
    ({"format": "yaml"}, "format"),
    ({"format": {"type": "object", "not": {}}}, "format"),
    ({"format": {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}}, "format"),
    ({"think": "hard"}, "think"),
    ({"think": []}, "think"),
    ({"logprobs": "yes"}, "logprobs"),
    ({"top_logprobs": 99, "logprobs": True}, "top_logprobs"),
    ({"keep_alive": "x" * 100_000}, "keep_alive", "16384"),
    ({"_debug_render_only": True}, "_debug_render_only"),
    ({"options": "none"}, "options"),
    (_options(num_predict=0), "options.num_predict"),
    (_options(num_predict="10"), "options.num_predict"),
    (_options(num_predict=2**40), "options.num_predict"),
    (_options(temperature=-1), "options.temperature"),
    (_options(temperature=MANY), "options.temperature"),
    (_options(top_k=1.5), "options.top_k"),
    (_options(top_p=5), "options.top_p"),
    (_options(min_p=-1), "options.min_p"),
    (_options(seed=2**70), "options.seed"),
    (_options(stop="END"), "options.stop"),
    (_options(stop=["a"] * 100), "options.stop"),
    (_options(stop=["a" * 10_000]), "options.stop[0]"),
    (_options(repeat_penalty=0), "options.repeat_penalty"),
    (_options(repeat_last_n=-5), "options.repeat_last_n"),
    (_options(typical_p=0.5), "options.typical_p"),
    ({"options": {f"o{i}": 1 for i in range(1000)}}, "unknown fields", "64"),
)

CHAT_CASES: tuple[Case, ...] = (
    *BOTH,
    ({"messages": "Hello!"}, "messages"),
    ({"messages": [None]}, "messages[0]"),
    ({"messages": [{"role": "root", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": {"text": "x"}}]}, "messages[0].content"),
    ({"messages": [HELLO] * 5000}, "messages", "4096"),
    (_images("?"), "messages[0].images[0]", "base64"),
    (_images("aGVsbG8="), "messages[0].images[0]"),
    (_images("http://127.0.0.1/a.png"), "messages[0].images[0]", "base64"),
    (_images("/etc/passwd"), "messages[0].images[0]"),
    (_images(5), "messages[0].images[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
     "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}]},
     "messages[0].tool_calls[0].function.name"),
    ({"tools": "all"}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters"),
)  # fmt: skip

GENERATE_CASES: tuple[Case, ...] = (
    *BOTH,
    ({"prompt": 5}, "prompt"),
    ({"system": ["x"]}, "system"),
    ({"images": "x"}, "images"),
    ({"images": ["?"]}, "images[0]", "base64"),
    ({"raw": 1}, "raw"),
    ({"raw": True, "system": "x"}, "system"),
    ({"raw": True, "images": ["aGVsbG8="]}, "images"),
    ({"suffix": "x"}, "suffix"),
    ({"template": "{{ .Prompt }}"}, "template"),
    ({"context": [1, 2, 3]}, "context"),
    ({"width": 512}, "width"),
    ({"prompt": "4 2 1 7 9 " * 7000, "raw": True}, "prompt", "32768"),
)

EMBED_CASES: tuple[Case, ...] = (
    ({"model": DROP}, "model"),
    ({"input": DROP}, "input"),
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({"input": ["a", 5]}, "input[1]"),
    ({"input": ["a"] * 2049}, "input", "2048"),
    ({"input": "4 2 1 7 9 " * 7000}, "input", "32768"),
    ({"dimensions": 0}, "dimensions"),
    ({"dimensions": MANY}, "dimensions"),
    ({"truncate": "yes"}, "truncate"),
    (_options(top_p=5), "options.top_p"),
)

EMBEDDINGS_CASES: tuple[Case, ...] = (
    ({"prompt": DROP}, "prompt"),
    ({"prompt": ["a"]}, "prompt"),
    ({"prompt": "4 2 1 7 9 " * 7000}, "prompt", "32768"),
)

SHOW_CASES: tuple[Case, ...] = (
    ({"model": DROP}, "model"),
    ({"model": 5}, "model"),
    ({"verbose": "x" * 100_000}, "verbose", "16384"),
)

PULL = b'{"model": "http://127.0.0.1/evil", "stream": true}'


def _write(method: str, path: str) -> Row:
    sent = Http(method, path, PULL, JSON)
    return Row(f"{method} {path[:40]}", sent, "no model writes", RefusedByOllama(403, ("orchard",)))


WRITES = (
    _write("POST", "/api/pull"),
    _write("POST", "/api/push"),
    _write("POST", "/api/create"),
    _write("POST", "/api/copy"),
    _write("DELETE", "/api/delete"),
    _write("POST", "/api/blobs/sha256:" + 64 * "0"),
    Row("POST /api/blobs of another folder", Http("POST", "/api/blobs/..%2f..%2fetc%2fpasswd", PULL, JSON),
        "no model writes", Status((403, 404))),
    Row("HEAD /api/blobs", Http("HEAD", "/api/blobs/sha256:0"), "routes", Status((404, 405))),
)  # fmt: skip

OTHERS = (
    Row("/api/show: a model of another name", SHOW.post(SHOW.encode(model="../../etc/passwd")), "served_model_name",
        RefusedByOllama(404, ("not found",))),
    Row("/api/show: a name of 1 MB", SHOW.post(lambda: SHOW.encode(model="x" * 2**20)), "served_model_name",
        RefusedByOllama(404, ("not found",))),
    Row("/api/chat/none/cancel", Http("POST", "/api/chat/none/cancel"), "requests in flight",
        RefusedByOllama(404, ("none",))),
    Row("GET /api/chat", Http("GET", "/api/chat"), "routes", RefusedByOllama(405, ("does not exist",))),
    Row("GET /api", Http("GET", "/api"), "routes", RefusedByOllama(404, ("does not exist",))),
    Row("GET /api/tags", Http("GET", "/api/tags"), "Ollama's pages", Status((200,), "demo:latest")),
    Row("GET /api/version", Http("GET", "/api/version"), "Ollama's pages", Status((200,), "version")),
    Row("GET /api/ps", Http("GET", "/api/ps"), "Ollama's pages", Status((200,), "32768")),
    Row("GET / of a program", Http("GET", "/", headers={"Accept": "*/*"}), "Ollama's pages",
        Status((200,), "Ollama is running")),
    Row("/api/generate: nothing but a name", GENERATE.post(b'{"model": "demo", "keep_alive": 0}'), "Ollama's pages",
        Status((200,), '"done_reason": "load"')),
)  # fmt: skip

ROWS = (
    *(row for face in (CHAT, GENERATE, EMBED) for row in malformed(face)),
    *wrong_fields(CHAT, *CHAT_CASES),
    *wrong_fields(GENERATE, *GENERATE_CASES),
    *wrong_fields(EMBED, *EMBED_CASES),
    *wrong_fields(EMBEDDINGS, *EMBEDDINGS_CASES),
    *wrong_fields(SHOW, *SHOW_CASES),
    *WRITES,
    *OTHERS,
)

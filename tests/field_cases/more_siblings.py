"""Further requests of the classes of cases.jsonl: blocks of Messages, images, data: URLs, damaged history, routes."""

import base64
import io
import urllib.parse
import zlib
from typing import Any

from PIL import Image, ImageDraw, PngImagePlugin

from tests.field_cases.siblings import Sibling

MESSAGES, CHAT, RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"
CIRCLE = "The image shows a red circle on a white background."
FEW = {"model": "demo", "max_tokens": 60, "temperature": 0}
CODE = "The access code of the old gate is 4821."
ASK_CODE = "What is the access code of the old gate?"


def messages(*turns: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    return {**FEW, "messages": [{"role": role, "content": content} for role, content in turns], **fields}


def document(source: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "document", "source": source, "title": "Gate"}, {"type": "text", "text": ASK_CODE}]


def used(kind: str, result: str, content: Any) -> list[dict[str, Any]]:
    """Return an answer in whose middle another server used one of its own tools."""
    return [
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": kind, "input": {}},
        {"type": result, "tool_use_id": "srvtoolu_1", "content": content},
        {"type": "text", "text": "Not much."},
    ]


def says(text: str) -> Any:
    """Return a check that an answer of either dialect has this text."""

    def check(response: Any) -> bool:
        body = response.json()
        if "choices" in body:
            return text in body["choices"][0]["message"]["content"]
        return text in "".join(block.get("text", "") for block in body["content"])

    return check


DOCUMENT = {"type": "text", "media_type": "text/plain", "data": CODE}
OF_MESSAGES = [
    Sibling("messages-document-answered", MESSAGES, messages(("user", document(DOCUMENT))), says("4821")),
    Sibling(
        "messages-document-content",
        MESSAGES,
        messages(("user", document({"type": "content", "content": [{"type": "text", "text": CODE}]}))),
        says("4821"),
    ),
    Sibling(
        "messages-code-execution-history",
        MESSAGES,
        messages(
            ("user", "Hello!"),
            (
                "assistant",
                used(
                    "code_execution",
                    "code_execution_tool_result",
                    {"type": "code_execution_result", "stdout": "42\n", "stderr": "", "return_code": 0, "content": []},
                ),
            ),
            ("user", "Who are you?"),
        ),
    ),
    Sibling(
        "messages-web-fetch-error-history",
        MESSAGES,
        messages(
            ("user", "Hello!"),
            (
                "assistant",
                used(
                    "web_fetch",
                    "web_fetch_tool_result",
                    {"type": "web_fetch_tool_result_error", "error_code": "url_not_accessible"},
                ),
            ),
            ("user", "Who are you?"),
        ),
    ),
    Sibling(
        "messages-tool-search-beside-client-tool",
        MESSAGES,
        messages(
            ("user", "Who are you?"),
            tools=[
                {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
                {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}},
            ],
        ),
        lambda response: "tool_search" in response.headers["x-orchard-ignored"],
    ),
    Sibling(
        "messages-document-pdf",
        MESSAGES,
        messages(("user", document({"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}))),
        lambda response: "pdf" in response.text.lower(),
        400,
    ),
]


def circle() -> Image.Image:
    image = Image.new("RGB", (192, 192), "white")
    ImageDraw.Draw(image).ellipse((50, 50, 140, 140), fill="red")
    return image


def written(kind: str, image: Image.Image | None = None, **options: Any) -> bytes:
    out = io.BytesIO()
    (image or circle()).save(out, kind, **options)
    return out.getvalue()


def text_chunk() -> PngImagePlugin.PngInfo:
    info = PngImagePlugin.PngInfo()
    info.add_text("parameters", "masterpiece, best quality, " * 100_000)
    return info


def picture(url: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is in the image?"}]
    return {**FEW, "messages": [{"role": "user", "content": parts}]}


def encoded(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


PNG = written("PNG")
LINES = base64.encodebytes(PNG).decode()
EXIF = Image.Exif()
EXIF[0x010E] = "a red circle " * 4000
PICTURES = {
    "png-text-2mb": encoded(written("PNG", pnginfo=text_chunk())),
    "png-behind-end": encoded(PNG + b"\0" * 5000),
    "jpeg-progressive-without-eoi": encoded(written("JPEG", progressive=True, quality=95)[:-2], "jpeg"),
    "jpeg-exif-50kb": encoded(written("JPEG", exif=EXIF, quality=95), "jpeg"),
    "webp-exif": encoded(written("WEBP", exif=EXIF, lossless=True), "webp"),
    "png-unknown-chunk": encoded(
        PNG[:33] + b"\0\0\0\1vpAg\7" + zlib.crc32(b"vpAg\7").to_bytes(4, "big") + PNG[33:],
    ),
}
URLS = {
    "data-url-tabs": "data:image/png;base64," + LINES.replace("\n", "\n\t"),
    "data-url-spaces-around": "  data:image/png;base64, " + LINES.replace("\n", "") + " ",
    "data-url-upper-case": "DATA:IMAGE/PNG;BASE64," + LINES.replace("\n", ""),
    "data-url-parameter": "data:image/png;charset=utf-8;base64," + LINES.replace("\n", ""),
    "data-url-percent": "data:image/png;base64," + urllib.parse.quote(LINES.replace("\n", ""), safe=""),
    "data-url-safe-alphabet": "data:image/png;base64," + base64.urlsafe_b64encode(PNG).decode().rstrip("="),
}
OF_PICTURES = [
    Sibling(name, CHAT, picture(url), says(CIRCLE)) for urls in (PICTURES, URLS) for name, url in urls.items()
]


def damaged(arguments: Any) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "write", "arguments": arguments}}
    return {
        **FEW,
        "messages": [
            {"role": "user", "content": "Write the file."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "The arguments are not valid."},
            {"role": "user", "content": "Hello!"},
        ],
    }


OF_HISTORY = [
    *(
        Sibling(f"history-{name}", CHAT, damaged(arguments))
        for name, arguments in {
            "no-arguments": "",
            "arguments-null": "null",
            "arguments-list": "[1, 2]",
            "arguments-text": "write it",
            "arguments-two-objects": '{"a": 1}{"b": 2}',
            "arguments-surrogate": '{"a": "\\ud800"}',
        }.items()
    ),
    Sibling(
        "history-responses-cut-off",
        RESPONSES,
        {
            "model": "demo",
            "max_output_tokens": 20,
            "input": [
                {"role": "user", "content": "Write the file."},
                {"type": "function_call", "call_id": "call_1", "name": "write", "arguments": '{"contents": "line'},
                {"type": "function_call_output", "call_id": "call_1", "output": "The arguments are not valid."},
            ],
        },
    ),
]

OF_ROUTES = [
    Sibling(f"route-{path}", path, {"model": "demo"}, lambda response, right=right: right in response.text, 404)
    for path, right in {
        "/v1/chat/completion": "/v1/chat/completions",
        "/openai/v1/responses": "/v1/responses",
        "/v1/embedding": "/v1/embeddings",
        "/v1/messages/count-tokens": "/v1/messages/count_tokens",
    }.items()
]

MORE_SIBLINGS = [*OF_MESSAGES, *OF_PICTURES, *OF_HISTORY, *OF_ROUTES]
"""At least three of each class that siblings.py and test_siblings.py leave out."""

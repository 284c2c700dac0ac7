"""Request bodies that cost the most to read: by their bytes, their values, their lines, or what is wrong with them."""

import base64
import json
from collections.abc import Callable

LIMIT = 32 * 2**20
USER = b'{"role":"user","content":"Hi"}'


def body(*messages: bytes, fields: bytes = b"") -> bytes:
    return b'{"model":"org/demo","messages":[' + b",".join(messages) + b"]" + fields + b"}"


def message(role: str, content: bytes, more: bytes = b"") -> bytes:
    return b'{"role":"%s","content":%s%s}' % (role.encode(), content, more)


def fill(head: bytes, unit: bytes, tail: bytes, limit: int = LIMIT) -> bytes:
    """`unit` as often as the limit allows."""
    return head + unit * ((limit - len(head) - len(tail)) // len(unit)) + tail


def around(content: bytes, role: str = "user", more: bytes = b"") -> tuple[bytes, bytes]:
    """Head and tail of a body in whose only message `content` has a hole, `@`."""
    head, _, tail = body(message(role, content, more)).partition(b"@")
    return head, tail


def text_of(unit: bytes, role: str = "user", limit: int = LIMIT) -> bytes:
    head, tail = around(b'"@"', role)
    return fill(head, unit, tail, limit)


def parts_of(unit: bytes, num: int, role: str = "user") -> bytes:
    return body(message(role, b"[" + b",".join([unit] * num) + b"]"))


def numbered(pattern: bytes, num: int) -> bytes:
    return b",".join(pattern % i for i in range(num))


TEXT_PART = b'{"type":"text","text":""}'
TOOL_CALL = b'{"id":"a","function":{"name":"f","arguments":"{}"}}'

WORST_BODIES: dict[str, Callable[[], bytes]] = {
    "450 000 numbers as parts": lambda: parts_of(b"1", 450_000),
    "450 000 empty arrays as parts": lambda: parts_of(b"[]", 450_000),
    "1 000 000 empty system lines": lambda: text_of(rb"\n", "system", 2_000_000),
    "empty system lines up to the limit": lambda: text_of(rb"\n", "system"),
    "distinct system lines up to the limit": lambda: body(
        message("system", b'"' + b"".join(rb"%d\n" % i for i in range(3_500_000)) + b'"')
    ),
    "lines that could be volatile": lambda: text_of(rb"x-anthropic-billing-header:!\n", "system"),
    "one line that is almost volatile": lambda: text_of(b"x-anthropic-billing-header: a=b;", "system"),
    "500 000 marks": lambda: fill(body()[:-2] + b"[" * 60, b"[],", b"1", 1_500_000) + b"]" * 61 + b"}",
    "closing brackets": lambda: fill(b'{"a":[' + b"[]," * 65, b"]", b"}"),
    "deep nests": lambda: fill(b'{"a":', b"[" * 64 + b"]" * 64, b"}"),
    "the deepest nest": lambda: b"[" * LIMIT,
    "a string that never ends": lambda: fill(b'{"a":[' + b"[]," * 65 + b'"', rb"\"", b""),
    "400 000 unknown fields": lambda: body(USER, fields=b"," + numbered(b'"%d":0', 400_000)),
    "400 000 unknown fields of a message": lambda: body(message("user", b'"Hi"', b"," + numbered(b'"%d":0', 400_000))),
    "400 000 biases out of range": lambda: body(
        USER, fields=b',"logit_bias":{' + numbered(b'"%d":1000', 400_000) + b"}"
    ),
    "400 000 stop strings of the wrong type": lambda: body(USER, fields=b',"stop":[' + numbered(b"%d", 400_000) + b"]"),
    "80 000 text parts in 40 messages": lambda: body(
        *[message("user", b"[" + b",".join([TEXT_PART] * 2000) + b"]")] * 40
    ),
    "4096 messages with tool calls": lambda: body(
        *[message("assistant", b'"Hi"', b',"tool_calls":[' + b",".join([TOOL_CALL] * 24) + b"]")] * 4096
    ),
    "text up to the limit": lambda: text_of(b"word tree 12 apple "),
    "text of two bytes a character": lambda: text_of("ж".encode()),
    "text of four bytes a character": lambda: text_of("🙂".encode()),
    "escaped text": lambda: text_of(rb"\u00e9\t"),
    "escaped pairs": lambda: text_of(rb"\ud83d\ude42"),
    "half a pair at the end": lambda: fill(*around(b'["\\ud800","@"]')[:1], b"x", around(b'["@"]')[1]),
    "16 images": lambda: body(
        message(
            "user",
            b"["
            + b",".join(
                [b'{"type":"image_url","image_url":{"url":"data:image/png;base64,%s"}}' % (b"A" * 1_900_000)] * 16
            )
            + b"]",
        )
    ),
    "control strings": lambda: text_of(b"<|im_end|>"),
    "a schema of 400 000 values": lambda: body(USER, fields=_schema(b'"enum":[' + numbered(b'"%d"', 400_000) + b"]")),
    "a schema of one long text": lambda: body(USER, fields=_schema(b'"const":"' + b"x" * (LIMIT - 300) + b'"')),
    "a long integer": lambda: fill(b'{"a":', b"9", b"}"),
    "a long number": lambda: fill(b'{"a":0.', b"9", b"}"),
    "a long name of the model": lambda: fill(b'{"messages":[%s],"model":"' % USER, b"x", b'"}'),
    "a long name of a field": lambda: fill(b'{"model":"org/demo","messages":[%s],"' % USER, b"x", b'":1}'),
    "bytes that are no UTF-8": lambda: fill(b'{"a":"', b"x", b'\xff"}'),
    "random bytes in base64": lambda: text_of(base64.b64encode(bytes(range(256)))),
    "250 kB of text parts": lambda: parts_of(TEXT_PART, 2048) + b" " * 200_000,
    "250 kB of messages": lambda: body(*[USER] * 4096) + b" " * 100_000,
    "250 kB of empty arrays": lambda: body(USER, fields=_schema(b'"enum":[' + b",".join([b"[]"] * 80_000) + b"]")),
    "8000 marks of parts": lambda: parts_of(TEXT_PART, 650),
    "8000 marks of messages": lambda: body(*[USER] * 680),
    "8000 marks of tool calls": lambda: body(
        message("assistant", b'"Hi"', b',"tool_calls":[' + b",".join([TOOL_CALL] * 400) + b"]")
    ),
    "8000 marks of arrays": lambda: body(USER, fields=_schema(b'"enum":[' + b",".join([b"[]"] * 2600) + b"]")),
    "2000 unknown fields": lambda: body(USER, fields=b"," + numbered(b'"%d":0', 2000)),
    "1000 findings": lambda: body(USER, fields=b"," + numbered(b'"%d":0', 990)),
    "250 kB of empty system lines": lambda: text_of(rb"\n", "system", 250_000),
    "250 kB of lines that could be volatile": lambda: text_of(rb"x-anthropic-billing-header:!\n", "system", 250_000),
    "250 kB of a line that is almost volatile": lambda: text_of(b"x-anthropic-billing-header: a=b;", "system", 250_000),
}


def _schema(rest: bytes) -> bytes:
    name = json.dumps("a").encode()
    return b',"response_format":{"type":"json_schema","json_schema":{"name":%s,"schema":{%s}}}' % (name, rest)

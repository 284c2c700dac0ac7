"""RESP 2, the protocol of Redis: reads commands and encodes replies, with bounds on both sides of authentication.

Source: https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from asyncio import IncompleteReadError, LimitOverrunError, StreamReader
from dataclasses import dataclass


class ProtocolError(Exception):
    """The bytes of a client are no command within the limits; the connection must be closed."""


class CommandFailed(Exception):
    """A command is refused. The message is the reply, with its code as the first word."""


@dataclass(frozen=True)
class Status:
    """A reply that is a simple string."""

    text: bytes


Reply = int | bytes | Status | None | list["Reply"]


@dataclass(frozen=True)
class Limits:
    """Bounds of one command."""

    num_arguments: int
    num_bytes: int
    """Bytes of all arguments together."""


def encode(reply: Reply) -> bytes:
    """Encode a reply. None is the null bulk string."""
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, Status):
        return b"+%b\r\n" % reply.text
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    return b"*%d\r\n%b" % (len(reply), b"".join(map(encode, reply)))


def encode_error(text: str) -> bytes:
    """Encode an error reply; text begins with its code, such as ERR."""
    return b"-%b\r\n" % " ".join(text.split()).encode()


async def read_command(reader: StreamReader, limits: Limits) -> list[bytes] | None:
    """Read one command, an array of bulk strings; None at the end of the connection.

    Raises:
        ProtocolError: The bytes are no command, or the command exceeds the limits.
    """
    try:
        first = await reader.readuntil(b"\r\n")
    except IncompleteReadError:
        return None
    except LimitOverrunError:
        raise ProtocolError("too big inline request") from None
    try:
        num_arguments = _length(first, b"*", limits.num_arguments, "multibulk")
        arguments, left = [], limits.num_bytes
        for _ in range(num_arguments):
            size = _length(await reader.readuntil(b"\r\n"), b"$", left, "bulk")
            left -= size
            content = await reader.readexactly(size + 2)
            if content[-2:] != b"\r\n":
                raise ProtocolError("expected the end of a bulk string")
            arguments.append(content[:-2])
    except (IncompleteReadError, LimitOverrunError):
        return None  # the client has ended in the middle of a command
    return arguments


def _length(line: bytes, sign: bytes, most: int, kind: str) -> int:
    digits = line[1:-2]
    if line[:1] != sign:
        raise ProtocolError(f"expected '{sign.decode()}', got '{line[:1].decode(errors='replace')}'")
    if not digits.isdigit() or len(digits) > 12:
        raise ProtocolError(f"invalid {kind} length")
    if (length := int(digits)) > most:
        raise ProtocolError(f"invalid {kind} length: {length} exceeds the limit of {most}")
    return length

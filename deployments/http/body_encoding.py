"""decoded: the body of a request with a Content-Encoding, within the limit of a body."""

import zlib
from collections.abc import Iterator

from deployments.http.errors import BodyTooLarge
from engine.errors import InvalidRequest

ENCODINGS = frozenset({"", "identity", "gzip", "x-gzip", "deflate"})
"""Values of Content-Encoding that are read."""

PIECE_BYTES = 2**20


def decoded(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return a decoded body. Never more than max_bytes and one piece are in memory.

    Args:
        body: The body as sent.
        encoding: One of ENCODINGS, in any letter case.
        max_bytes: Most bytes of the decoded body.

    Raises:
        BodyTooLarge: The decoded body is larger.
        InvalidRequest: The body is not in this encoding, or cut off.
    """
    if encoding.lower() in ("", "identity"):
        return body
    pieces, num_bytes = [], 0
    try:
        for piece in _pieces(body, encoding.lower()):
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise BodyTooLarge(num_bytes, max_bytes)
            pieces.append(piece)
    except zlib.error as error:
        raise InvalidRequest(f"The request body is not {encoding}, as its Content-Encoding says: {error}.") from None
    return b"".join(pieces)


def _pieces(body: bytes, encoding: str) -> Iterator[bytes]:
    """Yield pieces of a decoded body of one or more members. Raises zlib.error."""
    has_wrapper = encoding != "deflate" or (
        body[:1] and body[0] & 0x0F == 8 and int.from_bytes(body[:2], "big") % 31 == 0
    )
    window = -zlib.MAX_WBITS if not has_wrapper else zlib.MAX_WBITS + (0 if encoding == "deflate" else 16)
    rest = body
    while rest:
        decoder = zlib.decompressobj(window)
        while not decoder.eof:
            piece = decoder.decompress(rest, PIECE_BYTES)
            rest = decoder.unconsumed_tail
            if not piece and not rest and not decoder.eof:
                raise zlib.error("it is cut off")
            yield piece
        rest = decoder.unused_data

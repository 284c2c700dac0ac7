"""Bodies with a Content-Encoding."""

import gzip
import json
import zlib

import pytest

from deployments.http.body_encoding import PIECE_BYTES, decoded
from deployments.http.errors import BodyTooLarge
from engine.errors import InvalidRequest

BODY = json.dumps({"messages": ["Hello!"] * 1000}).encode()
RAW = zlib.compressobj(wbits=-15)
SENT = [
    (BODY, ""),
    (BODY, "identity"),
    (gzip.compress(BODY), "gzip"),
    (gzip.compress(BODY), "X-GZIP"),
    (gzip.compress(BODY[:100]) + gzip.compress(BODY[100:]), "gzip"),
    (zlib.compress(BODY), "deflate"),
    (RAW.compress(BODY) + RAW.flush(), "deflate"),
]


@pytest.mark.parametrize(("sent", "encoding"), SENT, ids=map(str, range(len(SENT))))
def test_a_body_is_decoded(sent: bytes, encoding: str):
    assert decoded(sent, encoding, len(BODY)) == BODY


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_bomb_is_refused_by_its_decoded_size_before_it_is_in_memory(encoding: str):
    bomb = (gzip.compress if encoding == "gzip" else zlib.compress)(bytes(64 * PIECE_BYTES))
    with pytest.raises(BodyTooLarge) as refused:
        decoded(bomb, encoding, PIECE_BYTES + 1)
    num_bytes, limit = refused.value.args
    assert PIECE_BYTES < num_bytes <= 2 * PIECE_BYTES and limit == PIECE_BYTES + 1


@pytest.mark.parametrize(
    "sent",
    [BODY, gzip.compress(BODY)[:-9], gzip.compress(BODY)[:20], gzip.compress(BODY) + b"x"],
    ids=["plain", "without its end", "cut off", "with more behind it"],
)
def test_a_body_that_is_not_in_its_encoding_or_is_cut_off_is_refused(sent: bytes):
    with pytest.raises(InvalidRequest, match="Content-Encoding"):
        decoded(sent, "gzip", len(BODY))

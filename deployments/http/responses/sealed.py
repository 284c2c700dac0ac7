"""Sealed thoughts: the text of a reasoning item as `encrypted_content`, which clients send back unchanged."""

import base64
import binascii
import zlib

PREFIX = "orchard1."
"""Version of the format. Text with another prefix comes from another server and is dropped."""

MAX_SEALED_BYTES = 2**20
"""UTF-8 bytes of one thought."""

MAX_SEALED_BYTES_PER_REQUEST = 2 * 2**20
"""UTF-8 bytes of all thoughts of one request: a compressed body must not become arbitrarily large."""


def seal(text: str) -> str:
    """Encode the text as an opaque string. It is not encrypted, as the client may read the thought anyway."""
    return PREFIX + base64.urlsafe_b64encode(zlib.compress(text.encode())).decode()


class Unsealer:
    """Opens the sealed thoughts of one request, up to a limit for all of them."""

    def __init__(self) -> None:
        self._num_bytes_left = MAX_SEALED_BYTES_PER_REQUEST

    def open(self, sealed: str) -> str | None:
        """Decode a sealed text; None if another server sealed it. Raises ValueError if it is broken or too large."""
        if not sealed.startswith(PREFIX):
            return None
        limit = min(MAX_SEALED_BYTES, self._num_bytes_left)
        inflate = zlib.decompressobj()
        try:
            text = inflate.decompress(base64.urlsafe_b64decode(sealed.removeprefix(PREFIX)), limit + 1)
            if len(text) > limit:
                raise ValueError(
                    f"must decode to at most {MAX_SEALED_BYTES} bytes, all items to {MAX_SEALED_BYTES_PER_REQUEST}"
                )
            if not inflate.eof:
                raise ValueError("must be sent back unchanged")
            self._num_bytes_left -= len(text)
            return text.decode()
        except (zlib.error, binascii.Error, UnicodeError):
            raise ValueError("must be sent back unchanged") from None

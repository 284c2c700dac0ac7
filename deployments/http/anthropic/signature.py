"""The signature of a thinking block. Where the client wants no text of the thought, the signature carries it, so that
the thought comes back with the history."""

import base64
import binascii
import hashlib

_SEALED = "orchard-thought:"
_PLAIN = "orchard-digest:"


def signature_of(thought: str, is_omitted: bool) -> str:
    """is_omitted: the block has no text."""
    if is_omitted:
        return _SEALED + base64.b64encode(thought.encode()).decode()
    return _PLAIN + hashlib.sha256(thought.encode()).hexdigest()[:32]


def omitted_thought(signature: str | None) -> str:
    """The thought of a block without text; '' if the signature holds none, such as another server's."""
    if signature is None or not signature.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""

"""The signature of a thinking block.

If the client asked to omit the thought's text, the signature contains it, so that the thought returns with the history.
"""

import base64
import binascii
import hashlib

_SEALED = "orchard-thought:"
_PLAIN = "orchard-digest:"


def signature_of(thought: str, is_omitted: bool) -> str:
    """Return the signature of a thought: the encoded thought if the block omits its text, otherwise a digest."""
    if is_omitted:
        return _SEALED + base64.b64encode(thought.encode()).decode()
    return _PLAIN + hashlib.sha256(thought.encode()).hexdigest()[:32]


def omitted_thought(signature: str | None) -> str:
    """Return the thought in the signature of a block without text; '' for a signature of another server."""
    if signature is None or not signature.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""

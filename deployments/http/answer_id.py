"""Ids of answers: random, with a tag of the node whose ingress gives the answer, so that others know whom to ask."""

import re
import secrets
from hashlib import blake2b

TAG_BYTES = 2
RANDOM_BYTES = 14

_ID = re.compile(
    rf"(?:chatcmpl-|cmpl-|msg_|resp_|embd-|tok-)([0-9a-f]{{{2 * TAG_BYTES}}})[0-9a-f]{{{2 * RANDOM_BYTES}}}"
)


def tag_of_node(node_id: str) -> str:
    """Return the tag of a node: 4 hexadecimal digits, which two nodes of a cluster may share by chance."""
    return blake2b(node_id.encode(), digest_size=TAG_BYTES).hexdigest()


def new_answer_id(prefix: str, tag: str) -> str:
    """Return a new id, such as `chatcmpl-` and 32 hexadecimal digits, the first four of which are the tag."""
    return f"{prefix}{tag}{secrets.token_hex(RANDOM_BYTES)}"


def tag_in(answer_id: str) -> str | None:
    """Return the tag in an id; None for an id that this server does not make, such as a client's X-Request-Id."""
    made = _ID.fullmatch(answer_id)
    return None if made is None else made[1]

"""Ids of answers: random, with a tag of the node whose ingress gives the answer, so that others know whom to ask."""

import re
import secrets
from collections.abc import Iterable
from hashlib import blake2b

TAG_BYTES = 2
RANDOM_BYTES = 14


def tag_of_node(node_id: str) -> str:
    """Return the tag of a node: 4 hexadecimal digits, which two nodes of a cluster may share by chance."""
    return blake2b(node_id.encode(), digest_size=TAG_BYTES).hexdigest()


def new_answer_id(prefix: str, tag: str) -> str:
    """Return a new id, such as `chatcmpl-` and 32 hexadecimal digits, the first four of which are the tag."""
    return f"{prefix}{tag}{secrets.token_hex(RANDOM_BYTES)}"


def id_pattern(prefixes: Iterable[str]) -> str:
    """Return the regular expression of the ids with these prefixes, whose group is the tag."""
    return rf"(?:{'|'.join(map(re.escape, prefixes))})([0-9a-f]{{{2 * TAG_BYTES}}})[0-9a-f]{{{2 * RANDOM_BYTES}}}"

"""The escapes that JSON strings of answers may have, and the schemas whose values need all of them."""

import re
from typing import Any

ESCAPES = 'nrbtf\\"'
"""Escapes in most schemas, by their second character."""
ALL_ESCAPES = ESCAPES + "u"
"""Escapes in schemas whose values have control characters. Elsewhere u is not allowed: as an additional property,
{"\\u0061": 1} would bypass the schema of the property "a". In other strings llguidance allows it for control characters
alone."""

CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that JSON can only spell with u. JSON permits a raw DEL; llguidance does not."""
CONTROL_IN_PATTERN = re.compile(CONTROL.pattern + r"|\\(?:0|v|c[A-Za-z]|x0|x1|x7[fF]|u00[01]|u007[fF])")


def control_in(schema: Any) -> tuple[str, str] | None:
    """Return the first keyword whose text has a control character that only u can spell, and its text; else None."""
    if not isinstance(schema, dict):
        return None
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and CONTROL_IN_PATTERN.search(pattern):
        return "pattern", pattern
    pending = [(key, schema[key]) for key in ("const", "enum") if key in schema]
    while pending:
        keyword, item = pending.pop()
        if isinstance(item, str) and CONTROL.search(item):
            return keyword, item
        if isinstance(item, dict):
            pending += [(keyword, part) for pair in item.items() for part in pair]
        elif isinstance(item, list):
            pending += [(keyword, part) for part in item]
    return None

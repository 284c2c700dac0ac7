"""FreeLimits: where the strings and arrays of an answer end that its schema does not limit."""

import copy
import json
from dataclasses import dataclass, fields
from typing import Any

from engine.errors import EngineFailed
from engine.processing.schema_keywords import subschemas

BRANCHES = frozenset({"allOf", "anyOf", "oneOf"})
LIMITS_STRING = BRANCHES | {"maxLength", "const", "enum", "pattern", "format", "$ref"}
LIMITS_ARRAY = BRANCHES | {"maxItems", "const", "enum", "$ref"}
"""Keywords beside which a string or an array is not free: most of their values end, and llguidance takes no length
beside some."""


@dataclass(frozen=True)
class FreeLimits:
    """Where strings and arrays of a schema end that it does not limit itself; for models that never end them."""

    max_characters: int
    max_items: int

    @classmethod
    def of(cls, value: Any) -> "FreeLimits":
        """Return the limits as a model's generation_config.json has them.

        Raises:
            EngineFailed: They are not two positive integers.
        """
        names = [field.name for field in fields(cls)]
        is_complete = isinstance(value, dict) and value.keys() == set(names)
        if not is_complete or not all(type(number) is int and number > 0 for number in value.values()):
            raise EngineFailed(
                f"`free_limits` of generation_config.json is {json.dumps(value)[:200]}: it must be an object "
                f"with the positive integers {' and '.join(names)}, and nothing else"
            )
        return cls(**value)

    def apply(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a strict schema with these limits, except where another schema limits the same value."""
        ending = copy.deepcopy(schema)
        places = dict(subschemas(ending))
        for pointer, part in places.items():
            owner, _, keyword = pointer.rpartition("/")[0].rpartition("/")
            if keyword in BRANCHES and isinstance(places.get(owner), dict):  # else a property of that name
                others = places[owner].keys() - {keyword, "$defs", "definitions"}
                if others or keyword == "allOf":
                    continue
            types = part.get("type", ()) if isinstance(part, dict) else ()
            types = [types] if isinstance(types, str) else types
            if "string" in types and not LIMITS_STRING & part.keys():
                part["maxLength"] = max(self.max_characters, _size(part.get("minLength")))
            if "array" in types and not LIMITS_ARRAY & part.keys():
                fixed = part.get("prefixItems")
                least = len(fixed) if isinstance(fixed, list) else 0
                part["maxItems"] = max(self.max_items, _size(part.get("minItems")), least)
        return ending


def _size(value: Any) -> int:
    """Return a size; 0 for a malformed one, which is left to llguidance."""
    return value if isinstance(value, int) else 0

"""Grammars and the jsonschema library agree on random schemas: on random texts that the masks allow, and on values.

ORCHARD_SCHEMAS sets the number of schemas; -s prints the figures.
"""

import decimal
import json
import os
import random
import sys
from collections import Counter

import jsonschema
import pytest

from engine.errors import InvalidRequest
from engine.processing.schema_keywords import FORMATS
from engine.protocol import GrammarSpec
from tests.engine.processing.random_schemas import near_value, random_schema
from tests.engine.processing.spellings import dump, exact, spellings
from tests.engine.processing.walks import accepts_as_text, compiled, decode, walk

NUM_SCHEMAS = int(os.environ.get("ORCHARD_SCHEMAS", "0")) or 200
NUM_PARTS = 10
NUM_WALKS, NUM_VALUES = 3, 6


def disagreements(seed: int, figures: Counter[str]) -> list[str]:
    """Compare both on one schema. With a format, a valid value may be refused: jsonschema is more generous there."""
    rng = random.Random(seed)
    schema = random_schema(rng)
    text = dump(schema)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(exact(text), format_checker=checker)
    figures["schemas"] += 1
    try:
        matcher = compiled(GrammarSpec("json_schema", text))
    except InvalidRequest as refusal:
        assert " at $" in refusal.message, f"{refusal.message}: {text}"
        figures["refused by name and place"] += 1
        return []
    found = []
    for attempt in range(NUM_WALKS):
        token_ids = walk(matcher, seed * NUM_WALKS + attempt, max_tokens=80)
        if token_ids is not None:
            figures["texts allowed by the masks"] += 1
            if not validator.is_valid(exact(decode(token_ids))):
                found.append(f"{decode(token_ids)} is allowed, but not valid: {text}")
    has_format = any(f'"format": {json.dumps(name)}' in text for name in FORMATS)
    for _ in range(NUM_VALUES):
        value = exact(dump(near_value(rng, schema, schema)))
        is_valid = validator.is_valid(value)
        is_allowed = any(accepts_as_text(matcher, spelling) for spelling in spellings(value))
        figures["valid values" if is_valid else "other values"] += 1
        if is_allowed != is_valid and (is_allowed or not has_format):
            found.append(f"{dump(value)} is {'allowed' if is_allowed else 'valid'} only: {text}")
    return found


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_grammar_and_jsonschema_agree_on_random_schemas_texts_and_values(part: int) -> None:
    figures: Counter[str] = Counter()
    with decimal.localcontext(prec=400):
        found = [line for seed in range(part, NUM_SCHEMAS, NUM_PARTS) for line in disagreements(seed, figures)]
    sys.stdout.write(f"{dict(figures)}, disagreements: {len(found)}\n")

    assert not found, "\n".join(found)
    assert min(figures["texts allowed by the masks"], figures["valid values"], figures["other values"]) > NUM_PARTS

"""Each schema of the JSON-Schema-Test-Suite, draft 2020-12, is enforced exactly or refused by name and place."""

import json
import re
import sys
from collections import Counter
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.processing.schema_keywords import FORMATS
from tests.engine.processing.spellings import spellings
from tests.engine.processing.walks import accepts_as_text, compiled, json_schema
from tests.support.json_schema_suite import load_suite

NOT_ENFORCED = {
    "format.json": "the suite expects formats without effect; here those in FORMATS are enforced",
    "vocabulary.json: schema that uses custom metaschema with with no validation vocabulary": "$schema has no effect",
    r"optional/ecmascript-regex.json: ECMA 262 \s matches whitespace": r"\s has no U+FEFF and no vertical tab here",
    r"optional/ecmascript-regex.json: ECMA 262 \S matches everything but whitespace": r"the same of \S",
}
"""Documented deviations of draft 2020-12."""
UNCHECKED = re.compile(r"2021-02-29|.*:60.*")
"""Values of formats that are allowed whether or not they are valid: 29 February and leap seconds."""


def figures_of(name: str, case: dict[str, Any], figures: Counter[str]) -> list[str]:
    """Count a case, and return how the grammar disagrees with it."""
    figures["schemas"] += 1
    is_format = name.startswith("optional/format/")
    try:
        matcher = compiled(json_schema(case["schema"]))
    except InvalidRequest as refusal:
        figures["refused by name and place"] += 1
        named = " at $" in refusal.message or isinstance(case["schema"], bool)
        return [] if named else [f"{name}: {refusal.message}"]
    figures["enforced"] += 1
    found = []
    for test in case["tests"]:
        figures["texts"] += 1
        is_allowed = any(accepts_as_text(matcher, text) for text in spellings(test["data"]))
        if is_format and (not is_allowed or UNCHECKED.fullmatch(str(test["data"]))):
            continue  # a format may be enforced more strictly than the suite's
        if is_allowed != test["valid"]:
            found.append(f"{name}, {test['description']}: {json.dumps(test['data'])} is allowed: {is_allowed}")
    return found


def test_each_schema_of_the_suite_is_enforced_exactly_or_refused_by_name(pytestconfig: pytest.Config) -> None:
    suite = load_suite(pytestconfig.cache.mkdir("json-schema-suite"))
    figures: Counter[str] = Counter()
    found = []
    for file, cases in sorted(suite.items()):
        for case in cases:
            name = f"{file}: {case['description']}"
            is_unknown_format = "/format/" in file and case["schema"].get("format") not in FORMATS
            if file in NOT_ENFORCED or name in NOT_ENFORCED or is_unknown_format:
                figures["left out"] += 1
            else:
                found += figures_of(name, case, figures)
    sys.stdout.write(f"{dict(figures)}, disagreements: {len(found)}\n")

    assert not found, "\n".join(found)
    assert figures["enforced"] > 170 and figures["texts"] > 600

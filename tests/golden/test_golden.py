"""The answers of the API are those that are frozen in tests/golden/files: status, headers and bytes.

`uv run python -m tests.golden` shows all differences in words, with --renew it freezes the answers anew.
"""

import pytest

from tests.e2e.hostile.table import GROUPS
from tests.golden.golden_file import differences, read
from tests.golden.kinds import FILES, KINDS, hostile_outcomes, well_formed

RENEW = "uv run python -m tests.golden {} --renew"


@pytest.mark.parametrize("group", [group for group, rows in GROUPS.items() if well_formed(rows)])
def test_well_formed_hostile_requests_get_the_expected_answers(group: str):
    """Over HTTP the night sends them to a real server; the answers are those of the same graph without Ray."""
    wrong = {}
    for row in well_formed(GROUPS[group]):
        try:
            row.check(hostile_outcomes()[row.name].replies)
        except AssertionError as error:
            wrong[row.name] = str(error)
    assert not wrong


@pytest.mark.parametrize("name", KINDS)
def test_answers_are_those_of_the_golden_file(name: str):
    kind = KINDS[name]
    changes = differences(read(kind.path), kind.exchanges())
    assert not changes, "\n".join([*changes[:20], f"{len(changes)} changes; if they are meant: {RENEW.format(name)}"])


def test_every_golden_file_belongs_to_a_kind():
    assert {path.stem for path in FILES.iterdir()} == set(KINDS)

"""The answers of the API are those that are frozen in tests/golden/files: status, headers and bytes.

`uv run python -m tests.golden` shows all differences in words, with --renew it freezes the answers anew.
"""

from collections.abc import Sequence

import pytest

from tests.e2e.hostile.rows import Cost, Row
from tests.e2e.hostile.table import GROUPS
from tests.golden.golden_file import differences, read
from tests.golden.kinds import FILES, KINDS, Kind, hostile_outcomes, well_formed

LARGE_NAMES = {row.name for rows in GROUPS.values() for row in well_formed(rows, "large")}
RENEW = "uv run python -m tests.golden {} --renew"


LARGE = "bytes and counts at the limits, each for half a second or more; the night sends them over HTTP as well"


def check(rows: Sequence[Row], cost: Cost) -> None:
    wrong = {}
    for row in well_formed(rows, cost):
        try:
            row.check(hostile_outcomes(cost)[row.name].replies)
        except AssertionError as error:
            wrong[row.name] = str(error)
    assert not wrong


def compare(kind: Kind, cost: Cost) -> None:
    found = kind.large() if cost == "large" else kind.small()
    golden, of_cost = read(kind.path), LARGE_NAMES if cost == "large" else read(kind.path).keys() - LARGE_NAMES
    changes = differences({name: one for name, one in golden.items() if name in of_cost}, found)
    assert not changes, "\n".join(
        [*changes[:20], f"{len(changes)} changes; if they are meant: {RENEW.format(kind.name)}"]
    )


@pytest.mark.parametrize("group", GROUPS)
def test_well_formed_hostile_requests_get_the_expected_answers(group: str):
    """Over HTTP the night sends them to a real server; the answers are those of the same graph without Ray."""
    check(GROUPS[group], "small")


@pytest.mark.parametrize("name", KINDS)
def test_answers_are_those_of_the_golden_file(name: str):
    compare(KINDS[name], "small")


@pytest.mark.night(LARGE)
@pytest.mark.parametrize("group", GROUPS)
def test_well_formed_large_requests_get_the_expected_answers(group: str):
    check(GROUPS[group], "large")


@pytest.mark.night(LARGE)
@pytest.mark.parametrize("name", KINDS)
def test_answers_to_large_requests_are_those_of_the_golden_file(name: str):
    compare(KINDS[name], "large")


def test_every_golden_file_belongs_to_a_kind():
    assert {path.stem for path in FILES.iterdir()} == set(KINDS)

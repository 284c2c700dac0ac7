"""The answers of the API are those that are frozen in tests/golden/files: status, headers and bytes.

`uv run python -m tests.golden` shows all differences in words, with --renew it freezes the answers anew.
"""

import pytest

from tests.e2e.hostile.table import GROUPS
from tests.golden.golden_file import differences, read
from tests.golden.kinds import FILES, KINDS, hostile_outcomes, well_formed

RENEW = "uv run python -m tests.golden {} --renew"
LARGE = "rows that are sent one by one, as they take memory or seconds; the night sends them over HTTP as well"
LARGE_NAMES = {row.name for rows in GROUPS.values() for row in well_formed(rows, is_large=True)}
LARGE_KINDS = [name for name, kind in KINDS.items() if read(kind.path).keys() & LARGE_NAMES]


def groups(is_large: bool) -> list[str]:
    return [group for group, rows in GROUPS.items() if well_formed(rows, is_large)]


def check(group: str, is_large: bool) -> None:
    wrong = {}
    for row in well_formed(GROUPS[group], is_large):
        try:
            row.check(hostile_outcomes(is_large)[row.name].replies)
        except AssertionError as error:
            wrong[row.name] = str(error)
    assert not wrong


def compare(name: str, is_large: bool) -> None:
    kind = KINDS[name]
    golden = {key: one for key, one in read(kind.path).items() if (key in LARGE_NAMES) == is_large}
    changes = differences(golden, kind.large() if is_large else kind.small())
    assert not changes, "\n".join([*changes[:20], f"{len(changes)} changes; if they are meant: {RENEW.format(name)}"])


@pytest.mark.parametrize("group", groups(is_large=False))
def test_well_formed_hostile_requests_get_the_expected_answers(group: str):
    """Over HTTP the night sends them to a real server; the answers are those of the same graph without Ray."""
    check(group, is_large=False)


@pytest.mark.parametrize("name", KINDS)
def test_answers_are_those_of_the_golden_file(name: str):
    compare(name, is_large=False)


@pytest.mark.night(LARGE)
@pytest.mark.parametrize("group", groups(is_large=True))
def test_well_formed_large_requests_get_the_expected_answers(group: str):
    check(group, is_large=True)


@pytest.mark.night(LARGE)
@pytest.mark.parametrize("name", LARGE_KINDS)
def test_answers_to_large_requests_are_those_of_the_golden_file(name: str):
    compare(name, is_large=True)


def test_every_golden_file_belongs_to_a_kind():
    assert {path.stem for path in FILES.iterdir()} == set(KINDS)

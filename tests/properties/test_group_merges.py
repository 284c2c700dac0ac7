"""Decode groups that are merged whenever memory allows, in conversations that are aborted, preempted and lent to."""

import pytest

from engine.core import admission
from engine.core.memory.grouping import Grouping
from engine.worker.decode import DecodeGroup
from tests.properties.test_lent_conversations import Conversations, runners  # noqa: F401


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each group that another has taken over. Each request has a group of its own until it is merged."""
    seen: list[int] = []
    merge = DecodeGroup.merge

    def counted(group: DecodeGroup, other: DecodeGroup) -> None:
        seen.append(len(other.rows))
        merge(group, other)

    monkeypatch.setattr(DecodeGroup, "merge", counted)
    monkeypatch.setattr(Grouping, "choose", lambda *args: None)
    monkeypatch.setattr(Grouping, "gain_s", lambda *args: 1e9)
    monkeypatch.setattr(admission, "MERGE_PERIOD_S", 0.0)
    return seen


@pytest.mark.parametrize(
    "first_seed",
    [0, *(pytest.param(seed, marks=pytest.mark.night("the same with other seeds")) for seed in (5, 10, 15))],
)
def test_a_conversation_gets_the_tokens_of_an_engine_without_merges(runners, merges: list[int], first_seed: int):  # noqa: F811
    num_cached = 0
    for seed in range(first_seed, first_seed + 5):
        conversations = Conversations(runners[seed % len(runners)], seed)
        conversations.run()
        num_cached += conversations.check()
    assert merges and num_cached

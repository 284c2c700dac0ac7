"""Ids of answers, and the node that they name."""

import pytest

from deployments.http.answer_id import new_answer_id, tag_of_node
from deployments.http.dialects import DIALECTS, tag_in


@pytest.mark.parametrize("prefix", DIALECTS.answer_ids)
def test_an_id_tells_the_tag_of_its_node(prefix: str):
    tag = tag_of_node("5f" * 28)
    made = {new_answer_id(prefix, tag) for _ in range(100)}
    assert len(made) == 100 and {tag_in(answer_id) for answer_id in made} == {tag}
    assert {len(answer_id) for answer_id in made} == {len(prefix) + 32}


@pytest.mark.parametrize(
    "chosen", ["", "mine", "req_" + 32 * "0", "chatcmpl-12", "chatcmpl-" + 31 * "0", "chatcmpl-" + 32 * "G", "resp_\n"]
)
def test_an_id_that_a_client_has_chosen_tells_no_tag(chosen: str):
    assert tag_in(chosen) is None

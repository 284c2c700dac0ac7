"""engine/FAMILIES.md is what the zoo and the engine's refusals say of every module of the libraries."""

from engine.worker.refused_families import REFUSED
from tests.support.families import FAMILIES
from tests.support.families.unserved import NOT_TEXT, REFUSED_BY_CACHE, UNTESTED
from tests.support.family_table import DOCUMENT, document


def test_the_document_of_families_is_up_to_date():
    assert DOCUMENT.read_text(encoding="utf-8") == document(), "run python -m tests.support.family_table --write"


def test_no_family_has_two_states():
    served = {family.config["model_type"] for family in FAMILIES.values()}
    states = [served, REFUSED.keys(), REFUSED_BY_CACHE.keys(), UNTESTED.keys(), NOT_TEXT.keys()]
    assert sum(map(len, states)) == len(set().union(*states))

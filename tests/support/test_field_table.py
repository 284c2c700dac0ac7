"""engine/CONFIG_FIELDS.md is what the checks say of every family."""

from tests.support.field_table import DOCUMENT, document


def test_the_document_of_fields_is_up_to_date():
    expected = document()
    assert DOCUMENT.read_text(encoding="utf-8") == expected, "run python -m tests.support.field_table --write"
    assert "`hidden_act` silu" in expected and "limits the context" in expected

"""engine/FAST_PATHS.md is what the code says of every family."""

from tests.support.fast_paths import DOCUMENT, document


def test_the_document_of_fast_paths_is_up_to_date():
    expected = document()
    assert DOCUMENT.read_text(encoding="utf-8") == expected, "run python -m tests.support.fast_paths --write"
    assert "`llama` | yes | yes |" in expected, "bursts, and snapshots within a chunk"

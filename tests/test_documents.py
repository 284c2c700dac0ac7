"""The documents name only links, files and classes that exist."""

import re
from pathlib import Path

import pytest

from engine.processing.vision_families import FAMILIES
from tests.support.vision_families import SIGHTED, images_table

ROOT = Path(__file__).parent.parent
FOLDERS = ("deployments", "engine", "tests")
DOCUMENTS = [
    Path("README.md"),
    *sorted(p.relative_to(ROOT) for folder in FOLDERS for p in (ROOT / folder).rglob("*.md")),
]
SOURCES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]

_CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
_CAMEL = re.compile(r"\b[A-Z]+[a-z]\w*[A-Z]\w*\b")


def prose(document: Path) -> str:
    return _CODE_BLOCK.sub("", (ROOT / document).read_text())


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_to_files_and_headings_that_exist(document: Path):
    dead = []
    for target, anchor in _LINK.findall(prose(document)):
        if ":" in target:
            continue
        path = ((ROOT / document).parent / target).resolve() if target else ROOT / document
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path.relative_to(ROOT))):
            dead.append(f"{target}#{anchor}")
    assert not dead


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_python_files_named_in_a_document_exist(document: Path):
    known = [path.relative_to(ROOT).as_posix() for path in SOURCES]
    named = set(re.findall(r"[\w/]+\.py\b", prose(document)))
    assert not [name for name in named if not any(f"/{path}".endswith(f"/{name.lstrip('/')}") for path in known)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_commands_have_no_comments(document: Path):
    """An interactive zsh, as macOS has it, takes a pasted `# comment` for arguments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)
    assert not [line for block in blocks for line in block.splitlines() if re.search(r"(^|\s)#", line)]


def test_classes_named_in_the_documents_exist():
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in SOURCES)))
    for document in DOCUMENTS:
        quoted = " ".join(re.findall(r"`([^`\n]+)`", prose(document)))
        assert not [name for name in set(_CAMEL.findall(quoted)) if name not in words], document


def test_the_table_of_images_is_that_of_the_families_and_the_zoo_has_them_all():
    assert images_table() in (ROOT / "engine/IMAGES.md").read_text(), f"put this there:\n{images_table()}"
    supported = {model_type for family in FAMILIES for model_type in family.model_types}
    assert supported - set(SIGHTED) == {"qwen3_5"}, "the demo model is of this family"

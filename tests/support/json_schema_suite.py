"""The JSON-Schema-Test-Suite, from the source distribution of jsonschema that uv.lock names.

No wheel contains it. The file is fetched once, checked against the lock's hash, and kept in pytest's cache.
"""

import hashlib
import io
import json
import os
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[2]
IS_REQUIRED = os.environ.get("ORCHARD_SCHEMA_SUITE") == "required"


def load_suite(cache: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the cases of draft 2020-12 by file; skip the test if the file is neither cached nor reachable."""
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    [sdist] = [package["sdist"] for package in packages if package["name"] == "jsonschema"]
    file = cache / sdist["url"].rpartition("/")[2]
    if not file.exists():
        try:
            content = httpx.get(sdist["url"], follow_redirects=True, timeout=30).raise_for_status().content
        except httpx.HTTPError as error:
            if IS_REQUIRED:
                raise
            pytest.skip(f"{sdist['url']} cannot be reached ({error}), and ORCHARD_SCHEMA_SUITE is not `required`")
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(content)
        part.replace(file)
    content = file.read_bytes()
    assert f"sha256:{hashlib.sha256(content).hexdigest()}" == sdist["hash"], f"{file} is not the file of uv.lock"
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return {
            name.partition("/draft2020-12/")[2]: json.loads(archive.extractfile(name).read())  # type: ignore[union-attr]
            for name in archive.getnames()
            if "/json/tests/draft2020-12/" in name and name.endswith(".json")
        }

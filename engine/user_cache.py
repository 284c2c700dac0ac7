"""The directory for data that can be recreated: copies of libraries, measurements."""

import os
from pathlib import Path


def user_cache() -> Path:
    """Return the directory, which may not exist yet. XDG_CACHE_HOME moves it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orchard"

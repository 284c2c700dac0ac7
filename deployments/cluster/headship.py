"""Headship: which machine is the head of the cluster, as a machine of it knows, and since how many changes."""

import json
from dataclasses import asdict, dataclass

from deployments.cluster.folder import ClusterFolder, FolderError

FILE = "head.json"
FIRST_TERM = 1


@dataclass(frozen=True)
class Headship:
    """A machine as the head."""

    address: str
    term: int
    """FIRST_TERM in a new cluster, one more with each machine that takes it over. The highest one is right."""


def read_headship(folder: ClusterFolder) -> Headship | None:
    """Return the headship that was noted last; None if there is none. Raises FolderError."""
    file = folder.path / FILE
    try:
        return Headship(**json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise FolderError(f"{file} cannot be read: {error}") from None


def write_headship(folder: ClusterFolder, headship: Headship) -> None:
    """Note a headship. Raises FolderError."""
    folder.write(folder.path / FILE, json.dumps(asdict(headship)) + "\n")

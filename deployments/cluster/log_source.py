"""LogSource: reads the log of the head's store while the store writes it, in pieces of whole records, for copies.

A piece belongs to a generation: the log from one compaction to the next, as one reader has seen it. A copy that asks
with another generation gets the log from its beginning.
"""

import json
import os
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path

from deployments.cluster.append_log import HEADER_BYTES, MAGIC, end_of_records, record_bytes

PIECE_BYTES = 2**20
"""Size of a piece, which a longer record exceeds."""
MAX_PIECE_BYTES = 2**27
"""Limit of a piece with its header. The store accepts commands of 64 MiB."""


@dataclass(frozen=True)
class Piece:
    """A part of the log that begins and ends at boundaries of records."""

    generation: str
    offset: int
    """Where it begins, in bytes."""
    is_last: bool
    """Whether it reached the end of the log when it was read."""
    content: bytes

    def pack(self) -> bytes:
        """Return the piece as bytes: a line of JSON, then the content."""
        head = {"generation": self.generation, "offset": self.offset, "is_last": self.is_last}
        return json.dumps(head).encode() + b"\n" + self.content

    @classmethod
    def unpack(cls, packed: bytes) -> "Piece":
        """Return the piece of `pack`. Raises ValueError."""
        head, _, content = packed.partition(b"\n")
        try:
            fields = json.loads(head)
            return cls(str(fields["generation"]), int(fields["offset"]), bool(fields["is_last"]), content)
        except (KeyError, TypeError) as error:
            raise ValueError(f"a piece of the log without {error}") from None


class LogSource:
    """The log of one path. Its methods may be called in any thread.

    Args:
        path: The log; its store may compact it at any time.
    """

    def __init__(self, path: Path):
        self._path = path
        self._lock = threading.Lock()
        self._file = -1
        self._generation = ""

    def read(self, generation: str, offset: int) -> Piece:
        """Return the piece that follows so many bytes of a generation.

        Raises:
            OSError: The log cannot be read.
            LogDamaged: A record is damaged.
        """
        with self._lock:
            self._follow()
            size = os.fstat(self._file).st_size
            if generation != self._generation or not 0 <= offset <= size:
                offset = 0
            content = os.pread(self._file, PIECE_BYTES, offset)
            start = len(MAGIC) if offset == 0 else 0
            if start + HEADER_BYTES <= len(content) < (needed := start + record_bytes(content[start:])):
                content = os.pread(self._file, min(needed, MAX_PIECE_BYTES), offset)
            end = end_of_records(content, start, str(self._path), offset)
            is_last = offset + len(content) >= size
            return Piece(self._generation, offset, is_last, content[:end])

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _follow(self) -> None:
        """Open the log, again once it has been replaced; while it is open, no other file has its inode."""
        if self._file >= 0 and os.path.samestat(os.stat(self._path), os.fstat(self._file)):
            return
        new = os.open(self._path, os.O_RDONLY)
        if self._file >= 0:
            os.close(self._file)
        self._file, self._generation = new, secrets.token_hex(8)

"""LogCopy: the copy of the head's log on another machine, which at any moment is a prefix of one at a record boundary.

A new generation of the log is collected in a second file, and replaces the first one when it is complete, so that a
cut never takes away what was there. The modification time of the copy tells when it was last equal to the log.
"""

import contextlib
import os
import time
from pathlib import Path

from deployments.cluster.append_log import MAGIC, LogDamaged, end_of_records
from deployments.cluster.log_source import Piece

MAX_COPY_BYTES = 2**30
"""Limit of a copy; the store accepts a state of 512 MiB, and compacts a log of twice its state."""


class CopyFailed(Exception):
    """A piece cannot be added; the message says why."""


class LogCopy:
    """The copy. One process adds to it; others may read the file.

    Args:
        path: The file; a second one beside it has the ending `.part`.
    """

    def __init__(self, path: Path):
        self._path = path
        self._part = path.with_name(f"{path.name}.part")
        self._part.unlink(missing_ok=True)
        self._generation = ""
        self._num_bytes = 0
        self._is_part = False

    @property
    def position(self) -> tuple[str, int]:
        """Generation and size up to which the copy has come, to ask for the next piece."""
        return self._generation, self._num_bytes

    def add(self, piece: Piece) -> bool:
        """Add a piece; return whether the copy is now equal to the log as it was read.

        Raises:
            CopyFailed: The piece does not follow, is damaged or too long; the copy begins anew with the next one.
            OSError: The file cannot be written.
        """
        try:
            self._check(piece)
        except CopyFailed:
            self._generation, self._num_bytes = "", 0
            raise
        if piece.offset == 0:
            self._begin(piece.generation)
        if piece.content:
            self._write(piece.content)
        if piece.is_last:
            self._complete()
        return piece.is_last

    def _check(self, piece: Piece) -> None:
        if piece.offset and (piece.generation, piece.offset) != self.position:
            raise CopyFailed(f"a piece at byte {piece.offset} of {piece.generation} follows {self.position}")
        if (size := piece.offset + len(piece.content)) > MAX_COPY_BYTES:
            raise CopyFailed(f"a log of {size} bytes exceeds the limit of {MAX_COPY_BYTES}")
        if piece.offset == 0 and not piece.content.startswith(MAGIC):
            raise CopyFailed(f"the log begins with {piece.content[:32]!r}")
        start = len(MAGIC) if piece.offset == 0 else 0
        try:
            end = end_of_records(piece.content, start, "the piece", piece.offset)
        except LogDamaged as damaged:
            raise CopyFailed(str(damaged)) from None
        if end != len(piece.content):
            raise CopyFailed(f"a piece at byte {piece.offset} ends within a record, {len(piece.content) - end} bytes")

    def _begin(self, generation: str) -> None:
        self._part.unlink(missing_ok=True)
        os.close(os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        self._generation, self._num_bytes, self._is_part = generation, 0, True

    def _write(self, content: bytes) -> None:
        """Append to the file that has come so far; what a crash has left behind its end is cut off first."""
        with (self._part if self._is_part else self._path).open("r+b") as file:
            file.truncate(self._num_bytes)
            file.seek(self._num_bytes)
            file.write(content)
        self._num_bytes += len(content)

    def _complete(self) -> None:
        if self._is_part:
            file = os.open(self._part, os.O_RDONLY)
            try:
                os.fsync(file)
            finally:
                os.close(file)
            os.replace(self._part, self._path)
            self._is_part = False
        os.utime(self._path)


def copied_s(path: Path) -> float | None:
    """Return when a copy was last equal to its log, in seconds since 1970; None if there is no copy."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime
    return None


def age_text(since_s: float | None) -> str:
    """Return how long ago a time was, in words; since_s: in seconds since 1970, None: never."""
    if since_s is None:
        return "never"
    return f"{max(0.0, time.time() - since_s):.0f} s ago"

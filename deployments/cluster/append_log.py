"""AppendLog: a file of checksummed records that only grows, and is replaced whole when it is compacted.

The file begins with MAGIC. A record is a header of twelve bytes (length of its content, CRC-32 of its content, CRC-32
of these eight bytes; big-endian) and the content. The header has a checksum of its own, so that a damaged length cannot
be taken for a record that a crash has cut short.

A record is handed to the system before `append` returns: it outlives the death of the process. `sync` makes the records
outlive a loss of power, so that at most those since the last `sync` are lost.
"""

import os
import threading
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from struct import Struct
from struct import error as StructError

MAGIC = b"orchard gcs log 1\n"
_HEAD, _CHECK = Struct(">II"), Struct(">I")
HEADER_BYTES = _HEAD.size + _CHECK.size
MAX_RECORD_BYTES = 2**30


class LogDamaged(Exception):
    """The log contains what no crash leaves behind; the message has the path and the offset."""


class AppendLog:
    """The open log. One process may have it open, which its owner ensures.

    Attributes:
        num_bytes: Size of the file.
    """

    def __init__(self, path: Path):
        """Open the log, or make it; a record at its end that a crash has cut short is removed.

        Raises:
            LogDamaged: A record is damaged.
            OSError: The file cannot be read or written.
        """
        self._path = path
        self._swap = threading.Lock()
        content = path.read_bytes() if path.exists() else b""
        if MAGIC.startswith(content):  # a crash while the file was being made
            self._write_whole(())
            content = MAGIC
        self._records, self.num_bytes = _records(content, path)
        self._file = os.open(path, os.O_RDWR)
        os.ftruncate(self._file, self.num_bytes)
        os.lseek(self._file, self.num_bytes, os.SEEK_SET)

    def take_records(self) -> list[bytes]:
        """Return the contents of the records that the file had when it was opened, once."""
        records, self._records = self._records, []
        return records

    def append(self, content: bytes) -> None:
        """Append a record. Raises OSError: the file may end in the middle of the record, and must not be used on."""
        record = _record(content)
        written = 0
        while written < len(record):
            written += os.write(self._file, record[written:] if written else record)
        self.num_bytes += len(record)

    def sync(self) -> None:
        """Wait until the disk has the records; may be called in another thread than `append`."""
        with self._swap:
            file = os.dup(self._file)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def replace(self, contents: Iterable[bytes]) -> None:
        """Replace all records; a crash leaves either the old ones or the new ones. Raises OSError."""
        self._write_whole(contents)
        with self._swap:
            old, self._file = self._file, os.open(self._path, os.O_RDWR)
            os.close(old)
        self.num_bytes = os.lseek(self._file, 0, os.SEEK_END)

    def close(self) -> None:
        """Close the file once its records are on the disk."""
        os.fsync(self._file)
        os.close(self._file)

    def _write_whole(self, contents: Iterable[bytes]) -> None:
        new = self._path.with_name(f"{self._path.name}.new")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(MAGIC)
            for content in contents:
                file.write(_record(content))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _record(content: bytes) -> bytes:
    if len(content) > MAX_RECORD_BYTES:
        raise ValueError(f"a record of {len(content)} bytes exceeds the limit of {MAX_RECORD_BYTES}")
    head = _HEAD.pack(len(content), zlib.crc32(content))
    return head + _CHECK.pack(zlib.crc32(head)) + content


def _records(content: bytes, path: Path) -> tuple[list[bytes], int]:
    """Return the records of a file, and where the last whole one ends. Raises LogDamaged."""
    if not content.startswith(MAGIC):
        raise LogDamaged(f"{path}: byte 0: the file does not begin with {MAGIC!r}")
    places = list(whole_records(content, len(MAGIC), str(path)))
    return [content[start:end] for start, end in places], places[-1][1] if places else len(MAGIC)


def whole_records(content: bytes, offset: int, name: str, base: int = 0) -> Iterator[tuple[int, int]]:
    """Yield where the content of each whole record begins and ends, up to the first record that is not whole.

    Args:
        content: A part of a log.
        offset: Where its first record begins.
        name: Of the log, for errors.
        base: Place of the part in the log, for errors.

    Raises:
        LogDamaged: A record is damaged.
    """
    number = 0
    while len(content) - offset >= HEADER_BYTES:
        length, checksum = _HEAD.unpack_from(content, offset)
        (check,) = _CHECK.unpack_from(content, offset + _HEAD.size)
        if zlib.crc32(content[offset : offset + _HEAD.size]) != check:
            if not any(content[offset:]):
                return  # a loss of power can leave zeros where data had been announced
            where = f"{name}: byte {base + offset}"
            raise LogDamaged(f"{where}: the header of record {number} does not match its checksum")
        start = offset + HEADER_BYTES
        if start + length > len(content):
            return
        if zlib.crc32(content[start : start + length]) != checksum:
            where = f"{name}: byte {base + start}"
            raise LogDamaged(f"{where}: the content of record {number} does not match its checksum")
        offset = start + length
        number += 1
        yield start, offset


def end_of_records(content: bytes, offset: int, name: str, base: int = 0) -> int:
    """Return where the last whole record of a part of a log ends; arguments and errors as of `whole_records`."""
    places = list(whole_records(content, offset, name, base))
    return places[-1][1] if places else offset


def record_bytes(header: bytes) -> int:
    """Return the size of a record, its header included, as its header announces it. Raises StructError."""
    return HEADER_BYTES + _HEAD.unpack_from(header)[0]


def words_of(record: bytes) -> list[bytes]:
    """Return the words that `record_of` has packed. Raises ValueError."""
    return list(_words(record))


def record_of(words: Iterable[bytes]) -> bytes:
    """Pack words into the content of a record: before each its length."""
    return b"".join(_CHECK.pack(len(word)) + word for word in words)


def _words(record: bytes) -> Iterator[bytes]:
    offset = 0
    while offset < len(record):
        try:
            (length,) = _CHECK.unpack_from(record, offset)
        except StructError:
            raise ValueError("a word has no length") from None
        offset += _CHECK.size
        if offset + length > len(record):
            raise ValueError(f"a word of {length} bytes exceeds its record")
        yield record[offset : offset + length]
        offset += length

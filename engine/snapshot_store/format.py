"""The file of one snapshot: safetensors, with checksums over every byte.

Any reader of safetensors can open it. The header's `__metadata__` holds the format's version, the fingerprint of the
model, the `SnapshotMeta`, and CRC-32 of the header (with zeros in its own place) and of each tensor. Header and token
ids can be checked without reading the rest, and each tensor without the others. Files are read and written here because
the library neither reads single tensors into given buffers nor covers every byte by checksums.

CRC-32 detects every burst of up to 32 wrong bits, and all but one in four billion other errors. It protects against
accidents, not attackers: a process that can write to the directory can also compute a checksum.
"""

import io
import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from engine.config import SnapshotKind
from engine.protocol import PromptOrigin

FORMAT = "orchard-snapshot-2"
DIGEST = re.compile(r"[0-9a-f]{32,64}")
TOKEN_IDS = "token_ids"
RESERVED_NAMES = frozenset({TOKEN_IDS, "__metadata__"})

MAX_HEADER_BYTES = 1 << 20
"""Limit of the JSON header, which takes about 100 bytes per tensor and image."""

CHUNK_BYTES = 16 << 20
"""Bytes read or written at once. While another thread runs Python, this one waits 5 ms for the GIL after each."""

DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
    "C64": np.dtype("<c8"),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_CRC_AT = slice(8 + len('{"__metadata__":{"header_crc32":"'), 8 + len('{"__metadata__":{"header_crc32":"') + 8)
"""Place of the checksum, eight lower-case hex digits, in a header that is preceded by its length."""


class TornFile(Exception):
    """The file is damaged or incomplete."""


class ForeignFile(Exception):
    """The file is not a snapshot of this format and version."""


@dataclass(frozen=True, eq=False)
class SnapshotMeta:
    """The metadata in a snapshot's file.

    Raises:
        ValueError: The values are inconsistent.
    """

    digest: str  # 32 to 64 lower-case hex digits, unique per tenant, tokens and media.
    parent: str  # Digest of the snapshot whose KV segment precedes this one's; '' without one.
    parent_tokens: int  # Tokens of the parent; 0 without one.
    kind: SnapshotKind  # Kind of its boundary.
    tenant: str  # Tenant of the prompt.
    token_ids: np.ndarray  # int32 [num_tokens], all tokens before the boundary.
    media: tuple[tuple[int, int, str], ...]  # (start, end, content hash) of the images among them.
    origin: PromptOrigin  # Digests of the template variables that the prompt was rendered with.
    created_s: float  # Unix time.

    def says_the_same_as(self, other: "SnapshotMeta") -> bool:
        """Return whether both describe the same KV segment of the same prompt."""
        mine = self.digest, self.parent, self.parent_tokens, self.tenant, self.media
        theirs = other.digest, other.parent, other.parent_tokens, other.tenant, other.media
        return mine == theirs and np.array_equal(self.token_ids, other.token_ids)

    def __post_init__(self) -> None:
        if not DIGEST.fullmatch(self.digest) or (self.parent and not DIGEST.fullmatch(self.parent)):
            raise ValueError(f"digest {self.digest!r}, parent {self.parent!r}: expected 32 to 64 hex digits")
        if self.token_ids.dtype != np.int32 or self.token_ids.ndim != 1:
            raise ValueError(f"token_ids: expected int32 [num_tokens], not {self.token_ids.dtype}")
        if not 0 <= self.parent_tokens < self.num_tokens or bool(self.parent) != bool(self.parent_tokens):
            raise ValueError(
                f"parent {self.parent!r} has {self.parent_tokens} tokens; it must have fewer than {self.num_tokens}"
            )
        if self.kind not in get_args(SnapshotKind):
            raise ValueError(f"kind {self.kind!r}: expected one of {get_args(SnapshotKind)}")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class SnapshotHead:
    """Everything in a file but its tensors."""

    meta: SnapshotMeta  # The metadata.
    fingerprint: str  # Fingerprint of the model.
    tensors: dict[str, dict[str, Any]]  # The header's entries by name.
    data_at: int  # Offset of the tensors in the file.
    crc32: dict[str, str]  # Checksum of each tensor by name, in hex digits.


def open_snapshot(path: Path) -> io.FileIO:
    """Open a file for reading, without following symlinks or waiting for pipes. Raises OSError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return io.FileIO(str(path), "r", opener=lambda name, _: os.open(name, flags))


def snapshot_bytes(meta: SnapshotMeta, fingerprint: str, arrays: dict[str, np.ndarray]) -> int:
    """Return the size of the file that `write_snapshot` would write."""
    tensors = _in_order(meta, arrays)
    return len(_header(meta, fingerprint, tensors)) + sum(array.nbytes for array in tensors.values())


def write_snapshot(file: io.FileIO, meta: SnapshotMeta, fingerprint: str, arrays: dict[str, np.ndarray]) -> None:
    """Write a snapshot into an empty file. Arrays need not be contiguous.

    Raises:
        OSError: The file cannot be written.
        KeyError: A dtype is not in DTYPES.
        ValueError: The header is too large.
    """
    tensors = _in_order(meta, arrays)
    file.seek(len(_header(meta, fingerprint, tensors)))
    checksums = dict[str, int]()
    for name, array in tensors.items():
        data, checksum = _bytes_of(array), 0
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            checksum = zlib.crc32(chunk, checksum)
            _write_all(file, chunk)
        checksums[name] = checksum
    file.seek(0)
    _write_all(file, memoryview(_header(meta, fingerprint, tensors, checksums)))


def read_head(file: io.FileIO) -> SnapshotHead:
    """Read and check everything but the tensors. Raises TornFile, ForeignFile, OSError."""
    length = _read_exactly(file, 8)
    header_bytes = int.from_bytes(length, "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise TornFile(f"its header has {header_bytes} bytes; the limit is {MAX_HEADER_BYTES}")
    header = length + _read_exactly(file, header_bytes)
    tensors = _parse(header)
    if _sealed(header) != header:
        raise TornFile("its header is damaged")
    try:
        return _head_of(file, tensors, len(header))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise TornFile(f"its header is invalid ({error!r})") from None


def read_arrays(file: io.FileIO, head: SnapshotHead, prefix: str = "") -> dict[str, np.ndarray]:
    """Read the arrays whose names begin with the prefix, each into a writable buffer of its own; little-endian.

    Raises TornFile, OSError.
    """
    names = [name for name in head.tensors if name != TOKEN_IDS and name.startswith(prefix)]
    return {name: _read_array(file, head, name) for name in names}


def _read_array(file: io.FileIO, head: SnapshotHead, name: str) -> np.ndarray:
    tensor = head.tensors[name]
    start, end = tensor["data_offsets"]
    data, checksum = np.empty(end - start, np.uint8), 0
    file.seek(head.data_at + start)
    for at in range(0, len(data), CHUNK_BYTES):
        chunk = data.data[at : at + CHUNK_BYTES]
        _read_into(file, chunk)
        checksum = zlib.crc32(chunk, checksum)
    if f"{checksum:08x}" != head.crc32.get(name):
        raise TornFile(f"its tensor {name} is damaged")
    return _array_of(data, tensor)


def _in_order(meta: SnapshotMeta, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return all tensors, wide dtypes first, so that each is aligned: the format has no padding between them."""
    tensors = {TOKEN_IDS: meta.token_ids, **arrays}
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


def _header(
    meta: SnapshotMeta, fingerprint: str, tensors: dict[str, np.ndarray], checksums: Mapping[str, int] | None = None
) -> bytes:
    """Return the header, preceded by its length. Its size does not depend on the checksums."""
    metadata = {
        "header_crc32": "0" * 8,
        "format": FORMAT,
        "fingerprint": fingerprint,
        "crc32": json.dumps({name: f"{(checksums or {}).get(name, 0):08x}" for name in tensors}),
        "snapshot": json.dumps(_as_json(meta)),
    }
    entries: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, array in tensors.items():
        dtype = _NAMES[array.dtype.newbyteorder("<")]
        end = offset + array.nbytes
        entries[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"the header would have {len(text)} bytes; the limit is {MAX_HEADER_BYTES}")
    return _sealed(len(text).to_bytes(8, "little") + text)


def _as_json(meta: SnapshotMeta) -> dict[str, Any]:
    return {
        "digest": meta.digest,
        "parent": meta.parent,
        "parent_tokens": meta.parent_tokens,
        "kind": meta.kind,
        "tenant": meta.tenant,
        "media": meta.media,
        "origin": {"tools": meta.origin.tools, "template_kwargs": meta.origin.template_kwargs},
        "created_s": meta.created_s,
    }


def _sealed(header: bytes) -> bytes:
    """Return the header with its own checksum inserted."""
    front, back = header[: _CRC_AT.start], header[_CRC_AT.stop :]
    return front + f"{zlib.crc32(front + b'0' * 8 + back):08x}".encode() + back


def _parse(header: bytes) -> dict[str, dict[str, Any]]:
    """Parse a header and check its format's version."""
    try:
        entries = json.loads(header[8:])
    except (ValueError, RecursionError):
        raise TornFile("its header is damaged") from None
    metadata = entries.get("__metadata__") if isinstance(entries, dict) else None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise ForeignFile(f"it is not of the format {FORMAT}")
    return entries


def _head_of(file: io.FileIO, entries: dict[str, dict[str, Any]], data_at: int) -> SnapshotHead:
    metadata = entries["__metadata__"]
    tensors = {name: entry for name, entry in entries.items() if name != "__metadata__"}
    data_bytes = max(tensor["data_offsets"][1] for tensor in tensors.values())
    file_bytes = os.fstat(file.fileno()).st_size
    if file_bytes != data_at + data_bytes:
        raise TornFile(f"it has {file_bytes} bytes; its header declares {data_at + data_bytes}")
    start, end = tensors[TOKEN_IDS]["data_offsets"]
    token_ids = os.pread(file.fileno(), end - start, data_at + start)
    crc32 = json.loads(metadata["crc32"])
    if f"{zlib.crc32(token_ids):08x}" != crc32[TOKEN_IDS]:
        raise TornFile("its token ids are damaged")
    fields = json.loads(metadata["snapshot"])
    fields["media"] = tuple((begin, stop, content_hash) for begin, stop, content_hash in fields["media"])
    fields["origin"] = PromptOrigin(**fields["origin"])
    meta = SnapshotMeta(token_ids=np.frombuffer(token_ids, DTYPES["I32"]), **fields)
    return SnapshotHead(meta, metadata["fingerprint"], tensors, data_at, crc32)


def _bytes_of(array: np.ndarray) -> memoryview:
    """Return an array's bytes, little-endian and C-contiguous, without a copy if possible."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data


def _array_of(data: np.ndarray, tensor: dict[str, Any]) -> np.ndarray:
    try:
        return data.view(DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise TornFile(f"its header is invalid ({error!r})") from None


def _write_all(file: io.FileIO, rest: memoryview) -> None:
    while rest:
        rest = rest[file.write(rest) :]


def _read_exactly(file: io.FileIO, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    _read_into(file, memoryview(data))
    return bytes(data)


def _read_into(file: io.FileIO, rest: memoryview) -> None:
    while rest:
        count = file.readinto(rest)
        if not count:
            raise TornFile("it is truncated")
        rest = rest[count:]

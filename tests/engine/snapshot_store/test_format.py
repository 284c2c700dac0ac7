"""One snapshot as a file: what goes in comes out, and nothing else ever does."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from engine.protocol import PromptOrigin
from engine.snapshot_store import format as snapshot_format
from engine.snapshot_store.format import (
    DTYPES,
    MAX_HEADER_BYTES,
    ForeignFile,
    SnapshotHead,
    SnapshotMeta,
    TornFile,
    open_snapshot,
    read_arrays,
    read_head,
    snapshot_bytes,
    write_snapshot,
)
from tests.engine.snapshot_store.snapshots import MODEL, assert_same_arrays, assert_same_meta, digest_of, meta_of

Arrays = dict[str, np.ndarray]

META = meta_of(
    "child",
    meta_of("parent"),
    kind="system",
    tenant='a "salt", \ud800 and all',
    media=((3, 9, "ab" * 32), (20, 21, "cd" * 32)),
    origin=PromptOrigin("tools", "kwargs"),
)
ARRAYS: Arrays = {
    "state": np.arange(6, dtype=np.float32).reshape(2, 3),
    "keys:bfloat16": np.arange(5, dtype=np.uint16),
    "lengths": np.array([1, 2], np.int64),
    "mask": np.array([True, False, True]),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def write(path: Path, arrays: Arrays = ARRAYS, meta: SnapshotMeta = META) -> bytes:
    with path.open("wb", buffering=0) as file:
        write_snapshot(file, meta, MODEL, arrays)
    assert path.stat().st_size == snapshot_bytes(meta, MODEL, arrays)
    return path.read_bytes()


def read(path: Path) -> tuple[SnapshotHead, Arrays]:
    with open_snapshot(path) as file:
        head = read_head(file)
        return head, read_arrays(file, head)


@contextmanager
def flipped(path: Path, position: int, bits: int) -> Iterator[None]:
    with path.open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, position)[0]
        os.pwrite(file.fileno(), bytes([byte ^ bits]), position)
        yield
        os.pwrite(file.fileno(), bytes([byte]), position)


def test_a_written_snapshot_is_read_back_unchanged(path: Path) -> None:
    write(path)
    head, arrays = read(path)

    assert_same_meta(head.meta, META)
    assert head.fingerprint == MODEL
    assert_same_arrays(arrays, ARRAYS)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (2, 3, 5)])
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_arrays_of_every_dtype_and_shape_are_read_back(path: Path, name: str, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    array = np.frombuffer(np.random.default_rng(0).bytes(count * 8), np.uint8)[: count * DTYPES[name].itemsize]
    if name == "BOOL":
        array = array & 1
    given = {"x": array.view(DTYPES[name]).reshape(shape), "other": np.ones(3, np.uint8)}
    write(path, given)

    with np.errstate(invalid="ignore"):
        assert read(path)[1]["x"].tobytes() == given["x"].tobytes()
    assert read(path)[1]["x"].shape == shape and read(path)[1]["x"].dtype == DTYPES[name]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.T,
        lambda x: x[:, ::2],
        lambda x: x[::-1, 1:],
        lambda x: np.asfortranarray(x),
        lambda x: np.broadcast_to(x[0], (4, 6)),
        lambda x: x.astype(">f4"),
        lambda x: x[:0],
    ],
)
def test_arrays_in_any_layout_come_back(path: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    given = {"x": change(np.arange(24, dtype=np.float32).reshape(4, 6))}
    given["x"].flags.writeable = False
    write(path, given)

    assert_same_arrays(read(path)[1], given)


def test_a_snapshot_without_arrays_and_one_of_many_chunks_come_back(path: Path, monkeypatch) -> None:
    write(path, {})
    assert read(path)[1] == {}

    monkeypatch.setattr(snapshot_format, "CHUNK_BYTES", 7)
    write(path)
    assert_same_arrays(read(path)[1], ARRAYS)


def test_arrays_that_are_read_can_be_written_to_and_are_aligned(path: Path) -> None:
    write(path, {"a": np.ones(1, np.uint8), "b": np.ones(3, np.uint16), "c": np.ones(1, np.float64)})

    head, arrays = read(path)
    assert all(array.flags.writeable and array.flags.aligned for array in arrays.values())
    assert head.data_at % 8 == 0


def test_the_safetensors_library_reads_the_same_arrays_from_a_snapshot_file(path: Path) -> None:
    write(path)

    library = load_file(path)
    np.testing.assert_array_equal(library.pop("token_ids"), META.token_ids)
    assert_same_arrays(library, ARRAYS)
    with safe_open(path, framework="np") as file:
        assert file.metadata()["fingerprint"] == MODEL
        assert json.loads(file.metadata()["snapshot"])["digest"] == META.digest


def test_a_file_with_a_flipped_byte_is_never_read(path: Path) -> None:
    whole = write(path)
    rng = np.random.default_rng(0)

    for position in range(len(whole)):
        for bits in {1, 0x20, int(rng.integers(1, 256))}:
            with flipped(path, position, bits), pytest.raises((TornFile, ForeignFile)):
                read(path)
    assert path.read_bytes() == whole


def test_a_flipped_byte_in_header_or_token_ids_is_noticed_without_reading_the_rest(path: Path) -> None:
    whole = write(path, {"lengths": np.array([1], np.int64), "state": np.ones(8, np.uint8)})
    header_bytes = 8 + int.from_bytes(whole[:8], "little")
    token_ids_at = header_bytes + 8  # behind the wider lengths
    checked = [*range(header_bytes), *range(token_ids_at, token_ids_at + META.token_ids.nbytes)]

    for position in checked:
        with flipped(path, position, 1), open_snapshot(path) as file, pytest.raises((TornFile, ForeignFile)):
            read_head(file)


def test_a_truncated_or_extended_file_is_detected_as_torn_from_its_head(path: Path) -> None:
    whole = write(path)

    for length in reversed(range(len(whole))):
        os.truncate(path, length)
        with open_snapshot(path) as file, pytest.raises(TornFile):
            read_head(file)
    path.write_bytes(whole + b"\0")
    with open_snapshot(path) as file, pytest.raises(TornFile, match=f"has {len(whole) + 1} bytes; its header declares"):
        read_head(file)


def test_two_files_swapped_in_part_are_torn(path: Path) -> None:
    first, second = write(path), write(path, {**ARRAYS, "state": ARRAYS["state"] + 1})
    header_bytes = 8 + int.from_bytes(first[:8], "little")
    path.write_bytes(first[:header_bytes] + second[header_bytes:])

    with pytest.raises(TornFile, match="its tensor state is damaged"):
        read(path)


def test_a_hostile_header_size_is_not_read(path: Path) -> None:
    for size in (MAX_HEADER_BYTES + 1, 2**31, 2**63, 2**64 - 1):
        with path.open("wb") as file:
            file.write(size.to_bytes(8, "little") + b"{}")
            file.truncate(2**32)  # sparse
        with pytest.raises(TornFile, match=f"its header has {size} bytes; the limit is {MAX_HEADER_BYTES}"):
            read(path)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"9" * 10_000])
def test_a_header_that_is_no_json_is_torn(path: Path, text: bytes) -> None:
    path.write_bytes(len(text).to_bytes(8, "little") + text)

    with pytest.raises(TornFile):
        read(path)


@pytest.mark.parametrize(
    "header",
    [[], 1, {}, {"__metadata__": []}, {"__metadata__": {}}, {"__metadata__": {"format": "orchard-snapshot-1"}}],
)
def test_a_header_of_another_format_is_foreign(path: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)

    with pytest.raises(ForeignFile):
        read(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_ids", None),
        ("token_ids", {"dtype": "I32", "shape": [1], "data_offsets": [-4, 0]}),
        ("state", {"dtype": "BF16", "shape": [24], "data_offsets": [0, 24]}),
        ("state", {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 24]}),
        ("state", {"dtype": "F32", "shape": [6], "data_offsets": [0, 2**62]}),
        ("state", {"dtype": "F32", "shape": [6], "data_offsets": ["a", "b"]}),
        ("state", []),
    ],
)
def test_a_header_that_makes_no_sense_is_torn_even_with_the_right_checksum(path: Path, name: str, value: Any) -> None:
    whole = write(path)
    size = int.from_bytes(whole[:8], "little")
    text = json.dumps({**json.loads(whole[8 : 8 + size]), name: value}, separators=(",", ":")).encode()
    path.write_bytes(snapshot_format._sealed(len(text).to_bytes(8, "little") + text) + whole[8 + size :])

    with pytest.raises(TornFile):
        read(path)


def test_a_header_that_would_be_too_large_is_not_written(path: Path) -> None:
    media = tuple((i, i + 1, "ab" * 32) for i in range(15_000))

    with path.open("wb", buffering=0) as file, pytest.raises(ValueError, match=f"the limit is {MAX_HEADER_BYTES}"):
        write_snapshot(file, meta_of("x", media=media), MODEL, {})


def test_neither_a_symlink_nor_a_pipe_is_opened(path: Path, tmp_path: Path) -> None:
    write(tmp_path / "other")
    path.symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic link"):
        open_snapshot(path)

    os.mkfifo(tmp_path / "pipe")
    with open_snapshot(tmp_path / "pipe") as file, pytest.raises(TornFile):
        read_head(file)


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": "../../etc/passwd"},
        {"digest": "AB" * 16},
        {"digest": "a" * 31},
        {"digest": "a" * 32 + "\n"},
        {"parent": "x", "parent_tokens": 1},
        {"parent": digest_of("parent"), "parent_tokens": 0},
        {"parent": digest_of("parent"), "parent_tokens": 16},
        {"parent_tokens": 1},
        {"kind": "end"},
        {"token_ids": np.arange(4)},
        {"token_ids": np.zeros((4, 1), np.int32)},
    ],
)
def test_inconsistent_metadata_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"digest|parent|kind|token_ids"):
        meta_of("x", **changes)

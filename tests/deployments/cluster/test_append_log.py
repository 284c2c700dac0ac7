import re
from pathlib import Path

import pytest

from deployments.cluster.append_log import HEADER_BYTES, MAGIC, AppendLog, LogDamaged, record_of, words_of

RECORDS = [b"first", b"", b"third \x00\xff" * 3]
ENDS = [len(MAGIC) + sum(HEADER_BYTES + len(record) for record in RECORDS[:i]) for i in range(len(RECORDS) + 1)]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "gcs.log"
    log = AppendLog(path)
    for record in RECORDS:
        log.append(record)
    log.close()
    return path


def read(path: Path) -> list[bytes]:
    log = AppendLog(path)
    try:
        return log.take_records()
    finally:
        log.close()


def test_records_are_read_again(written: Path):
    assert read(written) == RECORDS and written.stat().st_size == ENDS[-1]
    assert written.stat().st_mode & 0o777 == 0o600


def test_a_crash_at_any_byte_keeps_the_whole_records_and_the_log_goes_on(written: Path):
    content = written.read_bytes()
    for size in range(len(content) + 1):
        written.write_bytes(content[:size])
        log = AppendLog(written)
        num_whole = sum(end <= size for end in ENDS[1:])
        assert log.take_records() == RECORDS[:num_whole], size
        log.append(b"next")
        log.close()
        assert read(written) == [*RECORDS[:num_whole], b"next"], size


def test_a_flipped_bit_in_any_byte_is_refused_with_its_record_named(written: Path):
    content = written.read_bytes()
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 0x10
        written.write_bytes(damaged)
        with pytest.raises(LogDamaged) as refused:
            AppendLog(written)
        (offset,) = re.findall(r"byte (\d+)", str(refused.value))
        start = max(end for end in (0, *ENDS) if end <= place)
        assert int(offset) in (start, start + HEADER_BYTES) and int(offset) <= place, (place, refused.value)
        assert str(written) in str(refused.value) and written.read_bytes() == damaged, "the file stays as it is"


def test_zeros_that_a_loss_of_power_leaves_are_removed(written: Path):
    content = written.read_bytes()
    written.write_bytes(content + b"\0" * 4096)
    assert read(written) == RECORDS and written.read_bytes() == content


def test_replaced_records_are_those_that_are_read_and_the_log_goes_on(written: Path):
    log = AppendLog(written)
    log.replace([b"all"])
    log.append(b"more")
    log.sync()
    log.close()
    assert read(written) == [b"all", b"more"] and [path.name for path in written.parent.iterdir()] == ["gcs.log"]


def test_a_crash_during_a_replacement_leaves_the_old_records(written: Path):
    written.with_name("gcs.log.new").write_bytes(MAGIC + b"half of a rec")
    assert read(written) == RECORDS


def test_words_are_packed_and_unpacked():
    words = [b"HSET", b"", b"\x00\x01", b"x" * 70000]
    assert words_of(record_of(words)) == words
    for cut in (1, 5, 69999):
        with pytest.raises(ValueError, match="word"):
            words_of(record_of(words)[:-cut])

"""The record of the night: what is kept of a part, and when the gate warns."""

import json
from pathlib import Path

import pytest

from tests.schedule import night
from tests.schedule.night import MAX_AGE, PARTS, entry, main, warnings

RUN = {"outcomes": {"passed": 3}, "seconds": {"tests/e2e/a.py::test_a": 2.0, "tests/engine/core/b.py::test_b": 5.4}}


def test_entry_has_the_outcomes_and_the_seconds_by_folder():
    kept = entry(RUN, 61.7, "abc1234")
    assert kept["commit"] == "abc1234" and kept["seconds"] == 62 and kept["outcomes"] == {"passed": 3}
    assert list(kept["seconds_of_tests"].items()) == [("engine", 5), ("e2e", 2)]
    assert "cores" in kept["machine"] and kept["date"].endswith("UTC")


def test_parts_that_have_not_run_or_failed_or_are_old_are_told():
    good = entry(RUN, 1, "abc1234")
    assert warnings({part: good for part in PARTS}, dict.fromkeys(PARTS, MAX_AGE)) == []
    told = warnings({PARTS[0]: {**good, "outcomes": {"failed": 2}}}, {PARTS[0]: MAX_AGE + 1})
    assert len(told) == 1 + len(PARTS)
    assert "2 failed" in told[0] and f"{MAX_AGE + 1} commits old, the limit is {MAX_AGE}" in told[1]
    assert f".ci/nightly {PARTS[1]}" in told[2]


def test_unknown_commit_counts_as_too_old():
    good = entry(RUN, 1, "abc1234")
    assert len(warnings({part: good for part in PARTS}, dict.fromkeys(PARTS))) == len(PARTS)


def test_commands_record_a_part_and_tell_its_age(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(night, "RECORD", tmp_path / "night.json")
    monkeypatch.setattr(night, "_git", lambda *arguments: "7" if arguments[0] == "rev-list" else "abc1234")
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    for part in PARTS:
        main(["record", part, "90"], tmp_path / "run.json")
    assert list(json.loads((tmp_path / "night.json").read_text())) == list(PARTS)
    main(["age"])
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit):
        main(["record", "nonsense", "1"])
    capsys.readouterr()


def test_parts_are_those_of_the_script():
    script = (night.ROOT / ".ci" / "nightly").read_text()
    assert [line.partition(")")[0].strip() for line in script.splitlines() if line.endswith(")  # part")] == list(PARTS)

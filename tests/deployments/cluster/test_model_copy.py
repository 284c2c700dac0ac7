"""A model that a machine lacks is copied from the head, over loopback, into another home folder."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

import huggingface_hub.constants
import numpy as np
import pytest
from safetensors.numpy import save_file

from deployments.cluster import model_copy, model_files
from deployments.cluster.facts import Checkpoint, read_checkpoint
from deployments.cluster.join_client import HeadClient, HeadRefused
from deployments.cluster.join_server import JoinServer
from deployments.cluster.model_copy import CannotCopy, copy_model, missing_models
from deployments.cluster.model_files import FILES_PATH, PIECE_PATH, ModelSource
from engine.smollm2 import SMOLLM2

TOKEN, HOST = "the token of the cluster", "127.0.0.1"
REPOSITORY, COMMIT = "org/model", "0123456789abcdef0123456789abcdef01234567"
PIECE = 1000


def write_model(folder: Path) -> None:
    """Write a small model, and files that are none of it."""
    (folder / "1_Pooling").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in ("model-00001-of-00002", "model-00002-of-00002"):
        tensors = {f"{name}.weight": rng.normal(size=(40, 30)).astype(np.float32)}
        save_file(tensors, folder / f"{name}.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (folder / "empty.json").write_text("")
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    (folder / "secrets.txt").write_text("no file of a model")
    (folder / ".hidden.json").write_text("none either")


class Homes:
    """The home folders of the head and of a machine that joins, of which one is that of this process."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch):
        self._root, self._monkeypatch = root, monkeypatch

    def enter(self, name: str) -> Path:
        """Make a home folder that of this process from now on."""
        home = self._root / name
        home.mkdir(exist_ok=True)
        self._monkeypatch.setenv("HOME", str(home))
        self._monkeypatch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
        self._monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(home / "hub"))
        return home


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Homes:
    monkeypatch.setattr(model_files, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(model_copy, "PIECE_BYTES", PIECE)
    return Homes(tmp_path, monkeypatch)


class Head:
    """A head's port. The process answers it and asks at the same time, so that each answer is given in its home."""

    def __init__(self, homes: Homes, models: list[tuple[str, str | None]]):
        self.asked: list[dict[str, str]] = []
        self.fail_after = 10**9
        home = homes.enter("head")
        source = ModelSource(lambda: models)

        def in_home(answer: model_files.Answer) -> model_files.Answer:
            def answered(question: model_files.Question) -> bytes:
                self.asked.append(dict(question.fields))
                if len(self.asked) > self.fail_after:
                    raise model_files.BadQuestion("the head ends")
                here = os.environ["HOME"]
                homes.enter("head")
                try:
                    return answer(question)
                finally:
                    homes.enter(Path(here).name)

            return answered

        answers = {path: in_home(answer) for path, answer in source.answers().items()}
        self.home = home
        self.server = JoinServer(HOST, 0, TOKEN, dict, answers)
        self.server.start()
        self.client = HeadClient(f"{HOST}:{self.server.port}", TOKEN)

    def pieces(self) -> list[tuple[str, int]]:
        """Return file and start of each piece that was asked for."""
        return [(one["file"], int(one["start"])) for one in self.asked if "file" in one]


MakeHead = Callable[[list[tuple[str, str | None]]], Head]


@pytest.fixture
def head_of(homes: Homes) -> Iterator[MakeHead]:
    made: list[Head] = []

    def make(models: list[tuple[str, str | None]]) -> Head:
        made.append(Head(homes, models))
        return made[-1]

    yield make
    for head in made:
        head.server.stop()


def repository_on(head: Head, revision: str = "main") -> Path:
    """Write the model into the hub's cache of the head."""
    folder = head.home / "hub" / "models--org--model"
    write_model(folder / "snapshots" / COMMIT)
    (folder / "refs").mkdir()
    (folder / "refs" / revision).write_text(COMMIT)
    return folder / "snapshots" / COMMIT


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


OWN = {
    "1_Pooling/config.json",
    "config.json",
    "empty.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.mark.parametrize("revision", [None, "v1", COMMIT])
def test_a_repository_of_the_hub_comes_into_the_hubs_cache_of_the_machine(homes, head_of, revision):
    head = head_of([(REPOSITORY, revision)])
    there = repository_on(head, revision or "main")
    wanted = read_checkpoint(REPOSITORY, revision)
    home = homes.enter("member")
    assert missing_models([wanted, wanted]) == [wanted]

    counted: list[int] = []
    place = copy_model(head.client, wanted, counted.append)

    assert place == home / "hub" / "models--org--model" / "snapshots" / COMMIT
    assert read_checkpoint(REPOSITORY, revision) == wanted and missing_models([wanted]) == []
    expected = {name: data for name, data in contents(there).items() if name in OWN}
    assert contents(place) == expected and sum(counted) == sum(map(len, expected.values()))
    assert not list(home.rglob("*.incomplete")), "nothing is left beside it"
    assert sum(one.get("start") == "0" for one in head.asked) == len(OWN) - 1, "nothing is asked for an empty file"


def test_a_folder_comes_to_the_same_path_below_the_home_of_the_machine(homes, head_of):
    head = head_of([("~/models/mine", None)])
    write_model(head.home / "models" / "mine")
    wanted = read_checkpoint("~/models/mine", None)
    home = homes.enter("member")
    assert copy_model(head.client, wanted, lambda num_bytes: None) == home / "models" / "mine"
    assert contents(home / "models" / "mine").keys() == OWN


def test_the_model_of_the_package_index_comes_to_its_place_in_orchards_cache(homes, head_of):
    head = head_of([(SMOLLM2, None)])
    write_model(head.home / ".cache" / "orchard" / "models" / SMOLLM2)
    wanted = read_checkpoint(SMOLLM2, None)
    assert wanted.fingerprint
    homes.enter("member")
    copy_model(head.client, wanted, lambda num_bytes: None)
    assert read_checkpoint(SMOLLM2, None) == wanted


def test_a_copy_that_was_interrupted_goes_on_and_is_no_model_meanwhile(homes, head_of):
    head = head_of([(REPOSITORY, None)])
    there = repository_on(head)
    wanted = read_checkpoint(REPOSITORY, None)
    home = homes.enter("member")
    counted: list[int] = []
    head.fail_after = 9
    with pytest.raises(HeadRefused, match="the head ends"):
        copy_model(head.client, wanted, counted.append)
    assert missing_models([wanted]) == [wanted]
    assert not (home / "hub" / "models--org--model" / "snapshots").exists()
    done = sum(counted)
    assert done >= 3 * PIECE

    head.fail_after, counted = 10**9, []
    first = head.pieces()
    copy_model(head.client, wanted, counted.append)
    again = head.pieces()[len(first) :]
    assert set(again[1:]).isdisjoint(first[:-2]), "all but the last piece of the interrupted file is kept"
    assert sum(counted) == sum(len(data) for name, data in contents(there).items() if name in OWN)
    assert read_checkpoint(REPOSITORY, None) == wanted


def test_what_is_left_of_a_copy_of_other_weights_for_the_same_place_is_deleted(homes, head_of):
    head = head_of([("~/models/mine", None)])
    write_model(head.home / "models" / "mine")
    wanted = read_checkpoint("~/models/mine", None)
    models = homes.enter("member") / "models"
    other = ".mine.2.0123456789ab.incomplete"
    for name in (".mine.0123456789ab.incomplete", other):
        (models / name / "1_Pooling").mkdir(parents=True)
        (models / name / "model.safetensors").write_bytes(b"half")
    copy_model(head.client, wanted, lambda num_bytes: None)
    assert {path.name for path in models.iterdir()} == {"mine", other}, "that of another model stays"


def test_an_older_config_never_lies_beside_new_weights(homes, head_of, monkeypatch):
    head = head_of([("~/models/mine", None)])
    write_model(head.home / "models" / "mine")
    wanted = read_checkpoint("~/models/mine", None)
    place = homes.enter("member") / "models" / "mine"
    place.mkdir(parents=True)
    (place / "config.json").write_text('{"model_type": "older"}')
    moved: list[str] = []
    replace_file = os.replace

    def look(source: Path, target: Path) -> None:
        if Path(target).parent == place:
            assert not (place / "config.json").exists()
            moved.append(Path(target).name)
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", look)
    copy_model(head.client, wanted, lambda num_bytes: None)
    assert moved[-1] == "config.json" and len(moved) == len(OWN) - 1


def test_a_file_that_changes_on_the_head_meanwhile_ends_the_copy(homes, head_of):
    head = head_of([(REPOSITORY, None)])
    there = repository_on(head)
    wanted = read_checkpoint(REPOSITORY, None)
    homes.enter("member")
    changed = there / "model-00001-of-00002.safetensors"

    def touch(num_bytes: int) -> None:
        os.utime(changed, ns=(1, 1))

    with pytest.raises(HeadRefused, match=r"model-00001-of-00002\.safetensors has changed on the head meanwhile"):
        copy_model(head.client, wanted, touch)
    assert missing_models([wanted]) == [wanted]


def test_files_that_are_not_those_of_the_comparison_are_named(homes, head_of):
    head = head_of([(REPOSITORY, None)])
    repository_on(head)
    wanted = replace(read_checkpoint(REPOSITORY, None), fingerprint="0" * 32)
    homes.enter("member")
    with pytest.raises(CannotCopy, match=f"{COMMIT} is not the model of the head: delete that folder"):
        copy_model(head.client, wanted, lambda num_bytes: None)


def test_a_place_that_cannot_be_written_or_is_not_known_is_named(homes, head_of, tmp_path):
    (tmp_path / "file").write_text("no folder")
    place = str(tmp_path / "file" / "model")
    head = head_of([(place, None)])
    head.client.model_files = lambda model: model_files.ModelFiles(  # type: ignore[method-assign]
        "/models/model", False, (model_files.ModelFile("config.json", 0, 0),)
    )
    homes.enter("member")
    with pytest.raises(CannotCopy, match=f"cannot be written to {place}: .*Not a directory"):
        copy_model(head.client, Checkpoint(place, None, "f" * 32, 1), lambda num_bytes: None)
    with pytest.raises(CannotCopy, match="relative to its working directory, models/mine"):
        copy_model(head.client, Checkpoint("models/mine", None, "f" * 32, 1), lambda num_bytes: None)


@pytest.mark.parametrize("name", ["../other.json", "/etc/passwd.json", "a/../../b.json", ".ssh/config.json", ""])
def test_a_head_that_names_files_outside_of_the_folder_is_refused(homes, head_of, name):
    head = head_of([("~/m", None)])
    head.client.model_files = lambda model: model_files.ModelFiles(  # type: ignore[method-assign]
        "/m", False, (model_files.ModelFile(name, 1, 0),)
    )
    home = homes.enter("member")
    with pytest.raises(CannotCopy, match="is no file of a model"):
        copy_model(head.client, Checkpoint("~/m", None, "f" * 32, 1), lambda num_bytes: None)
    assert not contents(home)


def test_only_files_of_the_models_that_the_cluster_serves_are_sent(homes, head_of):
    head = head_of([(REPOSITORY, None)])
    there = repository_on(head)
    write_model(head.home / "other")
    (there.parent / "outside.json").write_text("{}")
    changed = (there / "secrets.txt").stat().st_mtime_ns
    names = [one["name"] for one in json.loads(head.client._ask(f"{FILES_PATH}?model={REPOSITORY}", 2**20)[0])["files"]]
    assert set(names) == OWN
    for path in (f"{FILES_PATH}?model={head.home / 'other'}", f"{FILES_PATH}?model=demo", f"{PIECE_PATH}?model=demo"):
        with pytest.raises(HeadRefused, match="the head serves no model"):
            head.client._ask(path, 2**20)
    asked = {"model": REPOSITORY, "start": 0, "changed_ns": changed}
    for name in ("secrets.txt", ".hidden.json", "../outside.json", "/etc/config.json", "a/../config.json"):
        with pytest.raises(HeadRefused, match="is no piece of a model"):
            head.client._ask(f"{PIECE_PATH}?{urlencode({**asked, 'file': name})}", 2**20)
    for fields, said in (
        ({**asked, "file": "config.json", "start": -1}, "is no piece of a model"),
        ({**asked, "file": "none.json"}, "none.json cannot be read on the head"),
        ({"model": REPOSITORY, "file": "config.json"}, "has no 'start'"),
        ({**asked, "file": "config.json", "start": "x"}, "invalid literal"),
    ):
        with pytest.raises(HeadRefused, match=said):
            head.client._ask(f"{PIECE_PATH}?{urlencode(fields)}", 2**20)

"""Where API keys come from, what is wrong with them, and what a request becomes under one."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from deployments.http.api_keys import ApiKeysError, KeyIdentity, KeyLimits, KeyRing, read_api_keys
from deployments.http.config import HttpConfig
from deployments.requests import ChatRequest

VARIABLE = "ORCHARD_TEST_KEYS"


def hash_of(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def entry(key: str = "one", name: str = "ann", **fields: Any) -> dict[str, Any]:
    return {"hash": hash_of(key), "name": name, **fields}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """write(what is in the file, mode): its path."""

    def write(content: Any, mode: int = 0o600) -> str:
        path = tmp_path / "keys.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        path.chmod(mode)
        return str(path)

    return write


def read(**config: Any) -> KeyRing:
    return read_api_keys(HttpConfig(**config))


def found(keys: KeyRing, key: str) -> KeyIdentity:
    identity = keys.find(key)
    assert identity is not None
    return identity


# --- where keys come from --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dump", [yaml.safe_dump, json.dumps], ids=["yaml", "json"])
def test_key_file_gives_each_key_its_tenant_client_and_limits(write: Any, dump: Callable[[Any], str]):
    limits: dict[str, Any] = {"max_requests_per_minute": 5, "max_tokens_per_minute": 700, "max_rows": 3}
    entries = [entry(tenant="acme", client="team", **limits), entry("two", "bob", is_administrative=True)]
    keys = read(api_keys_file=write(dump(entries)))
    assert found(keys, "one") == KeyIdentity("ann", "acme", "team", False, KeyLimits(5, 700, 3))
    assert found(keys, "two") == KeyIdentity("bob", "", "bob", True)
    assert keys.find("three") is None


def test_plain_keys_of_the_environment_variable_are_administrative(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "first, second\n")
    keys = read(api_keys_env=VARIABLE)
    assert found(keys, "second") == KeyIdentity(f"{VARIABLE}[1]", is_administrative=True)
    assert keys.find("first, second") is None
    assert "first" not in repr(vars(keys)), "the plain text is dropped"


def test_hashes_of_the_configuration_stay_administrative_and_unlimited():
    identity = found(read(api_keys=[hash_of("one")]), "one")
    assert identity == KeyIdentity("api_keys[0]", is_administrative=True)
    assert not identity.limits


def test_keys_of_config_file_and_environment_are_valid_together(write: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "env")
    keys = read(api_keys=[hash_of("bare")], api_keys_file=write([entry("file")]), api_keys_env=VARIABLE)
    assert len(keys) == 3
    assert [found(keys, key).name for key in ("bare", "file", "env")] == ["api_keys[0]", "ann", f"{VARIABLE}[0]"]


def test_empty_key_is_never_found(write: Any):
    assert read(api_keys_file=write([entry("")])).find("") is None, "somebody hashed an empty variable"


# --- what is refused at the start ------------------------------------------------------------------------------------

WRONG_FILES = {
    "empty": ("", "the file: expected a list of keys"),
    "no keys": ("[]", "contains no keys"),
    "mapping": ("{hash: x}", "the file: expected a list of keys, each with `hash` and `name`"),
    "no yaml": ("- {hash: plainsecret\n- x: [", "is not valid YAML in line"),
    "python object": ("- !!python/name:os.system", "is not valid YAML in line 1"),
    "control character": ("- \x01", "is not valid YAML"),
    "plain key": ([{"hash": "plainsecret", "name": "a"}], "[0].hash: String should match pattern"),
    "no name": ([{"hash": hash_of("a")}], "[0].name: is missing"),
    "name with a line break": ([entry(name="a\nb")], "[0].name: String should match pattern"),
    "unknown field": ([entry(max_row=1)], "[0].max_row: unknown field; the fields are hash, name, tenant"),
    "no requests": ([entry(), entry("b", "b", max_rows=0)], "[1].max_rows: Input should be greater than"),
    "the same hash": ([entry(), entry(name="bob")], "[1] has the same hash as http.api_keys_file"),
    "the same name": ([entry(), entry("two")], '[1] has the same name "ann" as http.api_keys_file'),
}


@pytest.mark.parametrize(("content", "said"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_a_mistake_in_the_file_is_named_and_not_quoted(write: Any, content: Any, said: str):
    path = write(content)
    with pytest.raises(ApiKeysError) as error:
        read(api_keys_file=path)
    assert error.value.message.startswith(f"http.api_keys_file: {path}")
    assert said in error.value.message and "plainsecret" not in error.value.message


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o602, 0o601])
def test_key_file_accessible_to_other_users_is_refused_with_its_mode(write: Any, mode: int):
    with pytest.raises(ApiKeysError, match=rf"keys\.yaml has the mode {mode:04o}.*ssh.*chmod 600"):
        read(api_keys_file=write([entry()], mode))


def test_the_mode_is_that_of_the_file_behind_a_link(write: Any, tmp_path: Path):
    link = tmp_path / "link"
    link.symlink_to(write([entry()], 0o644))
    with pytest.raises(ApiKeysError, match="mode 0644"):
        read(api_keys_file=str(link))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(ApiKeysError, match=r"http\.api_keys_file: /.*/nothing does not exist"):
        read(api_keys_file=str(tmp_path / "nothing"))
    with pytest.raises(ApiKeysError, match="cannot be read: Is a directory"):
        read(api_keys_file=str(tmp_path))
    (tmp_path / "latin").write_bytes(b"- \xff")
    (tmp_path / "latin").chmod(0o600)
    with pytest.raises(ApiKeysError, match="is not UTF-8"):
        read(api_keys_file=str(tmp_path / "latin"))


@pytest.mark.parametrize("config", [{"api_keys_file": "keys.yaml"}, {"api_keys_file": ""}, {"api_keys_env": "A-B"}])
def test_invalid_key_file_path_or_variable_name_is_refused_by_the_configuration(config: dict[str, str]):
    with pytest.raises(ValueError, match=r"api_keys_\w+\n  String should match pattern"):
        HttpConfig(**config)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "is not set"),
        ("", "key 1 is empty"),
        ("secret,,secret2", "key 2 is empty"),
        ("secret,", "key 2 is empty"),
        ("sec ret", "key 1 has characters"),
        ("secret,sécret", "key 2 has characters"),
        ("secret,secret", "key 2 has the same hash as"),
    ],
)
def test_a_mistake_in_the_variable_is_named_and_not_quoted(
    monkeypatch: pytest.MonkeyPatch, value: str | None, said: str
):
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ApiKeysError) as error:
        read(api_keys_env=VARIABLE)
    assert error.value.message.startswith(f"http.api_keys_env: the environment variable {VARIABLE}")
    assert said in error.value.message and "secret" not in error.value.message


def test_key_configured_in_two_places_is_refused(write: Any):
    with pytest.raises(ApiKeysError, match=r"keys\.yaml: \[0\] has the same hash as http\.api_keys\[0\]"):
        read(api_keys=[hash_of("one")], api_keys_file=write([entry()]))


# --- what a request becomes ------------------------------------------------------------------------------------------


def applied(identity: KeyIdentity, tenant: str = "", client: str = "") -> tuple[str, str]:
    request = identity.apply(ChatRequest("id", [{"role": "user", "content": "Hi"}], tenant=tenant, client=client))
    return request.tenant, request.client


def test_keys_share_a_prefix_cache_only_within_a_tenant():
    one, two, other, without = (
        KeyIdentity(name, tenant, name) for name, tenant in (("a", "acme"), ("b", "acme"), ("c", "apex"), ("d", ""))
    )
    assert applied(one)[0] == applied(two)[0]
    assert applied(one, "salt")[0] == applied(two, "salt")[0] != applied(one)[0]
    assert len({applied(key, salt)[0] for key in (one, other, without) for salt in ("", "salt")}) == 6
    assert applied(without)[0] == "", "the cache of requests without a tenant, in which pinned prompts are"


@given(st.text(max_size=6), st.text(max_size=6), st.text(max_size=6), st.text(max_size=6))
def test_salts_and_users_of_different_keys_never_coincide(own: str, salt: str, other: str, other_salt: str):
    mine = applied(KeyIdentity("a", own, own), salt, salt)
    theirs = applied(KeyIdentity("b", other, other), other_salt, other_salt)
    assert (mine == theirs) == ((own, salt) == (other, other_salt))


def test_cache_salt_cannot_forge_the_cache_of_another_tenant():
    acme, without = KeyIdentity("a", "acme"), KeyIdentity("b")
    for salt in ("", "salt"):
        forged = applied(acme, salt)[0]
        assert applied(without, forged)[0] != forged


def test_request_keeps_its_salt_and_user_on_a_server_without_keys():
    assert applied(KeyIdentity(""), "salt", "ann") == ("salt", "ann")


def test_an_identity_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        KeyIdentity("a").tenant = "b"  # pyright: ignore[reportAttributeAccessIssue]

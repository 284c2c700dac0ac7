"""The page at /: what is served to whom, with which headers, and how large it is."""

import gzip
import re
from typing import Any

import pytest

from deployments.http.access import PAGE_FILES
from deployments.http.web_page import CONTENT_SECURITY_POLICY, FOLDER, INDEX, TYPES, read_files

MAX_TOTAL_BYTES = 70_000
"""Limit of all files together, compressed and without the licences."""
KEYED = {"api_keys": ["sha256:" + "0" * 64]}
FILES = read_files()


def path_of(name: str) -> str:
    return "/" if name == INDEX else PAGE_FILES + name


BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


@pytest.mark.parametrize("config", [{}, KEYED], ids=["without keys", "with keys"])
@pytest.mark.parametrize("accept", ["*/*", "application/json", ""])
def test_programs_find_a_greeting_where_browsers_find_the_page(send: Any, make_app: Any, config: Any, accept: str):
    app = make_app(**config)
    for method in ("GET", "HEAD"):
        answer = send(method, "/", app=app, headers={"Accept": accept})
        assert answer.status_code == 200 and answer.headers["content-type"] == "text/plain; charset=utf-8"
        assert answer.headers["vary"] == "Accept"
    assert send("GET", "/", app=app, headers={"Accept": accept}).text == "Ollama is running"
    assert send("GET", "/", app=app, headers=BROWSER).headers["vary"] == "Accept-Encoding, Accept"


@pytest.mark.parametrize("config", [{}, KEYED], ids=["without keys", "with keys"])
def test_the_page_and_all_its_files_need_no_key(send: Any, make_app: Any, config: Any):
    app = make_app(**config)
    for name, file in FILES.items():
        answer = send("GET", path_of(name), app=app, headers=BROWSER)
        assert (answer.status_code, answer.content) == (200, file.body), name
        assert answer.headers["content-type"] == TYPES["." + name.rpartition(".")[2]]
        assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-dns-prefetch-control"] == "off"


def test_with_keys_only_the_page_is_open(send: Any, make_app: Any):
    app = make_app(**KEYED)
    for method, path in (("POST", "/"), ("GET", "/v1/status/stream"), ("GET", "/pages"), ("DELETE", "/page/main.js")):
        assert send(method, path, app=app).status_code == 401, path


def test_the_page_is_read_only_and_has_no_other_files(send: Any):
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for path in ("/", "/page/main.js"):
            answer = send(method, path)
            assert answer.status_code == 405 and set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}
    etags = {send(method, "/", headers=BROWSER).headers["etag"] for method in ("HEAD", "GET")}
    assert len(etags) == 1
    for name in (
        "nothing.js",
        INDEX,
        "screenshot.png",
        "vendor/README.md",
        "../web_page.py",
        "%2e%2e/app.py",
        "",
        "vendor",
    ):
        assert send("GET", PAGE_FILES + name).status_code == 404, name


def test_a_foreign_host_or_origin_is_refused(send: Any, make_app: Any):
    for headers, code in (({"Host": "evil.example"}, "host"), ({"Origin": "http://evil.example"}, "origin")):
        for path in ("/", "/page/main.js", "/v1/status/stream"):
            refused = send("GET", path, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, f"{code}_not_allowed")


def test_a_known_file_is_not_sent_again(send: Any):
    for encoding in ("identity", "gzip"):
        first = send("GET", "/", headers={**BROWSER, "Accept-Encoding": encoding})
        etag = first.headers["etag"]
        for known in (etag, f"W/{etag}", f'"other", {etag}'):
            again = send("GET", "/", headers={**BROWSER, "Accept-Encoding": encoding, "If-None-Match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
            assert again.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert send("GET", "/", headers={**BROWSER, "If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "accepted, is_gzipped",
    [("gzip", True), ("br, GZIP;q=0.5", True), ("identity", False), ("gzip;q=0", False), ("gzip; q=0.000", False)],
)
def test_files_are_compressed_for_browsers_that_accept_it(send: Any, accepted: str, is_gzipped: bool):
    answer = send("GET", "/page/main.js", headers={"Accept-Encoding": accepted})
    assert answer.headers.get("content-encoding") == ("gzip" if is_gzipped else None)
    assert answer.headers["vary"] == "Accept-Encoding"
    assert answer.content == FILES["main.js"].body  # the client has decompressed it


def test_all_files_together_are_small():
    sizes = {name: len(gzip.compress(file.body)) for name, file in FILES.items() if not name.endswith("LICENSE.txt")}
    assert sum(sizes.values()) <= MAX_TOTAL_BYTES, sizes


def test_every_library_has_its_licence_and_a_row_with_its_version():
    told = (FOLDER / "vendor" / "README.md").read_text()
    libraries = [path for path in (FOLDER / "vendor").iterdir() if path.suffix in (".js", ".css")]
    assert len(libraries) >= 2
    for path in libraries:
        assert path.with_suffix(".LICENSE.txt").read_text().count("\n") >= 10
        row = next(line for line in told.splitlines() if f"`{path.name}`" in line)
        [version] = re.findall(r"\d+\.\d+\.\d+", row)
        assert version in path.read_text()[:300]


def test_the_page_has_nothing_from_elsewhere_and_no_inline_code():
    index = FILES[INDEX].body.decode()
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", index)
    for name, file in FILES.items():
        if name.startswith("vendor/") or not name.endswith((".js", ".html", ".css")):
            continue
        text = file.body.decode().replace('"http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?://\w|url\(", text), name
        for path in re.findall(r'(?:src|href)="([^"#]+)"', text) if name == INDEX else ():
            assert path.removeprefix("page/") in FILES, path
        for path in re.findall(r'from "\./([^"]+)"', text):
            assert path in FILES, (name, path)


def test_the_policy_allows_only_the_server_itself():
    assert "unsafe" not in CONTENT_SECURITY_POLICY and "*" not in CONTENT_SECURITY_POLICY
    assert CONTENT_SECURITY_POLICY.startswith("default-src 'self'; ")

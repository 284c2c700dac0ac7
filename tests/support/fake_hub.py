"""FakeHub: the part of the hub's HTTP API that a download uses, over directories, on loopback."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves each directory of `repositories` under its name.

    Attributes:
        repositories: Name of a repository, such as `org/model`, to its directory.
        sent: Path of each file, and the first byte from which it was sent.
        breaks_after: Bytes after which the next file of more than these breaks off, once; None: it does not.
    """

    def __init__(self, repositories: dict[str, Path]):
        self.repositories = repositories
        self.sent: list[tuple[str, int]] = []
        self.breaks_after: int | None = None
        hub = self

        class Handler(_Handler):
            fake = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FakeHub":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    fake: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def _answer(self, is_head: bool) -> None:
        path = self.path.partition("?")[0]
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/[^/]+)?/?", path):
            if (folder := self.fake.repositories.get(found[1])) is not None:
                files = sorted(file for file in folder.iterdir() if file.is_file())
                return self._json(self._tree(files) if found[2] == "tree" else self._info(found[1], files))
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            folder = self.fake.repositories.get(found[1])
            if folder is not None and (folder / found[2]).is_file():
                return self._file(folder / found[2], is_head)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _info(self, name: str, files: list[Path]) -> dict[str, Any]:
        siblings = [{"rfilename": file.name, "size": file.stat().st_size} for file in files]
        return {"_id": "1", "id": name, "modelId": name, "sha": COMMIT, "private": False, "siblings": siblings}

    def _tree(self, files: list[Path]) -> list[dict[str, Any]]:
        return [{"type": "file", "path": one.name, "size": one.stat().st_size, "oid": _etag(one)} for one in files]

    def _json(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _file(self, path: Path, is_head: bool) -> None:
        content = path.read_bytes()
        range_ = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(range_[1]) if range_ else 0
        self.send_response(206 if range_ else 200)
        self.send_header("ETag", f'"{_etag(path)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        if range_:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - first))
        self.end_headers()
        if is_head:
            return
        self.fake.sent.append((path.name, first))
        limit = self.fake.breaks_after
        if limit is not None and len(content) > limit:
            self.fake.breaks_after = None
            self.wfile.write(content[first:limit])
            self.close_connection = True
            return
        self.wfile.write(content[first:])

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def _etag(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

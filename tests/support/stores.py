"""A web server and a model hub for tests, which fail as requested."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class FileServer:
    """Files by path, with ETags and ranges, and a model hub.

    Attributes:
        repositories: files by commit by name; ``refs`` has the commit of each revision.
        failures: responses for the next requests whose path contains the key: a status, or ``cut`` after half of the
            body.
        retry_after: header of failures.
        hangs: set to keep all requests waiting.
        ranges: the requested ranges.
        has_ranges: false to answer each request with the complete file.
        damaged: replaces the content of large files.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    refs: dict[tuple[str, str], str] = field(default_factory=dict)
    failures: dict[str, list[int | str]] = field(default_factory=dict)
    retry_after: str | None = None
    token: str = ""
    hangs: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    requests: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    has_ranges: bool = True
    damaged: bytes | None = None

    def publish(self, repository: str, files: dict[str, bytes], revision: str = "main") -> str:
        """Add a commit and let a revision name it; return the commit."""
        commit = hashlib.sha1(repr((repository, sorted(files.items()))).encode()).hexdigest()
        self.repositories.setdefault(repository, {})[commit] = files
        self.refs[repository, revision] = self.refs[repository, commit] = commit
        return commit


@contextmanager
def file_server(port: int = 0) -> Iterator[FileServer]:
    """Run a server on the loopback interface until the block ends."""
    state = FileServer()

    class Handler(_Handler):
        server_state = state

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        server.daemon_threads = True
        state.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield state
        finally:
            state.released.set()
            server.shutdown()
            thread.join()


def _is_lfs(path: str) -> bool:
    return path.endswith((".bin", ".gguf", ".onnx"))


class _Handler(BaseHTTPRequestHandler):
    server_state: FileServer
    protocol_version = "HTTP/1.1"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        state, url = self.server_state, urlsplit(self.path)
        path = unquote(url.path)
        state.requests.append(f"{self.command} {path}")
        if state.hangs.is_set():
            state.released.wait()
            self.close_connection = True
            return
        key = next((key for key, left in state.failures.items() if key in path and left), None)
        failure = (
            None
            if key is None or (self.command == "HEAD" and state.failures[key][0] == "cut")
            else state.failures[key].pop(0)
        )
        if isinstance(failure, int):
            self._send(failure, b"", {} if state.retry_after is None else {"retry-after": state.retry_after})
        elif state.token and path.startswith("/api") and self.headers.get("authorization") != f"Bearer {state.token}":
            self._send(401, b"")
        elif found := re.fullmatch(r"/api/models/(.+?)(?:/revision/(.+))?", path):
            self._info(found[1], found[2] or "main")
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(found[1], found[2], found[3], cut=failure == "cut")
        elif path in state.files:
            self._file(state.files[path], {}, cut=failure == "cut")
        else:
            self._send(404, b"")

    def _info(self, repository: str, revision: str) -> None:
        state = self.server_state
        commit = state.refs.get((repository, revision))
        if commit is None:
            what = "RepoNotFound" if repository not in state.repositories else "RevisionNotFound"
            self._send(404, b"", {"x-error-code": what, "x-error-message": "not found"})
            return
        peers = []
        for path, content in state.repositories[repository][commit].items():
            row: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": _blob_id(content)}
            if _is_lfs(path):
                row["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            peers.append(row)
        body = {
            "id": repository,
            "modelId": repository,
            "sha": commit,
            "siblings": peers,
            "tags": [],
            "private": False,
        }
        self._send(200, json.dumps(body).encode(), {"content-type": "application/json"})

    def _resolve(self, repository: str, revision: str, path: str, *, cut: bool) -> None:
        state = self.server_state
        commit = state.refs.get((repository, revision), "")
        content = state.repositories.get(repository, {}).get(commit, {}).get(path)
        if content is None:
            self._send(404, b"", {"x-error-code": "EntryNotFound"})
        elif _is_lfs(path):
            sha = hashlib.sha256(content).hexdigest()
            state.files[f"/lfs/{sha}"] = content if state.damaged is None else state.damaged
            headers = {
                "location": f"{state.url.replace('127.0.0.1', 'localhost')}/lfs/{sha}?X-Amz-Signature=secret",
                "x-repo-commit": commit,
                "x-linked-etag": f'"{sha}"',
                "x-linked-size": str(len(content)),
            }
            self._send(302, b"", headers)
        else:
            self._file(content, {"x-repo-commit": commit, "etag": f'"{_blob_id(content)}"'}, cut=cut)

    def _file(self, content: bytes, headers: dict[str, str], *, cut: bool) -> None:
        headers = {
            "etag": f'"{hashlib.md5(content).hexdigest()}"',
            "accept-ranges": "bytes",
            "last-modified": formatdate(0, usegmt=True),
            **headers,
        }
        start, wanted = 0, self.headers.get("range", "")
        matches = self.server_state.has_ranges and self.headers.get("if-range") in {None, headers["etag"]}
        if wanted and matches and (found := re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)):
            self.server_state.ranges.append(wanted)
            start = int(found[1])
            if start >= len(content):
                self._send(416, b"")
                return
            headers["content-range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        self._send(206 if "content-range" in headers else 200, body, headers, sent=len(body) // 2 if cut else None)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if sent is None else body[:sent])
        if sent is not None:
            self.close_connection = True


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

"""A stand-in of the hub on this machine: what `huggingface_hub` asks by HTTP to read a repository."""

import contextlib
import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator, Mapping

Files = Mapping[str, bytes]


class Hub:
    """Repositories, and who asked for what.

    Attributes:
      url: address, for HF_ENDPOINT.
      gated: names whose files only a request with a token gets.
      asked: "METHOD path" of every request, oldest first.
    """

    def __init__(self) -> None:
        self.url = ""
        self.gated: set[str] = set()
        self.asked: list[str] = []
        self._refs: dict[str, dict[str, str]] = {}
        self._commits: dict[str, dict[str, Files]] = {}

    def push(self, name: str, files: Files, *refs: str) -> str:
        """Adds a commit to `main` and other refs, and returns its hash."""
        commits = self._commits.setdefault(name, {})
        commit = hashlib.sha1(f"{name} {len(commits)}".encode()).hexdigest()
        commits[commit] = dict(files)
        self._refs.setdefault(name, {}).update(dict.fromkeys(("main", *refs), commit))
        return commit

    def fetched(self) -> list[str]:
        """Returns the names of the files that were asked for, sorted."""
        asked = (line for line in self.asked if line.startswith("GET /") and "/resolve/" in line)
        return sorted({line.rpartition("/")[2] for line in asked})

    def answer(self, path: str, has_token: bool) -> tuple[int, dict[str, str], bytes]:
        """Returns status, headers and body."""
        parts = urllib.parse.unquote(urllib.parse.urlsplit(path).path).strip("/").split("/")
        is_api = parts[0] == "api"
        parts = parts[2:] if is_api else parts[parts[0] == "datasets" :]
        name = "/".join(parts[:2])
        if name not in self._refs:
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        what, revision = parts[2:4] if len(parts) > 3 else ("revision", "main")
        commit = self._refs[name].get(revision, revision)
        files = self._commits[name].get(commit)
        if files is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if is_api:
            entries = [
                {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for file, content in files.items()
            ]
            return 200, {}, json.dumps(entries if what == "tree" else {"id": name, "sha": commit}).encode()
        if name in self.gated and not has_token:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        content = files.get("/".join(parts[4:]))
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}, content


@contextlib.contextmanager
def running() -> Iterator[Hub]:
    """Serves an empty hub until the context ends."""
    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            status, headers, body = hub.answer(self.path, "Authorization" in self.headers)
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield hub
        finally:
            server.shutdown()

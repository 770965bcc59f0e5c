"""A local server that speaks the part of the Hugging Face Hub's protocol with which `datasets` reads a dataset."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serving(name: str, files: dict[str, bytes]) -> Iterator[str]:
    """Serve the dataset `name` with `files`, and return the address for HF_ENDPOINT. All other datasets are missing."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(name, files))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _list(files: dict[str, bytes], folder: str) -> list[dict[str, object]]:
    """Return the entries of a folder; the root is an empty string."""
    entries: dict[str, dict[str, object]] = {}
    for path, content in files.items():
        if path.startswith(f"{folder}/" if folder else ""):
            first, _, inside = path.removeprefix(folder).lstrip("/").partition("/")
            where, oid = f"{folder}/{first}".lstrip("/"), hashlib.sha1(content).hexdigest()
            kind = {"type": "directory"} if inside else {"type": "file", "size": len(content)}
            entries[where] = {"path": where, "oid": oid, **kind}
    return list(entries.values())


def _handler(name: str, files: dict[str, bytes]) -> type[BaseHTTPRequestHandler]:
    info = {"id": name, "sha": COMMIT, "private": False, "gated": False, "tags": [], "siblings": []}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.respond()

        def do_HEAD(self) -> None:
            self.respond()

        def respond(self) -> None:
            path = self.path.partition("?")[0]
            if match := re.fullmatch(rf"/datasets/{name}/resolve/\w+/(.+)", path):
                self.send_file(files.get(match[1]))
            elif re.fullmatch(rf"/api/datasets/{name}(/revision/\w+)?", path):
                self.send(200, json.dumps(info).encode())
            elif (match := re.fullmatch(rf"/api/datasets/{name}/tree/{COMMIT}/?(.*)", path)) and _list(files, match[1]):
                self.send(200, json.dumps(_list(files, match[1])).encode())
            else:
                is_known = path.startswith((f"/datasets/{name}/", f"/api/datasets/{name}/"))
                self.send(404, b"", {"X-Error-Code": "EntryNotFound" if is_known else "RepoNotFound"})

        def send_file(self, content: bytes | None) -> None:
            if content is None:
                self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Accept-Ranges": "bytes"}
            if part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                first, last = int(part[1]), min(int(part[2] or len(content)), len(content) - 1)
                headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
                self.send(206, content[first : last + 1], headers)
            else:
                self.send(200, content, headers)

        def send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in {"X-Repo-Commit": COMMIT, "Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    return Handler

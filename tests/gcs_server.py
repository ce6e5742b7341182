"""Google Cloud Storage for tests: the part of its JSON API that the clients of a training run use, in memory.

Conditional writes hold as they do there, because locks and TensorStore's databases rely on them. Faults are set from
outside: which tokens are let in, whether writing is allowed, what the next writes end with.
https://cloud.google.com/storage/docs/json_api/v1
"""

import base64
import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, quote, unquote, urlsplit

TOKEN = "a-token-for-tests"


@dataclass
class Stored:
    data: bytes
    generation: int
    time: float


@dataclass
class Faults:
    """What goes wrong, for the test to change."""

    tokens: frozenset[str] | None = None
    """Who is let in; None is everybody."""
    read_only: bool = False
    status_of_writes: int | None = None
    """HTTP status of every write to an object whose name contains `where`."""
    where: str = ""


@dataclass
class Cloud:
    """The buckets. `lock` guards them: requests come in threads."""

    buckets: dict[str, dict[str, Stored]]
    faults: Faults = field(default_factory=Faults)
    lock: threading.RLock = field(default_factory=threading.RLock)
    sessions: dict[str, tuple[str, str, dict[str, str], bytearray]] = field(default_factory=dict)
    generation: int = 0

    def put(self, bucket: str, name: str, data: bytes, query: dict[str, str]) -> Stored:
        with self.lock:
            objects = self.objects(bucket)
            if self.faults.read_only:
                raise RefusedError(403, "the caller does not have storage.objects.create access")
            if self.faults.status_of_writes and self.faults.where in name:
                raise RefusedError(self.faults.status_of_writes, "as the test wants")
            self.check(objects.get(name), query)
            self.generation += 1
            objects[name] = Stored(data, self.generation, time.time())
            return objects[name]

    def get(self, bucket: str, name: str) -> Stored:
        with self.lock:
            found = self.objects(bucket).get(name)
            if found is None:
                raise RefusedError(404, f"No such object: {bucket}/{name}")
            return found

    def delete(self, bucket: str, name: str, query: dict[str, str]) -> None:
        with self.lock:
            found = self.get(bucket, name)
            if self.faults.read_only:
                raise RefusedError(403, "the caller does not have storage.objects.delete access")
            self.check(found, query)
            del self.objects(bucket)[name]

    def objects(self, bucket: str) -> dict[str, Stored]:
        if bucket not in self.buckets:
            raise RefusedError(404, "The specified bucket does not exist.")
        return self.buckets[bucket]

    def check(self, found: Stored | None, query: dict[str, str]) -> None:
        wanted = query.get("ifGenerationMatch")
        if wanted is not None and int(wanted) != (found.generation if found else 0):
            raise RefusedError(412, "At least one of the pre-conditions you specified did not hold.")


class RefusedError(Exception):
    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Server:
    """Serves on a free port of this machine until the `with` ends."""

    def __init__(self, *buckets: str, port: int = 0):
        self.cloud = Cloud({bucket: {} for bucket in buckets})
        handler = type("Handler", (_Handler,), {"cloud": self.cloud})
        self._server = _Quiet(("127.0.0.1", port), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def environment(self) -> dict[str, str]:
        """What leads TensorStore, fsspec and Google's library here instead of to Google."""
        address = f"http://127.0.0.1:{self._server.server_port}"
        return {
            "STORAGE_EMULATOR_HOST": address,
            "TENSORSTORE_GCS_HTTP_URL": address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": TOKEN,
            "NO_GCE_CHECK": "true",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # would ask Google itself what kind of bucket this is
        }

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are no trouble; whatever else goes wrong here, they will hear and say."""


class _Handler(BaseHTTPRequestHandler):
    cloud: Cloud
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # headers and body in one packet: two would wait for each other's acknowledgement
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def _serve(self) -> None:
        length = self.headers.get("Content-Length")
        body = self.rfile.read(int(length)) if length else self._chunked()
        try:
            allowed = self.cloud.faults.tokens
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if allowed is not None and token not in allowed:
                raise RefusedError(401, "Request had bad credentials.")
            status, headers, answer = self._route(body)
        except RefusedError as refusal:
            error = {"error": {"code": refusal.status, "message": str(refusal)}}
            status, headers, answer = refusal.status, {"Content-Type": "application/json"}, json.dumps(error).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _chunked(self) -> bytes:
        body = bytearray()
        while self.headers.get("Transfer-Encoding", "") == "chunked":
            size = int(self.rfile.readline().split(b";")[0], 16)
            body += self.rfile.read(size)
            self.rfile.readline()
            if size == 0:
                break
        return bytes(body)

    def _route(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        address = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(address.query, keep_blank_values=True).items()}
        parts = [unquote(part) for part in address.path.split("/b/", 1)[1].split("/")]
        bucket, rest = parts[0], parts[1:]
        if address.path.startswith("/upload/"):
            return self._upload(bucket, query, body)
        if not rest:
            self.cloud.objects(bucket)
            return _json({"kind": "storage#bucket", "name": bucket, "id": bucket, "location": "HERE"})
        if rest == ["o"]:
            return self._list(bucket, query)
        name = rest[1]
        if rest[2:3] == ["rewriteTo"]:
            target_bucket, target = rest[4], rest[6]
            stored = self.cloud.put(target_bucket, target, self.cloud.get(bucket, name).data, query)
            size = str(len(stored.data))
            resource = _resource(target_bucket, target, stored)
            return _json({"done": True, "totalBytesRewritten": size, "objectSize": size, "resource": resource})
        if self.command == "DELETE":
            self.cloud.delete(bucket, name, query)
            return 204, {}, b""
        stored = self.cloud.get(bucket, name)
        if query.get("ifGenerationNotMatch") == str(stored.generation):
            return 304, {}, b""
        self.cloud.check(stored, query)
        if query.get("alt") == "media":
            return self._media(stored)
        return _json(_resource(bucket, name, stored))

    def _media(self, stored: Stored) -> tuple[int, dict[str, str], bytes]:
        headers = {"x-goog-generation": str(stored.generation), "Content-Type": "application/octet-stream"}
        wanted = self.headers.get("Range", "").removeprefix("bytes=")
        if not wanted:
            return 200, headers, stored.data
        first, _, last = wanted.partition("-")
        total = len(stored.data)
        begin = max(0, total - int(last)) if not first else int(first)
        end = total if not first or not last else min(total, int(last) + 1)
        if begin >= total:
            raise RefusedError(416, "The requested range cannot be satisfied.")
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{total}"
        return 206, headers, stored.data[begin:end]

    def _upload(self, bucket: str, query: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        kind = query["uploadType"]
        if "upload_id" in query:
            return self._continue(query["upload_id"], body)
        if kind == "resumable":
            self.cloud.objects(bucket)
            name = query.get("name") or json.loads(body)["name"]
            session = f"{len(self.cloud.sessions)}"
            self.cloud.sessions[session] = (bucket, name, query, bytearray())
            location = f"http://{self.headers['Host']}/upload/storage/v1/b/{quote(bucket)}/o"
            return 200, {"Location": f"{location}?uploadType=resumable&upload_id={session}"}, b""
        if kind == "multipart":
            boundary = self.headers["Content-Type"].split("boundary=")[1].strip("\"'").encode()
            _, described, content, *_ = body.split(b"--" + boundary)
            split = lambda part: part.replace(b"\r\n\r\n", b"\n\n", 1).split(b"\n\n", 1)[1]
            name = json.loads(split(described))["name"]
            data = split(content)
            data = data.removesuffix(b"\n").removesuffix(b"\r")
        else:
            name, data = query["name"], body
        return _json(_resource(bucket, name, self.cloud.put(bucket, name, data, query)))

    def _continue(self, session: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        bucket, name, query, data = self.cloud.sessions[session]
        data += body
        total = self.headers.get("Content-Range", "bytes */0").rpartition("/")[2]
        if total == "*" or len(data) < int(total):
            return 308, {"Range": f"bytes=0-{len(data) - 1}"}, b""
        return _json(_resource(bucket, name, self.cloud.put(bucket, name, bytes(data), query)))

    def _list(self, bucket: str, query: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter") or None
        first, last = query.get("startOffset", ""), query.get("endOffset")
        after, most = query.get("pageToken", ""), int(query.get("maxResults", 1000))
        items, prefixes, token = [], [], None
        with self.cloud.lock:
            for name, stored in sorted(self.cloud.objects(bucket).items()):
                if not name.startswith(prefix) or name < first or (last and name >= last):
                    continue
                rest = name[len(prefix) :]
                folder, folded, _ = rest.partition(delimiter) if delimiter else (rest, "", "")
                shown = prefix + folder + folded
                if shown <= after or (prefixes and shown == prefixes[-1]):
                    continue
                if len(items) + len(prefixes) >= most:
                    token = max([*(item["name"] for item in items), *prefixes])
                    break
                if folded:
                    prefixes.append(shown)
                else:
                    items.append(_resource(bucket, name, stored))
        page: dict[str, Any] = {"kind": "storage#objects", "items": items, "prefixes": prefixes}
        return _json(page | ({"nextPageToken": token} if token else {}))


def _resource(bucket: str, name: str, stored: Stored) -> dict[str, str]:
    moment = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored.time))
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": name,
        "generation": str(stored.generation),
        "metageneration": "1",
        "size": str(len(stored.data)),
        "md5Hash": base64.b64encode(hashlib.md5(stored.data).digest()).decode(),
        "timeCreated": moment,
        "updated": moment,
    }


def _json(answer: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(answer).encode()


if __name__ == "__main__":  # for trials by hand: python tests/gcs_server.py PORT BUCKET …
    import sys

    with Server(*sys.argv[2:], port=int(sys.argv[1])) as server:
        print("".join(f"export {name}={value}\n" for name, value in server.environment.items()), end="", flush=True)
        threading.Event().wait()

"""What servers of this project have in common: answers in threads of their own, for whoever asks for this host."""

import socket
import socketserver
from abc import ABC, abstractmethod
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HERE = ("127.0.0.1", "::1", "localhost")


class LocalServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # somebody who does not read the answer holds nobody up

    def server_bind(self) -> None:
        """Without asking for the host's name, as HTTPServer does: that may take long."""
        socketserver.TCPServer.server_bind(self)
        name, port = self.server_address[:2]
        self.server_name, self.server_port = str(name), int(port)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who goes away in the middle is no error."""


class LocalServer6(LocalServer):
    address_family = socket.AF_INET6


class LocalHandler(ABC, BaseHTTPRequestHandler):
    """Reads no body, writes no log."""

    timeout = 10.0
    """Seconds for a request to come, and for its answer to go."""
    server_version, sys_version = "jaxmnt", ""

    def do_GET(self) -> None:
        self.respond()

    @abstractmethod
    def respond(self) -> None:
        """Answers a request."""

    def log_message(self, *_: Any) -> None:
        """Nothing: the output of the process is not for that."""

    def asks_for_this_host(self) -> bool:
        """Whether the request names this host: a page from elsewhere must not read an answer by another name."""
        name = self.headers.get("Host", "localhost")
        return (name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]) in HERE

    def answer(self, code: HTTPStatus, kind: str, text: str, **headers: str) -> None:
        """`headers` have _ for -."""
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

"""The HTTP server and handler that this project's servers share. Each request is answered in a separate thread."""

import socket
import socketserver
from abc import ABC, abstractmethod
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LOOPBACK_NAMES = ("127.0.0.1", "::1", "localhost")


class LocalServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client that does not read its answer must not block the process

    def server_bind(self) -> None:
        """Binds without HTTPServer's lookup of the host name, which may be slow."""
        socketserver.TCPServer.server_bind(self)
        name, port = self.server_address[:2]
        self.server_name, self.server_port = str(name), int(port)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors, because a client that disconnects is not a problem."""


class LocalServer6(LocalServer):
    address_family = socket.AF_INET6


class LocalHandler(ABC, BaseHTTPRequestHandler):
    """Answers GET requests. Reads no body and writes no log."""

    timeout = 10.0
    """Time limit, in seconds, for receiving a request and for sending its answer."""
    server_version, sys_version = "jaxmnt", ""

    def do_GET(self) -> None:
        self.respond()

    @abstractmethod
    def respond(self) -> None:
        """Answers a request."""

    def log_message(self, *_: Any) -> None:
        """Logs nothing, to keep the process's output clean."""

    def asks_for_this_host(self) -> bool:
        """Returns True if the request's Host header names this host.

        This prevents DNS rebinding, by which a web page from elsewhere could read an answer under another name.
        """
        name = self.headers.get("Host", "localhost")
        return (name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]) in LOOPBACK_NAMES

    def answer(self, code: HTTPStatus, kind: str, text: str, **headers: str) -> None:
        """Sends an answer. The names of `headers` have _ instead of -."""
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

"""Renders many conversations in one sandboxed child process (`sandbox`), which is started again if one kills it."""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from jaxmnt.data.chat.targets import Targets
from jaxmnt.data.chat.template import ChatFormat
from jaxmnt.errors import ConfigError, printable

Message = Mapping[str, Any]

CHECKED_VARIABLES = ("tools", "documents")
"""Fields of a record that templates receive under the same name. If one is given, the text must depend on it."""

TIMEOUT_SECONDS = 60
"""Time after which a child is killed. The limit on its processor time (`sandbox.CPU_SECONDS`) comes first, unless the
machine is overloaded."""

_START_TIMEOUT_SECONDS = 120

_ENVIRONMENT = (
    "PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR",
)  # fmt: skip
"""Variables that the child gets. Others may hold secrets."""

_MAX_EXHAUSTED = 3
"""Number of conversations in a row after which a template that exhausts its process is given up."""

_MAX_ERROR = 300
"""Maximum number of characters of a template's error that a message shows."""


class RenderError(Exception):
    """Raised for a conversation that the template cannot render, or whose targets cannot be found. The text says
    why."""


class Renderer:
    """Renders conversations with the template of a `ChatFormat`. Not thread-safe. Use it as a context manager, which
    ends the child process.

    Raises `ConfigError` if the template cannot be compiled.
    """

    def __init__(self, chat: ChatFormat, date: str | None = None):
        """`date`, such as 2026-01-31, is the date that templates write as today's; None for the real date."""
        self.chat = chat
        self._date = date
        self._child: subprocess.Popen[bytes] | None = None
        self._exhausted = 0
        """Number of conversations in a row that took too much memory or time."""
        self._unread = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        """Standard error of the child."""
        self.words = frozenset(self._start())
        """Names and strings in the code of the template. A field whose name is not among them cannot be rendered."""

    def __enter__(self) -> "Renderer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the child process."""
        self._stop()
        self._errors.close()

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any], begins_turn: bool = True) -> str:
        """Returns the text of a conversation. With `begins_turn`, the text ends with the beginning of the model's next
        turn.

        `variables` are passed to the template in addition to its special tokens. Raises `RenderError` if the template
        cannot render the conversation.
        """
        answer = self._request(messages, variables, {"begins_turn": begins_turn, "is_target": None})
        return str(answer["text"])

    def find_targets(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        is_target: Sequence[bool],
        everything: bool,
        special_tokens: Sequence[str] = (),
    ) -> Targets:
        """Returns the segments of a conversation, of which some are targets (`targets.find_targets`). The template must
        render `CHECKED_VARIABLES` if they are given.

        Raises `RenderError` if the template cannot render the conversation, or if the targets cannot be found exactly.
        """
        details = {
            "is_target": list(is_target), "everything": everything, "end_tokens": self.chat.end_tokens,
            "special_tokens": list(special_tokens),
            "checked_variables": [name for name in CHECKED_VARIABLES if name in variables],
        }  # fmt: skip
        return Targets(**self._request(messages, variables, details))

    def _request(
        self, messages: Sequence[Message], variables: Mapping[str, Any], details: Mapping[str, Any]
    ) -> dict[str, Any]:
        if self._child is None:
            self._start()
        request = {
            "messages": list(messages), "variables": {**self.chat.special_tokens, **variables}, "date": self._date,
            **details,
        }  # fmt: skip
        answer = self._exchange(request, TIMEOUT_SECONDS)
        self._exhausted = self._exhausted + 1 if answer is None else 0
        if self._exhausted == _MAX_EXHAUSTED:
            raise ConfigError(
                f"--chat-template: {self.chat.source} took too much memory or time for {_MAX_EXHAUSTED} conversations "
                "in a row, so it may never end; use another template"
            )
        if answer is None:
            raise RenderError("the chat template took too much memory or time for this conversation, and may never end")
        if "error" in answer:
            reason = printable(str(answer["error"])[:_MAX_ERROR])
            raise RenderError(
                f"the chat template cannot render this conversation: {reason}" if answer["by_template"] else reason
            )
        return answer

    def _start(self) -> list[str]:
        """Starts the child, and returns the words of the template."""
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "jaxmnt.data.chat.sandbox"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            env=environment | {"PYTHONIOENCODING": "utf-8"},
        )  # fmt: skip
        self._unread = b""
        answer = self._exchange({"template": self.chat.template}, _START_TIMEOUT_SECONDS)
        if answer is None:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            reason = printable(lines[-1][:_MAX_ERROR]) if lines else "it took too much memory or time"
            raise ConfigError(f"--chat-template: {self.chat.source} cannot be compiled: {reason}")
        if "error" in answer:
            self._stop()
            reason = printable(str(answer["error"])[:_MAX_ERROR])
            raise ConfigError(f"--chat-template: {self.chat.source} cannot be used: {reason}")
        return list(answer["words"])

    def _exchange(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any] | None:
        """Returns the child's answer to a request. Returns None, and kills the child, if there is none in time."""
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        line = json.dumps(request, ensure_ascii=False).encode() + b"\n"
        deadline = time.monotonic() + timeout
        try:
            child.stdin.write(line)
            child.stdin.flush()
            while b"\n" not in self._unread:
                readable, _, _ = select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))
                block = os.read(child.stdout.fileno(), 1 << 16) if readable else b""
                if not block:
                    self._stop()
                    return None
                self._unread += block
        except BrokenPipeError:
            self._stop()
            return None
        answer, _, self._unread = self._unread.partition(b"\n")
        result: dict[str, Any] = json.loads(answer)
        return result

    def _stop(self) -> None:
        """Ends the child process."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):  # it may hold a request that the child has not read
                stream.close()

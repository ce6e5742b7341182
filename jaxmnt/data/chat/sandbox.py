"""python -m jaxmnt.data.chat.sandbox: renders conversations with a chat template, which is untrusted code.

The template runs in Jinja's sandbox, which denies access to Python objects, and in this process, whose memory and time
are limited. The process reads JSON objects from standard input, a line each, and answers each with a line. The first
object has the template.
"""

import datetime
import json
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jaxmnt.data.chat.targets import GENERATION_BEGIN, GENERATION_END, MARK, TargetsError, find_targets
from jaxmnt.errors import how_to_install

CPU_SECONDS = 10
"""Processor time after which the process is killed if a conversation is not rendered."""

_MAX_MEMORY_BYTES = 1 << 30
_MAX_TEXT_BYTES = 16 << 20


class _RefusedError(Exception):
    """Raised for a request that cannot be answered. The text says why."""


class _Template:
    """A compiled template."""

    def __init__(self, template: str):
        try:
            from jinja2 import TemplateError, nodes
            from jinja2.ext import Extension, loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise _RefusedError(f"this needs the jinja2 library; {how_to_install('data')}") from error
        if MARK.search(template):
            raise _RefusedError("it contains characters for private use from U+F0000 on; remove them")
        template_self = self

        class Generation(Extension):
            """Renders `{% generation %}` blocks, with marks around them while `mark_generated` is set."""

            tags = frozenset({"generation"})

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

            def _rendered(self, caller: Any) -> str:
                text: str = caller()
                return f"{GENERATION_BEGIN}{text}{GENERATION_END}" if template_self.mark_generated else text

        def raise_exception(message: str) -> NoReturn:
            raise TemplateError(message)

        self.mark_generated = False
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
        )
        environment.filters["tojson"] = _to_json
        # A template with these would not always make the same text of a conversation.
        del environment.filters["random"], environment.globals["lipsum"]
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = self._format_date
        self._date: str | None = None
        try:
            # Names and strings in the code, by which the template reads the fields of messages.
            self.words = sorted(
                {text.strip("'\"") for _, kind, text in environment.lex(template) if kind in ("name", "string")}
            )
            self._compiled = environment.from_string(template)
        except Exception as error:  # a template may raise anything
            raise _RefusedError(_describe(error)) from error

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], begins_turn: bool) -> str:
        all_variables = {
            "tools": None, "documents": None, **variables,
            "messages": list(messages), "add_generation_prompt": begins_turn,
        }  # fmt: skip
        try:
            text: str = self._compiled.render(all_variables)
            size = len(text.encode())
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything
            raise _RefusedError(_describe(error)) from error
        if size > _MAX_TEXT_BYTES:
            raise _RefusedError(f"its text has {size} bytes, but at most {_MAX_TEXT_BYTES} are allowed")
        return text

    def set_date(self, date: str | None) -> None:
        """Sets the date that the template may write; None for today."""
        self._date = date

    def _format_date(self, form: str) -> str:
        now = datetime.datetime.now() if self._date is None else datetime.datetime.fromisoformat(self._date)
        return now.strftime(form)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Writes JSON as transformers does for templates."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _describe(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _answer(template: _Template, line: str) -> dict[str, Any]:
    """Answers a request: the text of a conversation, or its segments if the request has targets."""
    request = json.loads(line)
    messages, variables = request["messages"], request["variables"]
    template.set_date(request["date"])
    if request["is_target"] is None:
        template.mark_generated = False
        return {"text": template.render(messages, variables, request["begins_turn"])}
    if MARK.search(line):
        raise _RefusedError("it contains characters for private use from U+F0000 on; remove them")
    template.mark_generated = True
    render = lambda shown, begins_turn: template.render(shown, variables, begins_turn)
    for name in request["checked_variables"]:
        without = {key: entry for key, entry in variables.items() if key != name}
        if template.render(messages, without, begins_turn=False) == render(messages, False):
            raise TargetsError(f"the chat template does not render {name}")
    targets = find_targets(
        render, messages, request["is_target"], request["end_tokens"], request["special_tokens"],
        everything=request["everything"],
    )  # fmt: skip
    return targets._asdict()


def _limit_time() -> None:
    """Limits the processor time up to the next request, also in case the parent has died."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(usage.ru_utime + usage.ru_stime) + CPU_SECONDS + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    template: _Template | None = None
    for line in sys.stdin:
        _limit_time()
        answer: dict[str, Any]
        try:
            if template is None:
                template = _Template(json.loads(line)["template"])
                answer = {"words": template.words}
            else:
                answer = _answer(template, line)
        except (_RefusedError, TargetsError) as error:
            answer = {"error": str(error), "by_template": isinstance(error, _RefusedError)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

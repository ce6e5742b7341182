"""Renders a conversation with a tokenizer's own chat template, in a child process.

A template is untrusted code. It runs in Jinja's sandbox, which denies access to Python objects, and in a child process
with limits on memory and time. The child, python -m jaxmnt.data.chat_template, reads the template and its variables as
JSON from standard input, and writes the text to standard output.
"""

import datetime
import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jaxmnt.errors import ConfigError, how_to_install, printable

Message = Mapping[str, Any]

TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
"""Files of a model that may hold its chat template. The first file that has one is used."""

_RENDER_TIMEOUT_SECONDS = 10
_MAX_MEMORY_BYTES = 1 << 30
_MAX_TEXT_BYTES = 16 << 20
_ERROR_EXIT_CODE = 3
"""Exit code of a child process that has written the reason for its failure to stderr."""


def chat_template(files: Mapping[str, bytes]) -> str | None:
    """Returns the chat template in the files that came with a model, or None if there is none.

    Raises `ConfigError` for a file with invalid contents.
    """
    jinja_file, *json_files = TEMPLATE_FILES
    if jinja_file in files:
        try:
            return files[jinja_file].decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"--chat: chat_template.jinja is not UTF-8: {error}; copy it again") from error
    for name in json_files:
        template = object_in(files, name).get("chat_template")
        if isinstance(template, list):  # several named templates
            templates = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = templates.get("default")
        if isinstance(template, str):
            return template
    return None


def special_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    """Returns the special tokens to which templates refer by a name such as bos_token."""
    config = object_in(files, "special_tokens_map.json") | object_in(files, "tokenizer_config.json")
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def object_in(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Returns the JSON object in one of the files that came with a model; an empty object if the file is missing.

    Raises `ConfigError` for a file that is not a JSON object.
    """
    try:
        content = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}, which came with the model, cannot be read: {error}; copy it again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{name}, which came with the model, must be an object; copy it again")
    return content


def reads(template: str, variable: str) -> bool:
    """Returns True if the name of a variable occurs in the code of a template.

    Also returns True if the template cannot be parsed, because `render` then reports the error.
    """
    try:
        from jinja2 import TemplateSyntaxError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        return True
    try:
        return any(
            kind == "name" and text == variable for _, kind, text in ImmutableSandboxedEnvironment().lex(template)
        )
    except TemplateSyntaxError:
        return True


def render(template: str, messages: Sequence[Message], variables: Mapping[str, Any], begins_turn: bool = True) -> str:
    """Returns the text of a conversation. With `begins_turn`, the text ends with the beginning of the model's next
    turn.

    `variables` holds the other variables of the template: special tokens, tools, and any that the user sets.
    Raises `ConfigError` if the template is invalid, raises an error, or exceeds the limits on time and memory.
    """
    all_variables = {
        "tools": None, "documents": None, **variables,
        "messages": list(messages), "add_generation_prompt": begins_turn,
    }  # fmt: skip
    try:
        child = subprocess.run(
            [sys.executable, "-m", __name__], input=json.dumps([template, all_variables]).encode(), capture_output=True,
            timeout=_RENDER_TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"--chat: the chat template did not finish within {_RENDER_TIMEOUT_SECONDS} s and may never end; use "
            "another one"
        ) from None
    if child.returncode == 0:
        return child.stdout.decode()
    lines = child.stderr.decode(errors="replace").strip().splitlines()
    reported_error = child.returncode == _ERROR_EXIT_CODE and lines
    why = lines[-1] if reported_error else "it took too much memory or time"
    raise ConfigError(f"--chat: the chat template cannot render this conversation: {printable(why[:300])}")


def _render_from_stdin() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_RENDER_TIMEOUT_SECONDS, _RENDER_TIMEOUT_SECONDS))
    try:
        from jinja2.exceptions import TemplateError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        _exit_with_error(f"this needs the jinja2 library; {how_to_install('data')}")
    template, variables = json.loads(sys.stdin.buffer.read())

    class Generation(Extension):
        """Renders the contents of {% generation %} blocks, which mark the model's own turns for training."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        content = environment.from_string(template).render(variables).encode()
    except Exception as error:  # a template may raise anything
        _exit_with_error(f"{type(error).__name__}: {error}")
    if len(content) > _MAX_TEXT_BYTES:
        _exit_with_error(f"its text has {len(content)} bytes, but at most {_MAX_TEXT_BYTES} are allowed")
    sys.stdout.buffer.write(content)


def _exit_with_error(why: str) -> NoReturn:
    print(" ".join(why.split()), file=sys.stderr)
    sys.exit(_ERROR_EXIT_CODE)


if __name__ == "__main__":
    _render_from_stdin()

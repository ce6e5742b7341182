"""python -m jaxmnt.generate --run RUN[@STEP] [--prompt TEXT | --input FILE]: continues text with a checkpoint of a run.

RUN is a run directory, or the folder or gs:// address of checkpoint.dir; without STEP, its newest valid checkpoint is
used. Neither the data nor the folder in which the run was started is needed. With --chat, a prompt is a user's turn;
without a prompt, --chat holds a conversation at the terminal, which Ctrl-D ends. FILE has JSON lines with "prompt", or
with "messages" for --chat, to which "tools", "documents" and "chat_template_kwargs" may be added for the chat template.
Each becomes an output line with "text", "tokens" and "finish" (end, stop or length), and with --expect also "exact". A
line that cannot be used becomes a line with "error", and the exit code at the end is 2.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxmnt.commands import LOCAL_EXIT_CODES, Parser, path_argument, run_command
from jaxmnt.errors import ConfigError, ExitCode, counted, printable
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.progress import Work, working
from jaxmnt.trained_model import (
    RefusedLine,
    adapter_options,
    add_arguments,
    check_size,
    exit_code_of,
    find_model,
    json_lines,
    load_for_lines,
)

if TYPE_CHECKING:
    from jaxmnt.data.vocabulary import Vocabulary
    from jaxmnt.trained_model import SelectedModel, TrainedModel
    from jaxmnt.training.inference import Sampling

_DEFAULT_TOKENS = 200
_SEED_LIMIT = 2**31
_INCOMPLETE_CHARACTER = "\ufffd"
"""The character that a decoder shows for an incomplete UTF-8 sequence."""


@dataclass
class Request:
    """A prompt, and the text that is generated for it."""

    ids: list[int]
    prompt: str
    """Text that is shown before the generated text; empty in a chat."""
    record: dict[str, Any]
    """The input line of the request."""
    max_tokens: int
    """Maximum number of tokens to generate."""
    stops: tuple[str, ...] = ()
    """Strings of --stop, before which generation ends."""
    ends: tuple[str, ...] = ()
    """Strings that end a turn of the model."""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    number_in_chat: int = 0
    """Number of the model's earlier turns in a conversation at the terminal."""
    expected: str | None = None
    """Text that the answer should be; None if nothing is expected."""

    @property
    def is_exact(self) -> bool:
        """True if the text is the expected text. White space at the ends of both does not count."""
        return self.expected is not None and self.text.strip() == self.expected.strip()

    def to_json(self) -> dict[str, Any]:
        """Returns the output line for the request."""
        exact = {} if self.expected is None else {"exact": self.is_exact}
        return self.record | {"text": self.text, "tokens": len(self.tokens), "finish": self.finish} | exact

    def take(self, token: int, vocabulary: "Vocabulary") -> None:
        """Adds a generated token, and sets `finish` if the text ends with it."""
        from jaxmnt.data.text_pieces import decode_after

        if self.finish is not None:
            return
        if token in vocabulary.stop_ids:
            self.finish = "end"
            return
        self.tokens.append(token)
        self.text = decode_after(vocabulary.tokenizer, self.ids, self.tokens)
        if positions := [(at, stop) for stop in (*self.stops, *self.ends) if (at := self.text.find(stop)) >= 0]:
            at, stop = min(positions)
            self.text, self.finish = self.text[:at], "end" if stop in self.ends else "stop"
        elif len(self.tokens) == self.max_tokens:
            self.finish = "length"


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    _check(options)

    with working("starting") as work:
        selected = find_model(options.run, options.tokenizer, adapter_options(options))
        loaded = load_for_lines(selected, _requests(options, selected), options.overrides, work, generates=True)
        if loaded is None:
            return ExitCode.FINISHED
        model, requests = loaded
        refused = exact = expected = 0
        for batch in _batches(requests, 1 if options.input is None else options.batch):
            _run(model, batch, options, work)
            refused += sum(isinstance(request, RefusedLine) for _, request in batch)
            answered = [request for _, request in batch if isinstance(request, Request)]
            expected += sum(request.expected is not None for request in answered)
            exact += sum(request.is_exact for request in answered)
    if options.expect is not None:
        share = f" ({100 * exact / expected:.1f} %)" if expected else ""
        print(f"exact   {exact} of {expected}{share}", file=sys.stderr)
    return exit_code_of(refused)


def complete(
    model: "TrainedModel", batch: Sequence[tuple[int, Request]], sampling: "Sampling", show: Callable[[], None]
) -> None:
    """Generates text for numbered requests until all of them have finished. Calls `show` after each token."""
    import numpy as np

    prompts = [np.array(request.ids, np.int32) for _, request in batch]
    numbers = [number for number, _ in batch]
    max_tokens = max(request.max_tokens for _, request in batch)
    for tokens in model.generator.generate(model.weights, prompts, max_tokens, sampling, numbers):
        for (_, request), token in zip(batch, tokens, strict=True):
            request.take(int(token), model.vocabulary)
        show()
        if all(request.finish for _, request in batch):
            return


def _run(
    model: "TrainedModel", batch: list[tuple[int, Request | RefusedLine]], options: argparse.Namespace, work: Work
) -> None:
    """Generates text for a batch. Shows the text as it grows, or, with --input, one line for each request at the
    end."""
    from jaxmnt.training.inference import Sampling

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    requests = [(number, request) for number, request in batch if isinstance(request, Request)]
    if options.input is None:
        [(_, first)] = requests
        shown = [""]

        def show() -> None:
            work.does("")
            shown[0] = _show(shown[0], first.prompt + _final_text(first))

        if first.number_in_chat == 0:
            work.does("compiling")
        complete(model, requests, sampling, show)
        print()
        return
    if requests:
        limit = max(request.max_tokens for _, request in requests)

        def show_progress() -> None:
            work.done = f"token {max(len(request.tokens) for _, request in requests)} of {limit}"

        work.does(f"generating for {counted(len(requests), 'line', 'lines')}")
        complete(model, requests, sampling, show_progress)
        work.does("")
    for _, request in batch:
        answer = request.to_json()
        print(json_text(answer, ensure_ascii=False), flush=True)


def _final_text(request: Request) -> str:
    """Returns the part of the text that cannot change any more. An incomplete character, or a possible beginning of a
    stop string, at the end of the text is left out."""
    if request.finish:
        return request.text
    text = request.text.rstrip(_INCOMPLETE_CHARACTER)
    stops = (*request.stops, *request.ends)
    possible_lengths = (length for stop in stops for length in range(len(stop)) if text.endswith(stop[:length]))
    return text[: len(text) - max(possible_lengths, default=0)]


def _show(shown: str, text: str) -> str:
    """Prints the part of `text` that follows `shown`, and returns all text that is shown now. Prints nothing if the
    decoder has revised earlier text."""
    if text.startswith(shown):
        print(text[len(shown) :], end="", flush=True)
        return text
    return shown


def _requests(options: argparse.Namespace, selected: "SelectedModel") -> Iterator[Request | RefusedLine]:
    """Yields the requests, line by line."""
    if options.input is not None:
        return json_lines(options.input, lambda where, record: _request(options, selected, where, record))
    if options.chat and options.prompt is None:
        return _conversation(options, selected)
    prompt = options.prompt or ""
    record = {"messages": [*_system(options), _user(prompt)]} if options.chat else {"prompt": prompt}
    return iter([_request(options, selected, "--prompt", record)])


def _conversation(options: argparse.Namespace, selected: "SelectedModel") -> Iterator[Request]:
    """Yields a request for each turn that the user types, until the end of the input."""
    selected.chat.check()
    messages: list[dict[str, Any]] = _system(options)
    number = 0
    while True:
        try:
            text = input("you   > ")
        except EOFError:
            print()
            return
        if not text.strip():
            continue
        messages.append(_user(text))
        try:
            request = _request(options, selected, "the conversation", {"messages": messages})
        except ConfigError as error:
            # The window is full, or the text cannot be rendered. The next turn begins a new conversation.
            print(f"{error}; the conversation begins anew")
            messages = _system(options)
            continue
        request.number_in_chat = number
        number += 1
        print("model > ", end="", flush=True)
        yield request
        messages.append({"role": "assistant", "content": request.text})


def _system(options: argparse.Namespace) -> list[dict[str, Any]]:
    return [{"role": "system", "content": options.system}] if options.system else []


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _request(options: argparse.Namespace, selected: "SelectedModel", where: str, record: dict[str, Any]) -> Request:
    """Returns the request in an input line. Raises `ConfigError` if it is malformed or does not fit the window."""
    from jaxmnt.data.chat.model_chat import variables_of_line

    vocabulary, prompt = selected.vocabulary, ""
    if options.chat:
        ids = selected.chat.ids(_messages(options, record, where), where, variables_of_line(record, where))
    else:
        prompt = record.get("prompt", "")
        if "prompt" not in record or not isinstance(prompt, str):
            raise ConfigError(f'{where}: it must have a "prompt" with a text')
        ids = vocabulary.with_start(vocabulary.encode(prompt, where=where))
    if not ids:
        raise ConfigError(
            f"{where}: empty; this run's data has no end-of-document id that could start a sample, so give some text"
        )
    room = selected.window - len(ids)
    if room < 1:
        raise ConfigError(
            f"{where}: its {len(ids)} tokens fill the model's window of {selected.window}; shorten the text"
        )
    requested = _DEFAULT_TOKENS if options.tokens is None else options.tokens
    if options.tokens is not None and requested > room:
        print(
            f"note    --tokens: {requested} and the prompt's {len(ids)} are more than the model's window of "
            f"{selected.window} tokens; {room} are generated",
            file=sys.stderr,
        )
    ends = selected.chat.stop_texts if options.chat else ()
    request = Request(ids, prompt, record, min(requested, room), tuple(options.stop), ends)
    if options.expect is not None:
        request.expected = _expected(record, options.expect, where)
    return request


def _messages(options: argparse.Namespace, record: dict[str, Any], where: str) -> Any:
    """Returns the messages of an input line: its "messages", or its "prompt" of messages or of a user's text, after its
    "system" message or that of --system."""
    if "messages" in record and "prompt" in record:
        raise ConfigError(f'{where}: it must not have both "messages" and "prompt"; remove one of them')
    messages = record.get("messages", record.get("prompt"))
    if isinstance(messages, str):
        messages = [_user(messages)]
    if not isinstance(messages, list) or not messages or options.input is None:
        return messages
    system = record.get("system")
    if system is not None and not isinstance(system, str):
        raise ConfigError(f'{where}: "system" must be a text')
    instructions = [{"role": "system", "content": system}] if system else _system(options)
    return [*instructions, *messages]


def _expected(record: dict[str, Any], field: str, where: str) -> str:
    """Returns the text that an input line expects: a string, or the content of one message."""
    expected = record.get(field)
    if isinstance(expected, list) and len(expected) == 1 and isinstance(expected[0], dict):
        expected = expected[0].get("content")
    if not isinstance(expected, str):
        raise ConfigError(f'{where}: it must have "{printable(field)}", the expected text, because of --expect')
    return expected


def _batches(requests: Iterable[Request | RefusedLine], size: int) -> Iterator[list[tuple[int, Request | RefusedLine]]]:
    """Yields batches of `size` numbered requests."""
    numbered = enumerate(requests)
    while batch := list(itertools.islice(numbered, size)):
        yield batch


def _check(options: argparse.Namespace) -> None:
    check_size(options, "batch")
    if options.tokens is not None:
        check_size(options, "tokens")
    if not 0 <= options.temperature < math.inf:
        raise ConfigError(f"--temperature: {options.temperature:g} is out of range; give a number of at least 0")
    if not -_SEED_LIMIT <= options.seed < _SEED_LIMIT:
        raise ConfigError(
            f"--seed: {options.seed} is out of range; give a number from {-_SEED_LIMIT} to {_SEED_LIMIT - 1}"
        )
    check_size(options, "top_k", 0)
    if not 0 < options.top_p <= 1:
        raise ConfigError(f"--top-p must be above 0 and at most 1, not {options.top_p:g}")
    if not all(options.stop):
        raise ConfigError("--stop: an empty text matches everywhere; give some text")
    if options.system and not options.chat:
        raise ConfigError("--system: only a conversation has a system message; add --chat")
    if options.expect is not None and options.input is None:
        raise ConfigError("--expect: it names a field of the lines of --input; add --input")
    if options.chat and options.prompt is None and options.input is None and not sys.stdin.isatty():
        raise ConfigError("--chat: give --prompt or --input, or run it on a terminal to hold a conversation")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.generate", description=__doc__, codes=LOCAL_EXIT_CODES)
    add_arguments(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="text to continue (default: the start of a document)")
    source.add_argument("--input", type=path_argument, metavar="FILE", help="JSON lines of prompts (-: standard input)")
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a user's turn, formatted with the model's chat template"
    )
    parser.add_argument("--expect", metavar="FIELD", help="--input: field with the expected text; counts exact matches")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: a system message before the prompt")
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help=f"maximum of new tokens ({_DEFAULT_TOKENS}, or the rest of the window)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        metavar="T",
        help="0: take the likeliest token; 1: sample as trained (0.7)",
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest tokens (0: all)")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the likeliest tokens of total probability P (1)",
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random numbers (0)")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    run_command(main)

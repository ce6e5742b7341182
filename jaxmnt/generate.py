"""python -m jaxmnt.generate --run RUN[@STEP] [--prompt TEXT | --input FILE]: continues text with a checkpoint of a run.

RUN is a run directory, or the folder or gs:// address of checkpoint.dir; without STEP its newest whole checkpoint.
Neither the data nor the folder that the run was started in are needed. FILE has JSON lines with "prompt", or with
"messages" for --chat, to which "tools", "documents" and "chat_template_kwargs" may be added for the chat template. Each
becomes a line with "text", "tokens" and "finish" (end, stop or length). A line that cannot be used becomes a line with
"error", and the exit code is 2 at the end.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxmnt.commands import HERE, Parser, path_argument, run_command
from jaxmnt.errors import ConfigError, ExitCode, counted
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.progress import Work, working
from jaxmnt.trained_model import Refused, add_arguments, exit_code_of, find_model, json_lines, load_for, size_of

if TYPE_CHECKING:
    from jaxmnt.trained_model import Named, TrainedModel, Vocabulary
    from jaxmnt.training.inference import Sampling

_TOKENS = 200
_SEEDS = 2**31
_NOT_YET = "\ufffd"
"""What a decoder shows for a character of which bytes are missing."""


@dataclass
class Request:
    """A prompt, and what has been generated for it."""

    ids: list[int]
    prompt: str
    """What is shown before the text: nothing in a chat."""
    record: dict[str, Any]
    """The line that it came from."""
    room: int
    """How many tokens may follow."""
    stops: tuple[str, ...] = ()
    """Texts before which it ends."""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The line that answers it."""
        return self.record | {"text": self.text, "tokens": len(self.tokens), "finish": self.finish}

    def take(self, token: int, vocabulary: "Vocabulary") -> None:
        """One more token."""
        from jaxmnt.data.text_pieces import decode_after

        if self.finish is not None:
            return
        if token in vocabulary.ends:
            self.finish = "end"
            return
        self.tokens.append(token)
        self.text = decode_after(vocabulary.tokenizer, self.ids, self.tokens)
        if found := [place for stop in self.stops if (place := self.text.find(stop)) >= 0]:
            self.text, self.finish = self.text[: min(found)], "stop"
        elif len(self.tokens) == self.room:
            self.finish = "length"


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    _check(options)

    with working("starting") as work:
        named = find_model(options.run, options.tokenizer)
        loaded = load_for(named, _requests(options, named), options.overrides, work)
        if loaded is None:
            return ExitCode.FINISHED
        (model, requests), refused = loaded, 0
        for batch in _batches(requests, 1 if options.input is None else options.batch):
            _run(model, batch, options, work)
            refused += sum(isinstance(request, Refused) for _, request in batch)
    return exit_code_of(refused)


def complete(
    model: "TrainedModel", batch: Sequence[tuple[int, Request]], sampling: "Sampling", show: Callable[[], None]
) -> None:
    """Generates for requests, by their numbers, until each has finished. `show` is called after each token."""
    import numpy as np

    prompts = [np.array(request.ids, np.int32) for _, request in batch]
    most, numbers = max(request.room for _, request in batch), [number for number, _ in batch]
    for tokens in model.generator.generate(model.weights, prompts, most, sampling, numbers):
        for (_, request), token in zip(batch, tokens, strict=True):
            request.take(int(token), model.vocabulary)
        show()
        if all(request.finish for _, request in batch):
            return


def _run(
    model: "TrainedModel", batch: list[tuple[int, Request | Refused]], options: argparse.Namespace, work: Work
) -> None:
    """Generates for a batch, and shows it: text as it comes, or a line for each at the end."""
    from jaxmnt.training.inference import Sampling

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    requests = [(number, request) for number, request in batch if isinstance(request, Request)]
    if options.input is None:
        [(_, first)] = requests
        shown = [""]

        def show() -> None:
            work.does("")
            shown[0] = _show(shown[0], first.prompt + _unstopped(first))

        work.does("compiling")
        complete(model, requests, sampling, show)
        print()
        return
    if requests:
        longest = max(request.room for _, request in requests)

        def count() -> None:
            work.done = f"token {max(len(request.tokens) for _, request in requests)} of {longest}"

        work.does(f"generating for {counted(len(requests), 'line', 'lines')}")
        complete(model, requests, sampling, count)
        work.does("")
    for _, request in batch:
        answer = request.to_json()
        print(json_text(answer, ensure_ascii=False), flush=True)


def _unstopped(request: Request) -> str:
    """The text that will stay, whatever comes: neither a character at its end that is not whole yet, nor the beginning
    of what may become a stop string."""
    if request.finish:
        return request.text
    text = request.text.rstrip(_NOT_YET)
    begun = (length for stop in request.stops for length in range(len(stop)) if text.endswith(stop[:length]))
    return text[: len(text) - max(begun, default=0)]


def _show(shown: str, text: str) -> str:
    """Writes what is new of the text. What a decoder has changed its mind about stays as it was shown."""
    if text.startswith(shown):
        print(text[len(shown) :], end="", flush=True)
        return text
    return shown


def _requests(options: argparse.Namespace, named: "Named") -> Iterator[Request | Refused]:
    """What is asked for, line by line."""
    if options.input is None:
        return iter([_request(options, named, "--prompt", _record(options))])
    return json_lines(options.input, lambda where, record: _request(options, named, where, record))


def _record(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what `--prompt` asks for, as a line would."""
    if not options.chat:
        return {"prompt": options.prompt}
    system = [{"role": "system", "content": options.system}] if options.system else []
    return {"messages": [*system, {"role": "user", "content": options.prompt}]}


def _request(options: argparse.Namespace, named: "Named", where: str, record: dict[str, Any]) -> Request:
    vocabulary, prompt = named.vocabulary, ""
    if options.chat:
        text = named.rendered(record.get("messages"), where, variables=_template_variables(record, where))
        ids = vocabulary.encode(text, markup=True, where=where)
    else:
        prompt = record.get("prompt", "")
        if "prompt" not in record or not isinstance(prompt, str):
            raise ConfigError(f'{where}: it must have a "prompt" with a text')
        ids = vocabulary.begun(vocabulary.encode(prompt, where=where))
    if not ids:
        raise ConfigError(
            f"{where}: empty; this run's data has no end-of-document id that could start a sample: give some text"
        )
    room = named.window - len(ids)
    if room < 1:
        raise ConfigError(f"{where}: {len(ids)} tokens fill the model's window of {named.window}; shorten it")
    wanted = _TOKENS if options.tokens is None else options.tokens
    if options.tokens is not None and wanted > room:
        print(
            f"note    --tokens: {wanted} and the prompt's {len(ids)} are more than the model's window of "
            f"{named.window} tokens; {room} are generated",
            file=sys.stderr,
        )
    return Request(ids, prompt, record, min(wanted, room), tuple(options.stop))


def _template_variables(record: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns what a line gives to the chat template besides its messages. Raises `ConfigError` for another shape."""
    variables = {}
    for name in ("tools", "documents"):
        value = record.get(name)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise ConfigError(f'{where}: "{name}" must be a list of objects')
        variables[name] = value
    more = record.get("chat_template_kwargs")
    if more is not None and not isinstance(more, dict):
        raise ConfigError(f'{where}: "chat_template_kwargs" must be an object')
    for name in more or {}:
        if name in ("messages", "add_generation_prompt") or name in variables:
            raise ConfigError(f'{where}: "chat_template_kwargs" must not set {name}, which the line already sets')
    return variables | (more or {})


def _batches(requests: Iterable[Request | Refused], size: int) -> Iterator[list[tuple[int, Request | Refused]]]:
    """Requests with their numbers, so many at a time."""
    numbered = enumerate(requests)
    while batch := list(itertools.islice(numbered, size)):
        yield batch


def _check(options: argparse.Namespace) -> None:
    size_of(options, "batch")
    if options.tokens is not None:
        size_of(options, "tokens")
    if not 0 <= options.temperature < math.inf:
        raise ConfigError(f"--temperature: {options.temperature:g} is out of range; give a number from 0 up")
    if not -_SEEDS <= options.seed < _SEEDS:
        raise ConfigError(f"--seed: {options.seed} is out of range; give a number below {_SEEDS}")
    size_of(options, "top_k", 0)
    if not 0 < options.top_p <= 1:
        raise ConfigError("--top-p takes a number above 0, up to 1")
    if not all(options.stop):
        raise ConfigError("--stop: an empty text is everywhere; give some text")
    if options.system and not options.chat:
        raise ConfigError("--system: only a conversation has a system message; add --chat")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.generate", description=__doc__, codes=HERE)
    add_arguments(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", default="", help="text to continue (default: the start of a document)")
    source.add_argument("--input", type=path_argument, metavar="FILE", help="JSON lines instead (-: standard input)")
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a user's turn, written by the chat template of the model"
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: a system message before the prompt")
    parser.add_argument(
        "--tokens", type=int, metavar="N", help=f"at most so many new tokens ({_TOKENS}, or what the window holds)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.7, metavar="T", help="0 is the likeliest; 1 as trained (0.7)"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="only of the K likeliest tokens (0: all)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="only of the likeliest with probability P together (1)"
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another number, another sample")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    run_command(main)

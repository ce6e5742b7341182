"""A checkpoint's model on the devices here, with its tokenizer: what generate, score and lm_eval have in common."""

import argparse
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from jaxmnt.commands import Parser, path_argument
from jaxmnt.errors import ConfigError, ExitCode, counted, printable, remark

if TYPE_CHECKING:
    import jax

    from jaxmnt.checkpoint.commit import Committed
    from jaxmnt.config import Config
    from jaxmnt.config.mesh import Mesh
    from jaxmnt.data.run_tokenizer import RunTokenizer
    from jaxmnt.data.tokenizer import Tokenizer
    from jaxmnt.telemetry.progress import Work
    from jaxmnt.training.inference import Generator
    from jaxmnt.training.spec import StepSpec


T = TypeVar("T")


@dataclass(frozen=True)
class Vocabulary:
    """What turns text into a run's tokens and back."""

    tokenizer: "Tokenizer"
    size: int
    """How many ids the model knows."""
    start: list[int]
    """What stands before a text."""
    end: int | None
    """What ends a document; it stands before a text that is empty."""
    ends: frozenset[int]
    """Ids that end what is generated."""

    def encode(self, text: str, *, markup: bool = False, begins: bool = True, where: str = "--prompt") -> list[int]:
        """Returns the ids of a text without a start.

        `markup` says that names of special tokens stand for them, and `begins` that no text stands before this one.
        """
        from jaxmnt.data.tokenizer import Form

        text = text.encode("utf-8", errors="replace").decode()  # what a terminal hands over need not be text
        ids: list[int] = self.tokenizer.encode_batch([text], Form(markup, begins))[0].tolist()
        if ids and max(ids) >= self.size:
            raise ConfigError(
                f"--tokenizer: it makes id {max(ids)} of {where}, and the run has ids below {self.size}; give the one "
                "that made its tokens"
            )
        return ids

    def begun(self, ids: list[int]) -> list[int]:
        """The ids of a text with what stands before it; empty only if nothing can."""
        return self.start + ids or ([] if self.end is None else [self.end])


@dataclass(frozen=True)
class TrainedModel:
    """A model that can be called. Its programs are compiled once for all batches of like sizes."""

    spec: "StepSpec"
    generator: "Generator"
    weights: Any
    """Parameters and buffers, as the generator takes them."""
    vocabulary: Vocabulary
    window: int
    """The longest text that it was trained for, in tokens."""

    @functools.cached_property
    def row_scores(self) -> Any:
        """`inference.row_scores` of this model, compiled."""
        import jax

        from jaxmnt.training.inference import row_scores

        return functools.partial(jax.jit(functools.partial(row_scores, self.spec)), *self.weights)


@dataclass(frozen=True)
class Named:
    """What a command line names: a checkpoint, what came with its model, and its vocabulary."""

    checkpoint: "Committed"
    config: "Config"
    files: dict[str, bytes]
    vocabulary: Vocabulary

    @property
    def window(self) -> int:
        """The longest text that it was trained for, in tokens."""
        return self.config.data.sequence_length

    def load(self, overrides: Sequence[str]) -> TrainedModel:
        """The model on the mesh that `overrides` say, of this process's devices."""
        import jax

        from jaxmnt.training.inference import Generator

        devices = jax.local_devices()
        mesh = _mesh(self.config, overrides, len(devices))
        spec, state = restored(self.checkpoint, self.config, self.vocabulary.size, mesh, devices)
        generator = Generator(spec)
        weights = generator.place(state.pop("params"), state.pop("buffers", {}))
        return TrainedModel(spec, generator, weights, self.vocabulary, self.window)

    def rendered(
        self, messages: Any, where: str, begins_turn: bool = True, variables: Mapping[str, Any] | None = None
    ) -> str:
        """Returns the text of a conversation by the chat template of the model, which reads these `variables`, too."""
        from jaxmnt.data.chat_template import chat_template, reads, render, special_tokens

        template = chat_template(self.files)
        if template is None:
            raise ConfigError("--chat: the run has no chat template; leave it out, or begin with a model that has one")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise ConfigError(f'{where}: it must have "messages", a list of objects with "role" and "content"')
        for name in variables or {}:
            if not reads(template, name):
                raise ConfigError(f"{where}: the chat template of the model does not read {printable(name)}; remove it")
        try:
            return render(template, messages, special_tokens(self.files) | dict(variables or {}), begins_turn)
        except ConfigError as error:
            raise ConfigError(f"{where}: {str(error).removeprefix('--chat: ')}") from error


def restored(
    checkpoint: "Committed", config: "Config", vocab_size: int, mesh: "Mesh", devices: "Sequence[jax.Device]"
) -> "tuple[StepSpec, dict[str, Any]]":
    """Returns the model of a checkpoint, for data with so many ids, on a mesh of these devices: what is static about
    it, and its parameters and buffers."""
    from jaxmnt.checkpoint.manifest import DamagedError
    from jaxmnt.checkpoint.restore import restore
    from jaxmnt.distributed.identity import Identity
    from jaxmnt.training.build import inference_spec
    from jaxmnt.training.state import abstract_state, canonical_abstract, model_state

    spec = inference_spec(config, vocab_size, mesh, devices)
    wanted = model_state(canonical_abstract(spec, abstract_state(spec)))
    try:
        return spec, restore(checkpoint, wanted, Identity()).state
    except DamagedError as damage:
        raise DamagedError(
            f"{checkpoint.path} is damaged: {damage}; name another step: python -m jaxmnt.checkpoint list "
            f"{checkpoint.path.parent.parent}"
        ) from damage


def add_arguments(parser: Parser) -> None:
    """What these commands take."""
    parser.add_argument(
        "--run", type=path_argument, required=True, metavar="RUN[@STEP]", help="run directory, as in run.dir"
    )
    parser.add_argument(
        "--tokenizer",
        type=path_argument,
        metavar="PATH",
        help="of a run on token arrays: bytes, or the tokenizer.json that made them",
    )
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="rows at a time (8)")
    parser.add_argument(
        "overrides", nargs="*", metavar="mesh.AXIS=N", help="mesh of the devices here; default: all on mesh.model"
    )


def find_model(run: str, tokenizer: str | None) -> Named:
    """What `--run` and `--tokenizer` name. Raises `ConfigError` if a checkpoint or its vocabulary is not to be had."""
    from jaxmnt.distributed.local_gpus import default_to_cpu

    default_to_cpu(os.environ)  # before what imports JAX
    from jaxmnt.checkpoint.refs import find, roots_of
    from jaxmnt.huggingface import companions

    checkpoint = find(run, "--run")
    files = companions.read_run_files(roots_of(run, checkpoint))
    return Named(checkpoint, checkpoint.config, files, _vocabulary(run, tokenizer, checkpoint, files))


def _vocabulary(run: str, tokenizer: str | None, checkpoint: "Committed", files: dict[str, bytes]) -> Vocabulary:
    """`files` are what came with the model, if it came from Hugging Face: what starts a text there and what ends it,
    too."""
    from jaxmnt.data.tokenizer import HuggingFace

    found, known, end = _tokenizer(run, tokenizer, checkpoint)
    of_model = checkpoint.config.model.vocab_size
    assert of_model is not None
    size = min(known, of_model)  # a vocabulary may have more than a model, as Gemma 3's
    start = [] if end is None else [end]
    ends = {*start, *(id for id in _ends_of(files) if id < size)}
    # As long as it has not been trained further, a text begins as the model knows it from elsewhere.
    if files and checkpoint.manifest.tokens == 0 and isinstance(found, HuggingFace):
        start = found.start
    return Vocabulary(found, size, start, end, frozenset(ends))


class Refused(NamedTuple):
    """A line of JSON that cannot be used, and why."""

    record: dict[str, Any]
    """What the line says; empty if it is no object."""
    error: str

    def to_json(self) -> dict[str, Any]:
        """The line that answers it."""
        return self.record | {"error": self.error}


def load_for(
    named: Named, lines: Iterator[T], overrides: Sequence[str], work: "Work"
) -> "tuple[TrainedModel, Iterator[T]] | None":
    """Reads the first of the lines, and then loads the model: without a line there is nothing to load it for.

    Returns the model and all the lines; None if there are none.
    """
    work.does("")  # somebody may be typing what is read now
    first = next(lines, None)
    if first is None:
        return None
    work.does("reading the checkpoint")
    model = named.load(overrides)
    work.does("")
    return model, itertools.chain([first], lines)


def json_lines(path: str, use: Callable[[str, dict[str, Any]], T]) -> Iterator[T | Refused]:
    """What `use` makes of each object in a file of JSON lines, or in standard input (-) as they come.

    `use` gets the place of the line for messages. If it raises a `ConfigError` about that place, the line is refused
    and the others come.
    """
    name = "standard input" if path == "-" else path
    try:
        with nullcontext(sys.stdin) if path == "-" else Path(path).open(encoding="utf-8") as source:
            for number, line in enumerate(source, 1):
                if line.strip():
                    yield _used(line, f"{name}:{number}", use)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--input: {name} cannot be read: {error}") from error


def _used(line: str, where: str, use: Callable[[str, dict[str, Any]], T]) -> T | Refused:
    record: dict[str, Any] = {}
    try:
        record = _object(line, where)
        return use(where, record)
    except ConfigError as error:
        if not str(error).startswith(where):  # it is about something else than this line
            raise
        return Refused(record, str(error))


def exit_code_of(refused: int) -> ExitCode:
    """The exit code of a command that has answered all lines, of which so many with an error; says so."""
    if not refused:
        return ExitCode.FINISHED
    remark(f"error: --input: {counted(refused, 'line was', 'lines were')} refused; each of their answers says why")
    return ExitCode.CONFIG


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: this line is not JSON: {printable(str(error))}; correct it") from error
    except ValueError as error:  # Python's limit for the digits of an integer
        raise ConfigError(f"{where}: a number in this line has too many digits; write it as text") from error
    if not isinstance(record, dict):
        raise ConfigError(f'{where}: this line must be an object, such as {{"prompt": "…"}}')
    return record


def _mesh(config: "Config", overrides: Sequence[str], devices: int) -> "Mesh":
    from jaxmnt.config.load import apply_overrides, parse_config

    tree: dict[str, Any] = {}
    for key in apply_overrides(tree, list(overrides)):
        if not key.startswith("mesh."):
            raise ConfigError(f"{key}: only the mesh can be set here; the rest is the run's")
    if not overrides:
        # A layer's weights stay where they are along `model`; over fsdp each token would gather all of them.
        axis = "model" if config.model.num_heads % devices == 0 else "fsdp"
        tree = {"mesh": {axis: devices, "data": 1, "allow_split_hosts": True}}
    return parse_config(tree, "the command line").mesh


def _tokenizer(run: str, given: str | None, checkpoint: "Committed") -> "tuple[Tokenizer, int, int | None]":
    """What turns text into the run's tokens and back, how many ids there are, and the end of a document's."""
    from jaxmnt.data.manifest import NAMELESS
    from jaxmnt.data.tokenizer import HuggingFace, choose_tokenizer

    known = _known(run, given, checkpoint)
    if known is not None and known.name == "synthetic":
        raise ConfigError("--run: it was trained on random tokens (data.synthetic), which no text stands for")
    if known is not None and known.name != NAMELESS:
        tokenizer = known.open()
        if given is not None:
            chosen = choose_tokenizer(given, known.description.get("end_token"))
            if chosen.description != tokenizer.description:
                raise ConfigError(
                    f"--tokenizer: {given} is not the one that the run was trained with, which it keeps; leave it out"
                )
        return tokenizer, known.vocab_size, known.end_of_document
    if given is None:
        raise ConfigError(
            "--tokenizer: the run was trained on token arrays whose tokenizer is not recorded; give bytes, or the "
            "path of the tokenizer.json that made them"
        )
    named = choose_tokenizer(given)
    if known is None:
        return named, named.vocab_size, named.end_of_document
    if isinstance(named, HuggingFace) and named.vocab_size != known.vocab_size:
        print(
            f"note    --tokenizer: {given} has {named.vocab_size} ids, the run's tokens {known.vocab_size}: it may not "
            "be theirs",
            file=sys.stderr,
        )
    return named, known.vocab_size, known.end_of_document


def _known(run: str, given: str | None, checkpoint: "Committed") -> "RunTokenizer | None":
    """What the run keeps, or its data says; None if neither does and the command line names a tokenizer."""
    from jaxmnt.checkpoint.refs import tokenizer_of

    try:
        return tokenizer_of(run, checkpoint)
    except ConfigError as error:
        if given is not None:
            return None
        raise ConfigError(
            f"--tokenizer: not given, and the run does not tell: {error}; name bytes or a tokenizer.json"
        ) from error


def _ends_of(files: dict[str, bytes]) -> set[int]:
    """Ids that end a text or a turn by what came with a model."""
    from jaxmnt.data.chat_template import object_in

    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        end = object_in(files, name).get("eos_token_id")
        found |= {one for one in (end if isinstance(end, list) else [end]) if isinstance(one, int) and one >= 0}
    return found


def size_of(options: argparse.Namespace, name: str, least: int = 1) -> int:
    """A number of the command line. Raises `ConfigError` if it is too small."""
    value = int(getattr(options, name))
    if value < least:
        raise ConfigError(f"--{name.replace('_', '-')} takes a number from {least} up")
    return value

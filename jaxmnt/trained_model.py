"""Loads a checkpoint's model onto local devices, with its tokenizer, for generate, score and lm_eval."""

import argparse
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
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
    from jaxmnt.data.chat.model_chat import ModelChat
    from jaxmnt.data.chat.template import ChatFormat
    from jaxmnt.data.run_tokenizer import RunTokenizer
    from jaxmnt.data.tokenizer import Tokenizer
    from jaxmnt.data.vocabulary import Vocabulary
    from jaxmnt.telemetry.progress import Work
    from jaxmnt.training.inference import Generator
    from jaxmnt.training.spec import StepSpec


T = TypeVar("T")


@dataclass(frozen=True)
class TrainedModel:
    """A model on local devices. Its programs are compiled once for all batches of similar sizes."""

    spec: "StepSpec"
    generator: "Generator"
    weights: Any
    """Parameters and buffers, in the form that the generator takes."""
    vocabulary: "Vocabulary"
    window: int
    """Number of tokens in the longest text that the model was trained on."""

    @functools.cached_property
    def row_scores(self) -> Any:
        """The compiled function `inference.row_scores` for this model."""
        import jax

        from jaxmnt.training.inference import row_scores

        return functools.partial(jax.jit(functools.partial(row_scores, self.spec)), *self.weights)


@dataclass(frozen=True)
class SelectedModel:
    """The model that a command line names: a checkpoint, its vocabulary, and how it is asked in a conversation."""

    checkpoint: "Committed"
    config: "Config"
    vocabulary: "Vocabulary"
    chat: "ModelChat"
    adapters: "AdapterOptions"

    @property
    def window(self) -> int:
        """Number of tokens in the longest text that the model was trained on."""
        return self.config.data.sequence_length

    def load(self, overrides: Sequence[str], *, generates: bool = False) -> TrainedModel:
        """Loads the model onto this process's devices, with the mesh of `overrides`. Raises `ConfigError` if it
        `generates` texts on a mesh that divides rows."""
        import jax

        from jaxmnt.training.inference import Generator, check_generation

        devices = jax.local_devices()
        mesh = _mesh(self.config, overrides, len(devices))
        if generates:
            check_generation(mesh.context)
        spec, state = restore_model(self.checkpoint, self.config, self.vocabulary.size, mesh, devices, self.adapters)
        generator = Generator(spec)
        weights = generator.place(state.pop("params"), state.pop("buffers", {}))
        return TrainedModel(spec, generator, weights, self.vocabulary, self.window)


class AdapterOptions(NamedTuple):
    """Says how the model of a run with adapters is loaded."""

    base: str | None = None
    """The place of the base, if it has moved."""
    enabled: bool = True
    """False to load the base alone."""
    key: str = "--base"
    """The option that names the base, for messages."""


WITH_ADAPTERS = AdapterOptions()
"""Adapters beside a base that is where the run has read it."""


def restore_model(
    checkpoint: "Committed",
    config: "Config",
    vocab_size: int,
    mesh: "Mesh",
    devices: "Sequence[jax.Device]",
    adapters: AdapterOptions = WITH_ADAPTERS,
) -> "tuple[StepSpec, dict[str, Any]]":
    """Loads a checkpoint's model, for data with `vocab_size` ids, onto a mesh of these devices. Returns its static
    specification and its state (parameters and buffers). The base of a run with adapters is read from where the run has
    read it, and compared with the digests in the checkpoint.

    Raises `ConfigError` for options about adapters if the run has none."""
    from jaxmnt.checkpoint.manifest import DamagedError
    from jaxmnt.checkpoint.restore import restore
    from jaxmnt.distributed.identity import Identity
    from jaxmnt.lora.inference import restore_with_base
    from jaxmnt.training.build import inference_spec
    from jaxmnt.training.state import abstract_state, canonical_abstract, model_state

    if checkpoint.manifest.base is None and (adapters.base is not None or not adapters.enabled):
        option = adapters.key if adapters.base is not None else "--without-adapters"
        raise ConfigError(f"{option}: {checkpoint.path} has no adapters; leave it out")
    if not adapters.enabled:
        config = config.model_copy(update={"lora": None})
    spec = inference_spec(config, vocab_size, mesh, devices)
    try:
        if checkpoint.manifest.base is not None:
            return spec, restore_with_base(checkpoint, spec, adapters.base, adapters.key)
        target = model_state(canonical_abstract(spec, abstract_state(spec)))
        return spec, restore(checkpoint, target, Identity()).state
    except DamagedError as damage:
        raise DamagedError(
            f"{checkpoint.path} is damaged: {damage}; name another step: python -m jaxmnt.checkpoint list "
            f"{checkpoint.path.parent.parent}"
        ) from damage


def add_arguments(parser: Parser) -> None:
    """Adds the arguments that generate, score and lm_eval share."""
    parser.add_argument(
        "--run", type=path_argument, required=True, metavar="RUN[@STEP]", help="run directory (run.dir)"
    )
    parser.add_argument(
        "--tokenizer",
        type=path_argument,
        metavar="PATH",
        help="tokenizer of a run that was trained on token arrays: bytes, or the tokenizer.json that made them",
    )
    parser.add_argument(
        "--base",
        type=path_argument,
        metavar="hf:FOLDER|RUN",
        help="where the base of a run with adapters is now; default: where the run has read it",
    )
    parser.add_argument("--without-adapters", action="store_true", help="use the base of a run with adapters alone")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="number of rows in a batch (8)")
    parser.add_argument(
        "overrides", nargs="*", metavar="mesh.AXIS=N", help="mesh of the local devices; default: all on mesh.model"
    )


def adapter_options(options: argparse.Namespace) -> AdapterOptions:
    """Returns how the command line says that the model of a run with adapters is loaded."""
    return AdapterOptions(options.base, not options.without_adapters)


def find_model(run: str, tokenizer: str | None, adapters: AdapterOptions = WITH_ADAPTERS) -> SelectedModel:
    """Finds the model that `--run` and `--tokenizer` name. Raises `ConfigError` if its checkpoint or vocabulary is
    missing."""
    from jaxmnt.distributed.local_gpus import default_to_cpu

    default_to_cpu(os.environ)  # must come before anything that imports JAX
    from jaxmnt.checkpoint.refs import find, roots_of
    from jaxmnt.data.chat.model_chat import ModelChat
    from jaxmnt.data.chat.template import chat_of_files
    from jaxmnt.huggingface import companions

    checkpoint = find(run, "--run")
    files = companions.read_run_files(roots_of(run, checkpoint))
    tokenizer_of_model = _tokenizer(run, tokenizer, checkpoint)
    chat = tokenizer_of_model.chat or chat_of_files(files)
    is_trained = tokenizer_of_model.chat is not None
    vocabulary = _vocabulary(tokenizer_of_model, checkpoint, files)
    model_chat = ModelChat(chat, vocabulary, is_trained=is_trained)
    return SelectedModel(checkpoint, checkpoint.config, vocabulary, model_chat, adapters)


def _vocabulary(selected: "_SelectedTokenizer", checkpoint: "Committed", files: dict[str, bytes]) -> "Vocabulary":
    """Returns the vocabulary of a run. `files` are those that came with a model from Hugging Face; they may name tokens
    that end a text."""
    from jaxmnt.data.chat.template import end_ids
    from jaxmnt.data.tokenizer import HuggingFace
    from jaxmnt.data.vocabulary import Vocabulary, stop_ids

    opened, end_of_document = selected.tokenizer, selected.end_of_document
    model_size = checkpoint.config.model.vocab_size
    assert model_size is not None
    size = min(selected.size, model_size)  # a tokenizer may have more ids than the model, as for Gemma 3
    start_ids = [] if end_of_document is None else [end_of_document]
    stops = stop_ids(opened, end_of_document, selected.chat) | {*end_ids(files)}
    # An imported model that was not trained further expects the beginning of a text that its own tokenizer adds.
    if files and checkpoint.manifest.tokens == 0 and isinstance(opened, HuggingFace):
        start_ids = opened.start
    return Vocabulary(opened, size, start_ids, end_of_document, frozenset(id for id in stops if id < size))


class RefusedLine(NamedTuple):
    """An input line that cannot be used, with the reason."""

    record: dict[str, Any]
    """The JSON object in the line; empty if the line does not hold one."""
    error: str

    def to_json(self) -> dict[str, Any]:
        """Returns the output line that reports the refusal."""
        return self.record | {"error": self.error}


def load_for_lines(
    selected: SelectedModel, lines: Iterator[T], overrides: Sequence[str], work: "Work", *, generates: bool = False
) -> "tuple[TrainedModel, Iterator[T]] | None":
    """Loads the model once there is a first line, because the model is not needed without one.

    Returns the model and all lines, or None if there are no lines.
    """
    work.does("")  # the user may be typing the input now
    first = next(lines, None)
    if first is None:
        return None
    work.does("reading the checkpoint")
    model = selected.load(overrides, generates=generates)
    work.does("")
    return model, itertools.chain([first], lines)


def json_lines(path: str, parse: Callable[[str, dict[str, Any]], T]) -> Iterator[T | RefusedLine]:
    """Yields the result of `parse` for each line of a file of JSON objects, or of standard input (-) as lines arrive.

    `parse` gets the location of the line, for messages, and its object. If it raises a `ConfigError` that begins with
    that location, the line is refused, but the others are still processed.
    """
    name = "standard input" if path == "-" else path
    try:
        with nullcontext(sys.stdin) if path == "-" else Path(path).open(encoding="utf-8") as source:
            for number, line in enumerate(source, 1):
                if line.strip():
                    yield _parse_line(line, f"{name}:{number}", parse)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--input: {name} cannot be read: {error}") from error


def _parse_line(line: str, where: str, parse: Callable[[str, dict[str, Any]], T]) -> T | RefusedLine:
    record: dict[str, Any] = {}
    try:
        record = _json_object(line, where)
        return parse(where, record)
    except ConfigError as error:
        if not str(error).startswith(where):  # the error is not about this line
            raise
        return RefusedLine(record, str(error))


def exit_code_of(refused: int) -> ExitCode:
    """Returns the exit code of a command that has answered all its input lines. Shows how many were `refused`, if
    any."""
    if not refused:
        return ExitCode.FINISHED
    remark(f"error: --input: {counted(refused, 'line was', 'lines were')} refused; the answer to each says why")
    return ExitCode.CONFIG


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: this line is not JSON: {printable(str(error))}; correct it") from error
    except ValueError as error:  # Python's limit for the digits of an integer
        raise ConfigError(f"{where}: a number in this line has too many digits; write it as a string") from error
    if not isinstance(record, dict):
        raise ConfigError(f'{where}: this line must be an object, such as {{"prompt": "…"}}')
    return record


def _mesh(config: "Config", overrides: Sequence[str], devices: int) -> "Mesh":
    from jaxmnt.config.load import apply_overrides, parse_config

    tree: dict[str, Any] = {}
    for key in apply_overrides(tree, list(overrides)):
        if not key.startswith("mesh."):
            raise ConfigError(f"{key}: only the mesh can be set here; all other settings are those of the run")
    if not overrides:
        # Along `model`, a layer's weights stay where they are. Along `fsdp`, each new token would gather all of them.
        axis = "model" if config.model.num_heads % devices == 0 else "fsdp"
        tree = {"mesh": {axis: devices, "data": 1, "allow_split_hosts": True}}
    return parse_config(tree, "the command line").mesh


class _SelectedTokenizer(NamedTuple):
    """The tokenizer of a run."""

    tokenizer: "Tokenizer"
    size: int
    """Number of ids of the run's data."""
    end_of_document: int | None
    """Id that ends a document."""
    chat: "ChatFormat | None" = None
    """The format of the conversations on which the run was trained."""


def _tokenizer(run: str, argument: str | None, checkpoint: "Committed") -> _SelectedTokenizer:
    """Returns a run's tokenizer. `argument` is that of --tokenizer."""
    from jaxmnt.data.manifest import NAMELESS
    from jaxmnt.data.tokenizer import HuggingFace, choose_tokenizer

    recorded = _recorded_tokenizer(run, argument, checkpoint)
    if recorded is not None and recorded.name == "synthetic":
        raise ConfigError("--run: it was trained on random tokens (data.synthetic), which do not represent text")

    # The run has a recorded tokenizer.
    if recorded is not None and recorded.name != NAMELESS:
        tokenizer = recorded.open()
        if argument is not None:
            requested = choose_tokenizer(argument, recorded.description.get("end_token"))
            if requested.description != tokenizer.description:
                raise ConfigError(
                    f"--tokenizer: {argument} is not the tokenizer that the run was trained with; leave the option "
                    "out, because the run has kept its own"
                )
        return _SelectedTokenizer(tokenizer, recorded.vocab_size, recorded.end_of_document, recorded.chat)

    # The run was trained on token arrays, so only the command line can name the tokenizer.
    if argument is None:
        raise ConfigError(
            "--tokenizer: the run was trained on token arrays whose tokenizer is not recorded; give --tokenizer "
            "bytes, or --tokenizer with the path of the tokenizer.json that made them"
        )
    requested = choose_tokenizer(argument)
    if recorded is None:
        return _SelectedTokenizer(requested, requested.vocab_size, requested.end_of_document)
    if isinstance(requested, HuggingFace) and requested.vocab_size != recorded.vocab_size:
        print(
            f"note    --tokenizer: {argument} has {requested.vocab_size} ids, but the run's tokens have "
            f"{recorded.vocab_size}, so it may not be the tokenizer that made them",
            file=sys.stderr,
        )
    return _SelectedTokenizer(requested, recorded.vocab_size, recorded.end_of_document)


def _recorded_tokenizer(run: str, argument: str | None, checkpoint: "Committed") -> "RunTokenizer | None":
    """Returns the tokenizer that the run or its data records. Returns None if neither does but the command line names
    one."""
    from jaxmnt.checkpoint.refs import tokenizer_of

    try:
        return tokenizer_of(run, checkpoint)
    except ConfigError as error:
        if argument is not None:
            return None
        raise ConfigError(
            f"--tokenizer: not given, and the run does not record it: {error}; name bytes or a tokenizer.json"
        ) from error


def check_size(options: argparse.Namespace, name: str, minimum: int = 1) -> None:
    """Raises `ConfigError` if a number from the command line is less than `minimum`."""
    number = int(getattr(options, name))
    if number < minimum:
        raise ConfigError(f"--{name.replace('_', '-')} must be at least {minimum}, not {number}")

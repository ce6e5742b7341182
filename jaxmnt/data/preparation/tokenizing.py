"""The tokenizer of a preparation: given, or trained on the input."""

from collections.abc import Callable, Iterator
from pathlib import Path

from jaxmnt import storage
from jaxmnt.data.manifest import TOKENIZER_FILE
from jaxmnt.data.preparation.inputs import Input, Part
from jaxmnt.data.preparation.part import Job, held_out_documents
from jaxmnt.data.preparation.settings import Settings
from jaxmnt.data.tokenizer import Tokenizer, choose_tokenizer, train_bpe
from jaxmnt.errors import ConfigError
from jaxmnt.storage import publish

_TRAINING_BYTES = 2**28
"""Text that a tokenizer is trained on at most, taken evenly from all parts."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes done and bytes in all."""


def prepare_tokenizer(
    inputs: list[Input], parts: list[Part], output: Path, work: Path, settings: Settings, progress: Progress
) -> Tokenizer | None:
    """The tokenizer, its file in the output. None for token arrays that no tokenizer goes with."""
    if settings.tokenizer is None and settings.train_tokenizer is None:
        return None
    target = output / TOKENIZER_FILE
    if settings.train_tokenizer is not None:
        if not target.exists():
            publish(target, _train(inputs, parts, output, work, settings, progress))
        return choose_tokenizer(str(target), settings.end_token)
    assert settings.tokenizer is not None
    has_text = any(file.kind != "tokens" for file in inputs)
    tokenizer = choose_tokenizer(settings.tokenizer, settings.end_token, for_text=has_text)
    if settings.tokenizer != "bytes" and not target.exists():
        source = Path(settings.tokenizer)
        # The bytes as they are: read as text, their line ends could become others.
        publish(target, storage.read(source / TOKENIZER_FILE if source.is_dir() else source).decode())
    return tokenizer


def check_kinds(inputs: list[Input], settings: Settings) -> None:
    """Text needs a tokenizer, token arrays one of their own, conversations records. Raises `ConfigError`."""
    arrays = [file for file in inputs if file.kind == "tokens"]
    texts = [file for file in inputs if file.kind != "tokens"]
    if texts and settings.tokenizer is None and settings.train_tokenizer is None:
        raise ConfigError(f"--tokenizer: {texts[0].shown} is text and needs one; give it, or leave --vocab-size out")
    if (
        arrays
        and settings.tokenizer in (None, "bytes")
        and settings.train_tokenizer is None
        and not settings.vocab_size
    ):
        raise ConfigError(
            f"--input: {arrays[0].shown} is a token array; give --vocab-size (and --end-id, if an id separates "
            "documents), or the --tokenizer that made it"
        )
    odd = [file for file in inputs if file.kind in ("text", "tokens")]
    if settings.reading.chat and odd:
        raise ConfigError(
            f"--chat: {odd[0].shown} holds no records; give JSON lines or Parquet, or leave others out by --suffix"
        )


def _train(
    inputs: list[Input], parts: list[Part], output: Path, work: Path, settings: Settings, progress: Progress
) -> str:
    """Trains a BPE on documents for training, up to the same number of characters of each part."""
    assert settings.train_tokenizer is not None
    if settings.train_tokenizer < 300:
        raise ConfigError(
            f"--train-tokenizer: {settings.train_tokenizer} leaves no room beside 256 bytes; give 300 or more"
        )
    if not any(file.size for file in inputs if file.kind != "tokens"):
        raise ConfigError("--train-tokenizer: the input has no text to train on; give some")
    if any(file.kind == "tokens" for file in inputs):
        raise ConfigError(
            "--train-tokenizer: token arrays have tokens of another tokenizer; prepare them by themselves"
        )
    assert settings.eval_fraction is not None
    job = Job(inputs, output, work, settings.reading, settings.eval_fraction, True, 0, 0)
    each = max(_TRAINING_BYTES // max(1, len(parts)), 1)
    total = min(sum(file.size for file in inputs), _TRAINING_BYTES)
    done = 0

    def texts() -> Iterator[str]:
        nonlocal done
        for part in parts:
            taken = 0
            for held_out, document in held_out_documents(job, part):
                if taken >= each:
                    break
                for segment in document.segments:
                    if isinstance(segment.content, str) and not segment.markup:
                        taken += len(segment.content)
                        done += len(segment.content)
                        progress("training the tokenizer", min(done, total), total)
                        if not held_out:
                            yield segment.content
                    if taken >= each:
                        break

    return train_bpe(texts(), settings.train_tokenizer)

"""Converts a Hugging Face folder to a run directory with one checkpoint, for step 0, layer by layer in NumPy.

The run can then be trained further (`run.init_from`), sampled from and compared like any other run. The conversion
needs no accelerator.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmnt.checkpoint.names import arrays_by_name
from jaxmnt.checkpoint.new_run import begin_checkpoint, commit_run, new_folder
from jaxmnt.config.load import parse_config
from jaxmnt.config.schema import Config
from jaxmnt.data import run_tokenizer
from jaxmnt.data.run_tokenizer import RunTokenizer
from jaxmnt.data.tokenizer import TOKENIZER_FILE, HuggingFace
from jaxmnt.errors import ConfigError, printable
from jaxmnt.huggingface import companions
from jaxmnt.huggingface.config import read_config
from jaxmnt.huggingface.folder import CONFIG, Folder, StoredTensor, read_json
from jaxmnt.huggingface.tensors import Part, Parts, round_to
from jaxmnt.models.contract import Definition, define
from jaxmnt.models.registry import build_family, family_class

STEP = 0
_DEFAULT_SEQUENCE_LENGTH = 4096
"""`data.sequence_length` for a model whose config.json does not limit the length of texts."""


def make_run(folder: Folder, out: Path, dtype: str, report_progress: Callable[[str], None]) -> Path:
    """Writes a new run directory, and returns the path of its checkpoint.

    `dtype` is the dtype of the parameters, float32 or bfloat16. `report_progress` is called with the name of each
    parameter. Raises `ConfigError` if the folder has no known model, or if the directory exists,
    and `UserError` if it cannot be written. An error leaves no directory.
    """
    with new_folder(out):
        config = run_config(folder, out, dtype)
        vocab_size = config.model.vocab_size
        assert vocab_size is not None
        definition = define(build_family(config.model, vocab_size))
        parts_by_parameter, stored_tensors = folder.match_tensors(definition)
        folder.check_tied_head(definition.family)
        tokenizer = read_tokenizer(folder, vocab_size)
        return _write_run(
            out, config, definition, parts_by_parameter, stored_tensors, tokenizer, folder, dtype, report_progress
        )


def _write_run(
    out: Path,
    config: Config,
    definition: Definition,
    parts_by_parameter: Parts,
    stored_tensors: dict[str, StoredTensor],
    tokenizer: RunTokenizer | None,
    folder: Folder,
    dtype: str,
    report_progress: Callable[[str], None],
) -> Path:
    """Writes the files of the run directory `out`, and returns the path of the checkpoint."""
    writer = begin_checkpoint(out, STEP)
    for name, leaf in arrays_by_name({"params": definition.abstract}).items():
        report_progress(name)
        writer.create(name, leaf.shape, np.dtype(dtype))
        parts = parts_by_parameter[name.removeprefix("params/")]
        for start, array in _read_layers(folder, parts, stored_tensors, leaf):
            writer.write(name, start, round_to(array, np.dtype(dtype), name))
    folder.close()
    for name, array in arrays_by_name({"buffers": jax.device_get(definition.initial_buffers())}).items():
        writer.create(name, array.shape, array.dtype)
        writer.write(name, (0,) * array.ndim, array)
    path = commit_run(out, config, writer, STEP)
    companions.write_run_files(out, companions.read_files(folder.path))
    if tokenizer is not None:
        run_tokenizer.write_tokenizer(out, tokenizer)
    return path


def run_config(folder: Folder, out: Path, dtype: str) -> Config:
    """Returns the config for a run with the folder's model. Its sequences are as long as the model supports."""
    settings = read_config(folder.config, str(folder.path / CONFIG))
    hf_format = family_class(settings["family"]).hugging_face
    assert hf_format is not None
    text_config = folder.config
    if hf_format.nested:
        _, config_key = hf_format.nested
        text_config = folder.config.get(config_key, folder.config)
    default = hf_format.assumed.get("max_position_embeddings", _DEFAULT_SEQUENCE_LENGTH)
    sequence_length = settings.get("max_positions", text_config.get("max_position_embeddings", default))
    return parse_config(
        {
            "run": {"dir": str(out)},
            "model": settings,
            "train": {"params_dtype": dtype},
            "data": {"sequence_length": sequence_length},
        },
        str(folder.path / CONFIG),
    )


def read_tokenizer(folder: Folder, vocab_size: int) -> RunTokenizer | None:
    """Returns the tokenizer of a folder in the form in which a run stores it. Returns None if there is no
    tokenizer.json and the tokens are not bytes, or if no token ends a text.

    The end of a document is the `eos_token` of tokenizer_config.json. Raises `ConfigError` if the tokenizer has ids
    that are not below `vocab_size`.
    """
    path = folder.path / TOKENIZER_FILE
    if not path.is_file():
        return companions.bytes_tokenizer(folder, vocab_size)
    end_token = None
    if (folder.path / "tokenizer_config.json").is_file():
        end_token = read_json(folder.path / "tokenizer_config.json", "tokenizer").get("eos_token")
        end_token = end_token.get("content") if isinstance(end_token, dict) else end_token
    ids = HuggingFace(path).ids
    if isinstance(end_token, str) and end_token not in ids:
        raise ConfigError(
            f"{path} has no token {printable(end_token)}, which tokenizer_config.json names; copy both again"
        )
    tokenizer = HuggingFace(path, end_token if isinstance(end_token, str) else None)
    # Special tokens do not count, because Gemma 3's text models have one whose id has no row.
    largest_id = max((number for word, number in ids.items() if word not in tokenizer.special), default=0)
    if largest_id >= vocab_size:
        raise ConfigError(
            f"{path} has ids up to {largest_id}, but the vocabulary of the model has {vocab_size} rows, so it is not "
            "the model's tokenizer; copy the right one"
        )
    if tokenizer.end_of_document is None or tokenizer.end_of_document >= vocab_size:
        return None  # no token ends a text, so generate needs --tokenizer
    return RunTokenizer(tokenizer.description, vocab_size, path.read_text(encoding="utf-8"))


def _read_layers(
    folder: Folder, parts: list[Part], stored_tensors: dict[str, StoredTensor], leaf: jax.ShapeDtypeStruct
) -> Any:
    """Yields the first index and the array of each part of a parameter: of each layer or expert, or of the parameter if
    it is not stacked."""
    stack = leaf.shape[: len(leaf.shape) - len(parts[0].shape)]
    for index, part in zip(np.ndindex(stack), parts, strict=True):
        stored = stored_tensors[part.name]
        matrix = np.empty(part.matrix_shape, stored.dtype)
        folder.read(stored, part.offset, matrix)
        array = part.to_parameter(matrix)
        yield (*index, *[0] * array.ndim), array.reshape((1,) * len(stack) + array.shape)

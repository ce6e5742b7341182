"""A folder of Hugging Face as a run directory with one checkpoint, of step 0, made layer by layer in NumPy.

So that it can be trained further (`run.init_from`), sampled from and compared like any other; no accelerator is needed.
"""

import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmnt.checkpoint.arrays import Writer
from jaxmnt.checkpoint.commit import begin, commit
from jaxmnt.checkpoint.manifest import Manifest
from jaxmnt.checkpoint.names import named
from jaxmnt.checkpoint.refs import CHECKPOINTS, RUN_FILE
from jaxmnt.config.load import dump_config, parse_config
from jaxmnt.config.schema import Config
from jaxmnt.data import run_tokenizer
from jaxmnt.data.run_tokenizer import RunTokenizer
from jaxmnt.data.tokenizer import TOKENIZER_FILE, HuggingFace
from jaxmnt.errors import ConfigError, printable
from jaxmnt.huggingface import companions
from jaxmnt.huggingface.config import read_config
from jaxmnt.huggingface.folder import CONFIG, Folder, Stored, read_json
from jaxmnt.huggingface.tensors import Part, rounded
from jaxmnt.models.contract import define
from jaxmnt.models.registry import build_family, family_class
from jaxmnt.storage import publish
from jaxmnt.strict_json import json_text

STEP = 0
_LONGEST = 4096
"""What `data.sequence_length` is said to be, where the model does not tell how long its texts may be."""


def make_run(folder: Folder, out: Path, dtype: str, tell: Callable[[str], None]) -> Path:
    """Writes a new run directory, and returns where its checkpoint is.

    `dtype` is that of the parameters, float32 or bfloat16. `tell` hears the name of each. Raises `ConfigError` for a
    folder that is not a known model, and for a directory that is there already.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already; name a new folder")
    config = config_for(folder, out, dtype)
    rows = config.model.vocab_size
    assert rows is not None
    definition = define(build_family(config.model, rows))
    parts, stored = folder.check(definition)
    folder.refuse_another_head(definition.family)
    tokenizer = tokenizer_in(folder, rows)
    path = out / CHECKPOINTS / str(STEP)
    path.parent.mkdir(parents=True)
    begin(path)
    writer = Writer(path)
    try:
        for name, leaf in named({"params": definition.abstract}).items():
            tell(name)
            writer.create(name, leaf.shape, np.dtype(dtype))
            for start, array in _layers(folder, parts[name.removeprefix("params/")], stored, leaf):
                writer.write(name, start, rounded(array, np.dtype(dtype), name))
    except ConfigError:
        shutil.rmtree(out)  # which this call has made
        raise
    folder.close()
    run = secrets.token_hex(6)
    tree = config.model_dump(exclude={"cluster", "launch", "slurm", "gke"})
    commit(path, Manifest(run, STEP, writer.finish(), tree, tokens=0, data={}, loss=None, lineage=[]))
    (out / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    publish(out / RUN_FILE, json_text({"run": run, "lineage": [], "time": time.time()}, indent=1) + "\n")
    companions.keep(out, companions.found_in(folder.path))
    if tokenizer is not None:
        run_tokenizer.write_to_run(out, tokenizer)
    return path


def config_for(folder: Folder, out: Path, dtype: str) -> Config:
    """The config of a run of this model: its section `model`, and the longest texts that it is made for."""
    settings = read_config(folder.config, str(folder.path / CONFIG))
    written = family_class(settings["family"]).hugging_face
    assert written is not None
    own = folder.config.get(written.nested[1], folder.config) if written.nested else folder.config
    longest = own.get("max_position_embeddings", written.assumed.get("max_position_embeddings", _LONGEST))
    longest = settings.get("max_positions", longest)
    return parse_config(
        {
            "run": {"dir": str(out)},
            "model": settings,
            "train": {"params_dtype": dtype},
            "data": {"sequence_length": longest},
        },
        str(folder.path / CONFIG),
    )


def tokenizer_in(folder: Folder, rows: int) -> RunTokenizer | None:
    """The tokenizer of a folder, as a run keeps it; None if there is no tokenizer.json and its tokens are not bytes.

    What ends a document is what its config says ends a text, `eos_token`. Raises `ConfigError` if the tokenizer has
    more ids than the model has `rows`.
    """
    path = folder.path / TOKENIZER_FILE
    if not path.is_file():
        return companions.bytes_of(folder, rows)
    end = None
    if (folder.path / "tokenizer_config.json").is_file():
        end = read_json(folder.path / "tokenizer_config.json", "tokenizer").get("eos_token")
        end = end.get("content") if isinstance(end, dict) else end
    ids = HuggingFace(path).ids
    if isinstance(end, str) and end not in ids:
        raise ConfigError(f"{path} has no token {printable(end)}, which tokenizer_config.json names; copy both again")
    found = HuggingFace(path, end if isinstance(end, str) else None)
    ordinary = max((number for word, number in ids.items() if word not in found.special), default=0)
    if ordinary >= rows:  # Gemma 3's text models have one special token more than rows
        raise ConfigError(
            f"{path} has ids up to {ordinary}, and the model {rows} rows; it is not the model's tokenizer"
        )
    if found.end_of_document is None or found.end_of_document >= rows:
        return None  # nothing says what ends a text, so generate has to be told
    return RunTokenizer(found.description, rows, path.read_text(encoding="utf-8"))


def _layers(folder: Folder, parts: list[Part], stored: dict[str, Stored], leaf: jax.ShapeDtypeStruct) -> Any:
    """Each layer of a parameter, or all of it, with the index where it begins."""
    stacked = len(leaf.shape) > len(parts[0].shape)
    for number, part in enumerate(parts):
        matrix = np.empty(part.matrix, stored[part.name].dtype)
        folder.read(stored[part.name], part.offset, matrix)
        array = part.to_parameter(matrix)
        start = (number, *(0 for _ in part.shape)) if stacked else (0,) * array.ndim
        yield start, array[None] if stacked else array

"""Parameters as safetensors files, for whatever reads those."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxmnt.checkpoint import digest
from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.manifest import DamagedError
from jaxmnt.checkpoint.reader import Reader
from jaxmnt.data.run_tokenizer import RunTokenizer
from jaxmnt.data.tokenizer import TOKENIZER_FILE
from jaxmnt.errors import ConfigError

_INDEX = "model.safetensors.index.json"


def export(
    checkpoint: Committed,
    folder: Path,
    file_bytes: int,
    tell: Callable[[str], None] = lambda name: None,
    tokenizer: RunTokenizer | None = None,
) -> list[Path]:
    """Writes the parameters into a new `folder`, in files of about `file_bytes`, each array whole, with their index.

    Names are those of the checkpoint without `params/`, with dots; layers stay stacked in their first dimension. The
    config lies beside them, and the tokenizer: its tokenizer.json, if it has one, and what the run knows of it. Each
    array is compared with its digest first: raises `DamagedError`.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists already; name a new folder")
    manifest = checkpoint.manifest
    names = [name for name in sorted(manifest.arrays) if name.startswith("params/")]
    groups: list[list[str]] = [[]]
    room = file_bytes
    for name in names:
        if groups[-1] and manifest.arrays[name].bytes > room:
            groups.append([])
            room = file_bytes
        groups[-1].append(name)
        room -= manifest.arrays[name].bytes
    building = folder.with_name(f".{folder.name}.building")
    building.mkdir(parents=True)
    reader, written, places = Reader(checkpoint, names), [], {}
    for number, group in enumerate(groups):
        path = building / (
            f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        )
        tensors = {}
        for name in group:
            tell(name)
            tensors[_dotted(name)] = _read_verified(reader, checkpoint, name)
            places[_dotted(name)] = path.name
        save_file(tensors, path, metadata={"format": "np", "run": manifest.run, "step": str(manifest.step)})
        written.append(folder / path.name)
    total = sum(manifest.arrays[name].bytes for name in names)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (building / _INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    (building / "jaxmnt-config.json").write_text(json.dumps(manifest.config, indent=1) + "\n", encoding="utf-8")
    if tokenizer is not None:
        about = {"tokenizer": tokenizer.description, "vocab_size": tokenizer.vocab_size}
        (building / "jaxmnt-tokenizer.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        if tokenizer.text is not None:
            (building / TOKENIZER_FILE).write_bytes(tokenizer.text.encode())
    for path in sorted(building.glob("*.safetensors")):  # which are made for their owner alone, whatever the umask
        path.chmod((building / _INDEX).stat().st_mode & 0o777)
    building.rename(folder)
    return written


def _read_verified(reader: Reader, checkpoint: Committed, name: str) -> np.ndarray:
    array = reader.read(name)
    found = digest.to_text(digest.block_digest(array, (0,) * array.ndim, array.shape))
    if found != checkpoint.manifest.arrays[name].content:
        raise DamagedError(f"checkpoint {checkpoint.path}: array {name} is not what was saved")
    return array


def _dotted(name: str) -> str:
    return name.removeprefix("params/").replace("/", ".")

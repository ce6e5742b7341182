"""Writes the adapters of a checkpoint as a folder for PEFT."""

from dataclasses import dataclass
from pathlib import Path

from jaxmnt.checkpoint.arrays import Reader
from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.new_run import new_folder
from jaxmnt.config.load import HUGGING_FACE_PREFIX
from jaxmnt.lora.peft_format import write_folder
from jaxmnt.models.registry import define_model


@dataclass(frozen=True)
class WrittenAdapters:
    """Describes what a folder for PEFT contains."""

    weights: int
    """Number of parameters with adapters, each of all its layers."""
    rank: int
    base: str | None
    """The folder of the base; None if the base is a run, which PEFT cannot read."""
    whole: list[str]
    """The names of the parameters that were trained as a whole."""


def write_peft(checkpoint: Committed, out: Path) -> WrittenAdapters:
    """Writes the adapters of a checkpoint into the new folder `out`.

    Raises `ConfigError` for adapters that PEFT does not have, and `DamagedError`. An error leaves no folder.
    """
    config, recorded = checkpoint.config, checkpoint.manifest.base
    assert recorded is not None and config.lora is not None
    definition = define_model(config.model, config.lora)
    assert definition.adapters is not None
    names = [name for name in sorted(checkpoint.manifest.arrays) if name.startswith("params/")]
    reader, arrays = Reader(checkpoint, names), {}
    with new_folder(out):
        out.mkdir(parents=True)
        for name in names:
            arrays[name] = reader.read_verified(name).astype("float32")
        is_folder = recorded.source.startswith(HUGGING_FACE_PREFIX)
        base = recorded.source.removeprefix(HUGGING_FACE_PREFIX) if is_folder else None
        write_folder(out, config.lora, definition, arrays, base)
    adapters = definition.adapters
    return WrittenAdapters(len(adapters.names), config.lora.rank, base, list(adapters.also_trained))

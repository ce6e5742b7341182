"""Converts adapters of PEFT to a run directory with one checkpoint, for step 0, without an accelerator."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxmnt.checkpoint.manifest import Base
from jaxmnt.checkpoint.names import arrays_by_name
from jaxmnt.checkpoint.new_run import begin_checkpoint, commit_run, new_folder
from jaxmnt.config.load import HUGGING_FACE_PREFIX
from jaxmnt.data import run_tokenizer
from jaxmnt.errors import ConfigError, printable
from jaxmnt.huggingface import companions
from jaxmnt.huggingface.folder import Folder
from jaxmnt.huggingface.run_from import STEP, read_tokenizer, run_config
from jaxmnt.lora.host import HostBase
from jaxmnt.lora.peft_format import arrays_from, read_folder, settings_of
from jaxmnt.models.registry import define_model

_KEY = "from-peft"


@dataclass(frozen=True)
class MadeRun:
    """A run directory made from adapters."""

    path: Path
    """The checkpoint."""
    base: Path
    dropout: float
    """The dropout that the adapters were trained with."""


def make_adapter_run(
    folder: Path, out: Path, named_base: str | None, report_progress: Callable[[str], None] = lambda name: None
) -> MadeRun:
    """Writes a new run directory with the adapters in `folder`. `named_base` is the folder of their base; None: the
    folder that the adapters name.

    `report_progress` is called with the name of each parameter of the base. Raises `ConfigError` if a folder has no
    such model or adapters, or if the directory exists. An error leaves no directory.
    """
    adapters = read_folder(folder, _KEY)
    text = named_base or adapters.base
    if text is None:
        raise ConfigError(f"{_KEY}: {folder} does not name its base; give its folder with --base")
    base = Path(text.removeprefix(HUGGING_FACE_PREFIX)).absolute()
    if not base.is_dir():
        source = f"{folder} names the base" if named_base is None else "--base is"
        raise ConfigError(
            f"{_KEY}: {source} {printable(text)}, which is not a folder here; give its folder with --base"
        )
    base_folder, source = Folder(base, "--base"), f"{HUGGING_FACE_PREFIX}{base}"
    with new_folder(out):
        config = run_config(base_folder, out, "float32")
        plain = define_model(config.model, config.lora)
        lora = settings_of(adapters, plain, _KEY)
        config = config.model_copy(update={"lora": lora}).changed({"run.init_from": source})
        definition = define_model(config.model, config.lora)
        arrays = arrays_from(adapters, definition, _KEY)
        host_base = HostBase(source, plain, None, "--base")
        entries = {}
        for name in host_base.names:
            if name not in arrays:
                report_progress(name)
                entries[name] = host_base.describe(name)
        writer = begin_checkpoint(out, STEP)
        buffers = arrays_by_name({"buffers": jax.device_get(definition.initial_buffers())})
        for name, array in sorted((arrays | buffers).items()):
            writer.create(name, array.shape, array.dtype)
            writer.write(name, (0,) * array.ndim, array)
        path = commit_run(out, config, writer, STEP, base=Base(source, entries))
        companions.write_run_files(out, companions.read_files(base))
        tokenizer = read_tokenizer(base_folder, config.model.vocab_size or 0)
        if tokenizer is not None:
            run_tokenizer.write_tokenizer(out, tokenizer)
    return MadeRun(path, base, adapters.dropout)

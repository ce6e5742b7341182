"""Begins and resumes runs with adapters, whose checkpoints do not contain the frozen parameters."""

import time
from dataclasses import dataclass

import jax

from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.manifest import Base
from jaxmnt.checkpoint.names import arrays_by_name
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError
from jaxmnt.lora.base import load_base
from jaxmnt.lora.start import load_adapters
from jaxmnt.models.contract import Params
from jaxmnt.training.compile import Program
from jaxmnt.training.trained import fill_in, select_frozen


@dataclass(frozen=True)
class AdaptedStart:
    """The parameters with which a run with adapters begins or goes on."""

    params: Params
    """All parameters, in the checkpoint layout."""
    base: Base
    bytes: int
    """Number of bytes of the base that this process has read."""
    seconds: float


def begin_with_adapters(program: Program, source: str, identity: Identity) -> AdaptedStart:
    """Returns the parameters of a new run: those of `source`, and new adapters or those of `lora.init_from`."""
    started = time.perf_counter()
    spec, abstract = program.spec, program.canonical_abstract_state["params"]
    lora = spec.config.lora
    assert lora is not None
    adapters = program.initial_adapters()
    is_none = lambda node: node is None
    others = jax.tree.map(lambda adapter, leaf: leaf if adapter is None else None, adapters, abstract, is_leaf=is_none)
    frozen = arrays_by_name({"params": select_frozen(abstract, spec.trained_axes)}).keys()
    loaded = load_base(source, spec.definition, others, identity, frozen_names=set(frozen))
    params = fill_in(loaded.params, adapters)
    if lora.init_from is not None:
        params = load_adapters(lora.init_from, spec, params, loaded.base, identity)
    return AdaptedStart(params, loaded.base, loaded.bytes, time.perf_counter() - started)


def complete_with_base(program: Program, checkpoint: Committed, trained: Params, identity: Identity) -> AdaptedStart:
    """Returns all parameters of a run: those that the checkpoint contains, `trained`, and its base.

    Raises `ConfigError` if the base is not what the run was trained on.
    """
    started = time.perf_counter()
    spec, recorded = program.spec, checkpoint.manifest.base
    if recorded is None:
        raise ConfigError(f"lora: checkpoint {checkpoint.path} was written without adapters; remove the section lora")
    frozen = select_frozen(program.canonical_abstract_state["params"], spec.trained_axes)
    source = base_source(spec.config.run.init_from, checkpoint)
    loaded = load_base(source, spec.definition, frozen, identity, recorded=recorded)
    return AdaptedStart(fill_in(trained, loaded.params), loaded.base, loaded.bytes, time.perf_counter() - started)


def base_source(init_from: str | None, checkpoint: Committed) -> str:
    """Returns the source of the base: the recorded one, unless the config names another place than the checkpoint's
    config does."""
    assert checkpoint.manifest.base is not None
    moved = init_from is not None and init_from != checkpoint.config.run.init_from
    return str(init_from) if moved else checkpoint.manifest.base.source

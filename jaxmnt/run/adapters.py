"""Begins and resumes runs with adapters, whose checkpoints do not contain the frozen parameters."""

import time
from dataclasses import dataclass

import jax

from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.manifest import Base
from jaxmnt.checkpoint.names import arrays_by_name
from jaxmnt.distributed.identity import Identity
from jaxmnt.lora.base import load_base, usable_source
from jaxmnt.lora.start import load_adapters, open_adapters
from jaxmnt.models.contract import Params
from jaxmnt.training.compile import Program
from jaxmnt.training.trained import fill_in, select_frozen, select_trained


@dataclass(frozen=True)
class AdaptedStart:
    """The parameters with which a run with adapters begins or goes on."""

    params: Params
    """All parameters, in the checkpoint layout."""
    base: Base
    bytes: int
    """Number of bytes of the base that this process has read."""
    seconds: float


def begin_with_adapters(program: Program, source: str, identity: Identity, *, spread: bool = False) -> AdaptedStart:
    """Returns the parameters of a new run: those of `source`, and new adapters or those of `lora.init_from`. `spread`
    is as in `load_base`."""
    started = time.perf_counter()
    spec, abstract = program.spec, program.canonical_abstract_state["params"]
    lora = spec.config.lora
    assert lora is not None
    origin = None if lora.init_from is None else open_adapters(lora.init_from, spec.config, identity)
    adapters = program.initial_adapters()
    is_none = lambda node: node is None
    others = jax.tree.map(lambda adapter, leaf: leaf if adapter is None else None, adapters, abstract, is_leaf=is_none)
    frozen = arrays_by_name({"params": select_frozen(abstract, spec.trained_axes)}).keys()
    # Adapters of another run belong to its base, which is proved by its digests.
    recorded, owner = (None, "this run") if origin is None else (origin.base, f"the run {lora.init_from}")
    loaded = load_base(
        source, spec.definition, others, identity, frozen_names=set(frozen), recorded=recorded, owner=owner,
        spread=spread,
    )  # fmt: skip
    params = fill_in(loaded.params, adapters)
    if origin is not None:
        trained = select_trained(params, spec.trained_axes)
        params = fill_in(load_adapters(origin, trained, identity), select_frozen(params, spec.trained_axes))
    return AdaptedStart(params, loaded.base, loaded.bytes, time.perf_counter() - started)


def complete_with_base(
    program: Program, checkpoint: Committed, trained: Params, identity: Identity, *, spread: bool = False
) -> AdaptedStart:
    """Returns all parameters of a run: those that the checkpoint contains, `trained`, and its base. `spread` is as in
    `load_base`.

    Raises `ConfigError` if the base is not what the run was trained on.
    """
    started = time.perf_counter()
    spec, recorded = program.spec, checkpoint.manifest.base
    assert recorded is not None, "a run cannot go on with another section lora"
    frozen = select_frozen(program.canonical_abstract_state["params"], spec.trained_axes)
    init_from, earlier = spec.config.run.init_from, checkpoint.config.run.init_from
    has_moved = init_from is not None and init_from != earlier
    source = str(init_from) if has_moved else usable_source(recorded, earlier)
    loaded = load_base(source, spec.definition, frozen, identity, recorded=recorded, spread=spread)
    return AdaptedStart(fill_in(trained, loaded.params), loaded.base, loaded.bytes, time.perf_counter() - started)

"""What a config multiplies and how it is spread, as the numbers that the estimate takes."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import jax

from jaxmnt.models.contract import Definition
from jaxmnt.parallel.sharding import GATHERED, RULES, SCALES_AND_BIASES, Overlap, is_axes
from jaxmnt.plan.chips import CHIPS, Chip
from jaxmnt.plan.estimate import Estimate, estimate
from jaxmnt.plan.rates import rates_of
from jaxmnt.plan.workload import Layer, ModelShape, Product, Scheme, Software
from jaxmnt.training.levers import kept_bytes
from jaxmnt.training.pipeline_schedule import PipelineSchedule
from jaxmnt.training.spec import StepSpec


def model_shape(definition: Definition) -> ModelShape:
    """Read off a model's parameters, their logical axes, and `Family.attention_shape`."""
    family, config = definition.family, definition.family.config
    layers = Counter[Layer]()
    for group in definition.groups:
        for place, kind in enumerate(group.pattern):
            inside = lambda tree, group=group, place=place: group.at(tree[group.name], place)
            shape = family.attention_shape(kind)
            products = tuple(_products(inside(definition.abstract), inside(definition.axes)))
            layers[Layer(products, shape.heads, config.num_kv_heads or 0, shape.head_dim, shape.window)] += group.units
    counted = tuple((count, layer) for layer, count in layers.items())
    found = ModelShape(counted, config.hidden_size, definition.vocab_size, config.tie_embeddings)
    return replace(found, others=definition.parameter_count - found.parameters)


def _products(arrays: Any, axes: Any) -> list[Product]:
    """One for each weight of a layer: stacked arrays, whose first dimension is that of the stack."""
    found = []
    leaves = zip(jax.tree.leaves(arrays), jax.tree.leaves(axes, is_leaf=is_axes), strict=True)
    for leaf, names in leaves:
        if SCALES_AND_BIASES & {*names}:
            continue
        hidden = next((place for place, name in enumerate(names) if name in GATHERED), None)
        sizes, named = leaf.shape[1:], names[1:]
        if hidden is None:
            found.append(Product(sizes[0], math.prod(sizes[1:]), ""))
            continue
        width, other = leaf.shape[hidden], math.prod(sizes) // leaf.shape[hidden]
        split = any("model" in RULES.get(name or "", ()) for name in named)
        if hidden == 1:
            found.append(Product(width, other, "outputs" if split else ""))
        else:
            found.append(Product(other, width, "inputs" if split else ""))
    return found


def scheme_of(spec: StepSpec) -> Scheme:
    """How a step is spread over its mesh, and what a microbatch leaves on a device."""
    config, sizes, schedule = spec.config, spec.placement.sizes, spec.schedule
    return Scheme(
        length=config.data.sequence_length,
        rows=spec.microbatch_rows,
        microbatches=spec.num_microbatches,
        data=sizes["data"],
        pipeline=sizes["pipeline"],
        fsdp=sizes["fsdp"],
        context=sizes["context"],
        model=sizes["model"],
        zero=spec.zero,
        chunks=schedule.chunks,
        idle=schedule.idle_share(),
        ticks=schedule.ticks,
        remat=config.train.remat if config.train.remat != "names" else "full",
        dtype=spec.dtype.name if spec.float8 is None else "float8",
        float8_least=config.train.float8_least,
        kept=kept_bytes(spec) * schedule.chunks / slots_of(schedule),
    )


def slots_of(schedule: PipelineSchedule) -> int:
    """Microbatches of a chunk that a stage keeps at most."""
    return schedule.slots()[2] if schedule.stages > 1 else 1


def chip_of(spec: StepSpec) -> Chip | None:
    """The data sheet of the spec's devices; None for those that are not known, such as CPUs."""
    kind = spec.placement.mesh.devices.flat[0].device_kind
    return next((chip for chip in CHIPS.values() if chip.kind == kind), None)


HIDES_MODEL = {"off": 0.13, "ring": 0.6, "rows": 0.31}
"""The share of communication over `model` that is behind products, by `model.overlap`."""


def software_of(scheme: Scheme, overlap: Overlap, *, prefetch: bool = True) -> Software:
    """What this program does with a scheme on GPUs. Its constants are chosen so that steps of some fifty compiled
    programs are met as they are played; `benchmarks/plan_estimates.py` says how far off they are."""
    ahead = scheme.zero == 3 and scheme.pipeline == 1 and prefetch
    return Software(
        passes=0.83,
        weight_bytes=30.0,
        hides_gathers=1.0,
        hides_ends=0.02,
        least_exposed=0.01 if ahead else 0.13 if scheme.zero == 3 else 0.72,
        hides_sum=0.23 if ahead else 0.0,
        hides_model=HIDES_MODEL[overlap],
        exposes_stages=0.98,
    )


def expected_step(spec: StepSpec) -> Estimate | None:
    """A step of a run on the devices that it has, by their data sheets, and in their vendor's own systems; None on
    those that are not known, such as CPUs."""
    if (chip := chip_of(spec)) is None:
        return None
    scheme = scheme_of(spec)
    software = software_of(scheme, spec.placement.overlap)
    return estimate(model_shape(spec.definition), scheme, rates_of(chip), chip.domain, software)

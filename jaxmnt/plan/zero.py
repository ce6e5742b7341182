"""Chooses the ZeRO stage for `mesh.zero: auto`, and compares it with the other stages.

The step time and memory of each stage are estimated from shapes (`estimate.py`, `memory.py`). Let f be the number of
devices among which weights are sharded, and A the number of microbatches. Let W be the number of weights in a device's
layers and E that in its part of embedding and head, both counted after the gather. Let c be the bytes per number of the
compute dtype, and r those of the reduce dtype. In a step, a device sends (f - 1) / f times

    ZeRO 3    A (2 W + E) c + A (W + E) r
    ZeRO 2      (W + E) c   + A (W + E) r
    ZeRO 1      (W + E) c   +   (W + E) r

ZeRO 2 and 1 keep all gathered weights in memory for the whole step, which are (W + E) c bytes. ZeRO 1 also keeps all
gradients.

The choice depends only on the config, the mesh, and the GPU's data sheet and the network of its vendor's own systems.
It does not depend on free memory, measured rates or an instance's network. So a run and its dry run choose the same
stage.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxmnt.config.mesh import GATHERING_AXES
from jaxmnt.distributed.gpu_settings import OUR_MEMORY_FRACTION
from jaxmnt.plan.budget import weight_traffic
from jaxmnt.plan.chips import Chip, chip_of
from jaxmnt.plan.estimate import estimate
from jaxmnt.plan.memory import estimate_memory, state_bytes
from jaxmnt.plan.rates import rates_of
from jaxmnt.plan.workload import model_shape, scheme_of
from jaxmnt.training.memory_suggestions import residual_bytes
from jaxmnt.training.spec import StepSpec
from jaxmnt.units import seconds_text, size

STAGES = (3, 2, 1)
"""ZeRO stages. A stage needs no more memory than those that follow it."""
MIN_SPEEDUP = 1.03
"""Factor by which a stage that needs more memory must be faster to be chosen. Estimates for one mesh usually differ by
more."""
USABLE_SHARE = 0.95
"""Share of a device's usable memory that a step may need by estimate. Few compiled programs need 3 % more than
estimated (`benchmarks/plan_estimates.py`)."""
_LEAST_MEMORY_REASON = "so the stage is 3, which needs least memory"
MAX_SLOWDOWN = 1.1
"""A configured stage is reported if it takes more than this multiple of the time of the best stage."""


class Stage(NamedTuple):
    """A ZeRO stage with its estimates."""

    zero: int
    sent: float
    """Bytes of weights and gradients that a device sends in a step."""
    seconds: float | None
    """Step time; None if the devices' rates are unknown."""
    peak: float | None
    """Bytes that a device needs at the peak of a step; None if the devices are unknown."""


@dataclass(frozen=True)
class ZeroChoice:
    """The ZeRO stage of a run, with the alternatives."""

    zero: int
    is_auto: bool
    """True if the config leaves the choice open."""
    stages: tuple[Stage, ...]
    limit: float | None
    """Usable bytes of a device, if known."""
    reason: str = ""
    """The reason if the stage was not chosen by its estimate; otherwise empty."""

    def fits(self, stage: Stage) -> bool:
        """Returns True if a stage fits by estimate, with some memory kept free."""
        return stage.peak is not None and self.limit is not None and stage.peak <= USABLE_SHARE * self.limit

    @property
    def best(self) -> Stage | None:
        """The fastest stage that fits; None without estimates, or if none fits."""
        fitting = [(stage.seconds, stage) for stage in self.stages if stage.seconds is not None and self.fits(stage)]
        return min(fitting)[1] if fitting else None

    def lines(self, *, resumed: bool = False) -> list[str]:
        """Returns the line that a start and a plan print about an automatic choice or about a costly setting, or none.
        `resumed` is True if an earlier start of the run made the choice."""
        if resumed:
            return [f"zero    {self.zero}, as this run began (mesh.zero: auto)", *self._cost_note()]
        if self.is_auto:
            why = f"; {self.reason}" if self.reason else ""
            stages = ", ".join(self._describe(stage) for stage in self.stages)
            return [f"zero    {self.zero}, chosen by mesh.zero: auto ({stages}{why})"]
        return self._cost_note()

    def _cost_note(self) -> list[str]:
        """Returns a note if the stage takes much longer than the best one."""
        [configured] = [stage for stage in self.stages if stage.zero == self.zero]
        best = self.best
        if (
            best is None
            or best.seconds is None
            or configured.seconds is None
            or configured.seconds <= MAX_SLOWDOWN * best.seconds
        ):
            return []
        cost = configured.seconds / best.seconds - 1
        return [
            f"note    mesh.zero: {self.zero} costs {cost:.0%} of a step's time: about {self._describe(configured)}, "
            f"{self._describe(best)}; set mesh.zero={best.zero}"
        ]

    def _describe(self, stage: Stage) -> str:
        """Returns the estimates of a stage in words."""
        sends = f"sends {size(stage.sent)}"
        if stage.seconds is None or stage.peak is None or self.limit is None:
            return f"{stage.zero} {sends}"
        needs = f"needs {size(stage.peak)} of {size(self.limit)}"
        if stage.peak > self.limit:
            needs += ", too much"
        elif not self.fits(stage):
            needs += f", too much with {size((1 - USABLE_SHARE) * self.limit)} kept free"
        return f"{stage.zero} takes {seconds_text(stage.seconds)}, {sends} and {needs}"

    def to_json(self) -> dict[str, Any]:
        stages = [stage._asdict() | {"fits": self.fits(stage)} for stage in self.stages]
        return {"zero": self.zero, "auto": self.is_auto, "stages": stages, "limit": self.limit}


def resolve_zero(spec: StepSpec) -> tuple[StepSpec, ZeroChoice | None]:
    """Returns the spec with a number for `mesh.zero`, and how it was chosen. The latter is None if nothing is sharded,
    because all stages are then equal."""
    choice = choose_zero(spec, chip_of(_device_kind(spec)))
    return spec.with_zero(spec.zero if choice is None else choice.zero), choice


def choose_zero(spec: StepSpec, chip: Chip | None) -> ZeroChoice | None:
    """Returns the ZeRO stage of a step, with the alternatives, or None if nothing is sharded.

    `chip` is the data sheet of the GPUs. Without it, on CPUs and unknown GPUs, `auto` is 3, because memory differs
    between machines of one kind.
    """
    gathering_axes = spec.placement.mesh_axes("embed")
    if not gathering_axes:
        return None
    mesh = spec.config.mesh
    is_auto = mesh.zero == "auto"
    if chip is None or not {*gathering_axes} <= {*GATHERING_AXES}:
        no_data_sheet = f"there is no data sheet for {_device_kind(spec)} devices"
        reason = ("mesh.rules for embed have no estimate" if chip else no_data_sheet) + f", {_LEAST_MEMORY_REASON}"
        without_estimates = tuple(Stage(zero, _bytes_sent(spec, zero), None, None) for zero in STAGES)
        return ZeroChoice(spec.zero, is_auto, without_estimates, None, reason)
    stages, limit = _estimate_stages(spec, chip), OUR_MEMORY_FRACTION * chip.memory
    choice = ZeroChoice(spec.zero, is_auto, stages, limit, "mesh.prefetch needs 3" if mesh.prefetch else "")
    if not is_auto or mesh.prefetch:
        return choice
    reason = "" if choice.best else f"by estimate none fits, {_LEAST_MEMORY_REASON}"
    return replace(choice, zero=_choose_fastest(choice), reason=reason)


def _device_kind(spec: StepSpec) -> str:
    """Returns JAX's name of the kind of device."""
    return spec.placement.mesh.devices.flat[0].device_kind


def _choose_fastest(choice: ZeroChoice) -> int:
    """Returns the stage that needs the least memory among those that fit and are about as fast as the fastest. Returns
    3 if none fits."""
    best = choice.best
    if best is None or best.seconds is None:
        return 3
    return next(
        stage.zero
        for stage in choice.stages
        if choice.fits(stage) and stage.seconds is not None and stage.seconds <= MIN_SPEEDUP * best.seconds
    )


def _estimate_stages(spec: StepSpec, chip: Chip) -> tuple[Stage, ...]:
    """Estimates a step with each ZeRO stage."""
    model = model_shape(spec.definition, spec.config)
    scheme = replace(scheme_of(spec), prefetch=spec.config.mesh.prefetch is not False)
    depth = -(-model.depth // (scheme.pipeline * scheme.chunks))
    per_row = lambda residuals: residuals * model.depth / (depth * scheme.slots * scheme.whole_rows)
    row_residuals = per_row(residual_bytes(spec))
    row_residuals_without_remat = per_row(_residuals_without_remat(spec))
    state = state_bytes(spec)
    rates = rates_of(chip)
    stages = []
    for zero in STAGES:
        stage_scheme = replace(scheme, zero=zero)
        memory = estimate_memory(
            model, stage_scheme, row_residuals, max(row_residuals, row_residuals_without_remat), state,
            loss_chunk=spec.config.train.loss_chunk_mib * 2**20,
        )  # fmt: skip
        seconds = estimate(model, stage_scheme, rates, chip.domain).seconds
        stages.append(Stage(zero, _bytes_sent(spec, zero), seconds, memory.peak))
    return tuple(stages)


def _residuals_without_remat(spec: StepSpec) -> int:
    """Returns the number of bytes that forward would save for backward if backward recomputed nothing."""
    if spec.config.train.remat == "none":
        return residual_bytes(spec)
    config_without_remat = spec.config.changed(
        {"train.remat": "none", "train.remat_save": [], "train.remat_offload": []}
    )
    return residual_bytes(replace(spec, config=config_without_remat))


def _bytes_sent(spec: StepSpec, zero: int) -> float:
    """Returns the bytes of weights and gradients that a device sends in a step, as this module's doc string derives."""
    without_prefetch = replace(spec, config=spec.config.changed({"mesh.prefetch": None}))
    kinds = ("all-gather", "reduce-scatter")
    traffic = weight_traffic(without_prefetch.with_zero(zero))
    return sum(traffic_bytes for (kind, _), traffic_bytes in traffic.items() if kind in kinds)

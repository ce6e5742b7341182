"""What was measured on hosts at hand, in a file: it counts instead of what tables say of their devices. No JAX."""

import math
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError

from jaxmnt.errors import ConfigError
from jaxmnt.plan.chips import Chip
from jaxmnt.plan.rates import BETWEEN_HOSTS, GRADIENT, WITHIN_HOST, CollectiveRate, Curve, Rates
from jaxmnt.strict_json import json_text

FORMAT = 1
CPU = "cpu"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Products(_Part):
    """FLOP/s at all combinations of sizes of m, n and k, the last one fastest."""

    dtype: str
    gradient: bool
    """Whether rows are added up, as in a weight's gradient."""
    sizes: tuple[PositiveFloat, ...]
    rates: tuple[PositiveFloat, ...]


class Attention(_Part):
    """FLOP/s of the pairs that a causal mask leaves, in long rows, and the length at which half of that is attained."""

    forward: PositiveFloat
    backward: PositiveFloat
    half_length: float


class Collective(_Part):
    """Seconds of one: `start`, `step` for each step of a ring, and its bytes at `rate` a second."""

    kind: str
    place: str
    start: float
    step: float
    rate: PositiveFloat


class Calibration(_Part):
    """Of devices of one kind. Rates are a second's, of one device while all compute."""

    format: PositiveInt = FORMAT
    kind: str
    """As JAX names the device."""
    devices: PositiveInt
    hosts: PositiveInt
    date: str
    software: dict[str, str]
    products: tuple[Products, ...]
    memory: PositiveFloat
    """Bytes, by what is neither a product nor attention."""
    instruction: float
    """Seconds that each instruction takes at least."""
    page_faults: float
    """Seconds of the kernel for each byte of temporary memory that it maps anew for each step."""
    attention: Attention | None = None
    """None where attention is made of products."""
    to_host: PositiveFloat | None = None
    """Bytes to the host's memory, where a device has its own."""
    collectives: tuple[Collective, ...] = ()

    def rates(self, table: Rates | None) -> Rates:
        """Those that were measured, and of the others what the table says. Without a table attention is products, and
        collectives that were not measured take no time: see `check_fits`."""
        curves = {(one.dtype, GRADIENT if one.gradient else ""): Curve(one.sizes, one.rates) for one in self.products}
        largest = {dtype: max(curve.rates) for (dtype, gradient), curve in curves.items() if not gradient}
        collectives = {(one.kind, one.place): CollectiveRate(one.start, one.step, one.rate) for one in self.collectives}
        table = table or Rates(
            products={}, attention=max(largest.values()), memory=self.memory,
            within_host=math.inf, between_hosts=math.inf, to_host=math.inf,
        )  # fmt: skip
        gathered = lambda place, known: found.rate if (found := collectives.get(("all-gather", place))) else known
        found = replace(
            table,
            products={**table.products, **largest},
            curves=curves,
            memory=self.memory,
            instruction=self.instruction,
            page_faults=self.page_faults,
            to_host=self.to_host or table.to_host,
            within_host=gathered(WITHIN_HOST, table.within_host),
            between_hosts=gathered(BETWEEN_HOSTS, table.between_hosts),
            collectives=collectives,
        )
        if self.attention is None:
            return found
        return replace(
            found,
            attention=self.attention.forward,
            attention_backward=self.attention.backward,
            length=self.attention.half_length,
        )


def read_calibration(path: Path) -> Calibration:
    """Raises `ConfigError` for a file that is none."""
    try:
        found = Calibration.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"--calibration: {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(
            f"--calibration: {path} must be a file of preflight --calibrate: {where}: {first['msg']}; measure again"
        ) from error
    if found.format != FORMAT or any(len(one.rates) != len(one.sizes) ** 3 for one in found.products):
        raise ConfigError(f"--calibration: {path} is of another version (format {found.format}); measure again")
    return found


def check_fits(calibration: Calibration, path: Path, chip: Chip | None, hosts: int, devices: int) -> None:
    """Raises `ConfigError` for a calibration of other devices than the plan's (virtual CPU devices without a chip), and
    for one that has not measured where the plan sends, if there is no table that says it."""
    kind = CPU if chip is None else chip.kind
    if calibration.kind != kind:
        raise ConfigError(f"--calibration: {path} was measured on {calibration.kind}, and the plan is for {kind}")
    needed = [place for place, is_needed in ((BETWEEN_HOSTS, hosts > 1), (WITHIN_HOST, devices > hosts)) if is_needed]
    for place in needed:
        if chip is None and not any(one.place == place for one in calibration.collectives):
            raise ConfigError(
                f"--calibration: {path} has no collectives {place}: it was measured on {calibration.devices} devices "
                f"of {calibration.hosts} hosts; measure where the mesh will lie, or set --devices-per-host"
            )


def summary(calibration: Calibration) -> str:
    """In one line."""
    best = ", ".join(
        f"{max(one.rates) / 1e12:.3g} TFLOP/s in {one.dtype}" for one in calibration.products if not one.gradient
    )
    sent = [
        f"all-gather {one.rate / 1e9:.3g} GB/s {one.place}"
        for one in calibration.collectives
        if one.kind == "all-gather"
    ]
    return ", ".join([f"products up to {best}", f"memory {calibration.memory / 1e9:.3g} GB/s", *sent])


def to_text(calibration: Calibration) -> str:
    return json_text(calibration.model_dump(), indent=1) + "\n"

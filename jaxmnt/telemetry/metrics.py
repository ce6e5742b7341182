"""metrics.jsonl: what is recorded of each step, and what a token costs in FLOPs."""

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmnt.config.schema import Model
from jaxmnt.telemetry.events import METRICS
from jaxmnt.telemetry.progress import StatusLine, count, duration
from jaxmnt.telemetry.writer import LineWriter

CONVENTION = "model FLOPs, matmuls only, causal attention"

PEAKS: dict[str, dict[str, float]] = {
    "V100": {"float32": 15.7e12},
    "A100": {"bfloat16": 312e12, "float32": 19.5e12},
    "L4": {"bfloat16": 121e12, "float32": 30.3e12},
    "L40S": {"bfloat16": 362e12, "float32": 91.6e12},
    "H100 PCIe": {"bfloat16": 756e12, "float32": 51e12},
    "H100": {"bfloat16": 989e12, "float32": 67e12},
    "H200": {"bfloat16": 989e12, "float32": 67e12},
    "GH200": {"bfloat16": 989e12, "float32": 67e12},
    "B200": {"bfloat16": 2250e12, "float32": 75e12},
}
"""Dense peak FLOP/s by a part of the device kind, after the vendors' datasheets. float32 is without TF32."""


def flops_per_token(model: Model, vocab_size: int, length: int) -> int:
    """Forward and backward FLOPs of one token in a row of `length`."""
    assert model.head_dim and model.num_kv_heads and model.intermediate_size
    attention_width = model.num_heads * model.head_dim
    kv_width = model.num_kv_heads * model.head_dim
    layer = model.hidden_size * (2 * attention_width + 2 * kv_width + 3 * model.intermediate_size)
    products = model.num_layers * layer + model.hidden_size * vocab_size
    return 6 * products + 6 * model.num_layers * attention_width * length


def peak_flops(device_kind: str, dtype: jnp.dtype) -> float | None:
    """Peak FLOP/s of one device, or None where it is not known. The most specific name wins."""
    names = [name for name in PEAKS if re.search(rf"\b{name}\b", device_kind)]
    if not names:
        return None
    return PEAKS[max(names, key=len)].get(jnp.dtype(dtype).name)


Finished = Callable[[int, float, dict[str, Any]], None]


class TrainLog:
    """Takes each step's metrics as device arrays and reads them when the next step has been dispatched.

    Only process 0 writes and shows; all processes read, because stops and saves are agreed on through the metrics.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        writer: bool,
        status: StatusLine,
        steps: int,
        tokens: int,
        flops_per_token: int,
        peak_flops: float | None,
        epochs: Callable[[int], dict[str, float]],
        finished: Finished = lambda step, seconds, values: None,
    ):
        """`finished` is called with each step that is found finished on the devices, its seconds and its metrics."""
        self.tokens = tokens
        """Real targets trained on so far."""
        self.stop_seen = False
        """Whether some process wished to stop in the last step that was read."""
        self.save_seen = 0
        """The last step in which some process wished to save."""
        self._lines = LineWriter(run_dir / METRICS) if writer else None
        self._status = status
        self._steps = steps
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._epochs = epochs
        self._finished = finished
        self._pending: tuple[int, dict[str, jax.Array], float, str | None] | None = None
        self._ready_at = time.perf_counter()
        self._paused = 0.0
        self._pace: float | None = None

    def push(self, step: int, metrics: dict[str, jax.Array], wait_seconds: float, digest: str | None) -> None:
        """Notes the metrics of a step just dispatched, and reads those of the step before it."""
        self.flush()
        self._pending = (step, metrics, wait_seconds, digest)

    def flush(self) -> None:
        """Reads the metrics that are still on the device, waiting for their step to end."""
        if self._pending is None:
            return
        step, metrics, wait_seconds, digest = self._pending
        self._pending = None
        values = jax.tree.map(lambda value: np.asarray(value).item(), jax.device_get(metrics))
        now = time.perf_counter()
        step_seconds = max(1e-9, now - self._ready_at - self._paused)
        self._ready_at, self._paused = now, 0.0
        self.tokens += int(values["tokens"])
        self.stop_seen = values["stop"] > 0
        if values["save"] > 0:
            self.save_seen = step
        if self._lines is not None:
            self._write(step, values, step_seconds, wait_seconds, digest)
        self._finished(step, step_seconds, values)

    def pause(self, seconds: float) -> None:
        """Time spent on something else than steps (evaluation, a blocking save): not part of a step's time."""
        self._paused += seconds

    def restart_clock(self) -> None:
        """Steps are timed from now on."""
        self._ready_at, self._paused = time.perf_counter(), 0.0

    def write_eval(self, step: int, sums: Mapping[str, tuple[float, int]], seconds: float) -> float:
        """Writes the mean loss over all held-out tokens, which it returns, and of each source.

        `sums` has (sum of losses, tokens) of each.
        """
        tokens = sum(count for _, count in sums.values())
        loss = sum(total for total, _ in sums.values()) / tokens
        if self._lines is None:
            return loss
        means = {name: total / count for name, (total, count) in sums.items()}
        record = {
            "kind": "eval",
            "step": step,
            "time": time.time(),
            "loss": loss,
            "tokens": tokens,
            "seconds": seconds,
            "sources": {name: {"loss": means[name], "tokens": count} for name, (_, count) in sums.items()},
        }
        self._lines.write(record)
        shown = "".join(f", {name} {mean:.4f}" for name, mean in means.items()) if len(means) > 1 else ""
        self._status.line(
            f"step {step}  held-out loss {loss:.4f}{shown} over {count(tokens)} tokens ({duration(seconds)})"
        )
        return loss

    def settle(self) -> None:
        """Waits until lines are written, or a few seconds: what a checkpoint has trained on shall be in them."""
        if self._lines is not None:
            self._lines.settle()

    def close(self) -> None:
        """Lines that are on their way have a few seconds."""
        if self._lines is not None:
            self._lines.close()

    def _write(
        self, step: int, values: dict[str, Any], step_seconds: float, wait_seconds: float, digest: str | None
    ) -> None:
        assert self._lines is not None
        rate = values["tokens"] / step_seconds
        mfu = None if self._peak_flops is None else rate * self._flops_per_token / self._peak_flops
        record = {
            "kind": "train",
            "step": step,
            "time": time.time(),
            "loss": values["loss"],
            "grad_norm": values["grad_norm"],
            "learning_rate": values["learning_rate"],
            "tokens": self.tokens,
            "tokens_per_second": rate,
            "step_seconds": step_seconds,
            "data_wait_seconds": wait_seconds,
            "mfu": mfu,
            "epochs": self._epochs(step),
            "bad_steps": values["bad_steps"],
        }
        model = {"model": values["model"]} if values["model"] else {}
        self._lines.write(record | model | ({"batch_digest": digest} if digest is not None else {}))
        self._pace = step_seconds if self._pace is None else 0.9 * self._pace + 0.1 * step_seconds
        if self._status.due or step == self._steps:
            show = self._status.line if step == self._steps else self._status.update  # the last one stays
            share = wait_seconds / step_seconds
            eta = duration((self._steps - step) * self._pace)
            shown = f"  MFU {mfu:.1%}" if mfu is not None else ""
            show(
                f"step {step}/{self._steps}  loss {values['loss']:.4f}  {count(rate)} tokens/s{shown}"
                f"  data wait {share:.1%}  ETA {eta}"
            )

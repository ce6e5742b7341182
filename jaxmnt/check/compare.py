"""Compares a step, an update and generation on a mesh with those on one device."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmnt.check.meshes import Trial
from jaxmnt.config.own_code import attributing_user_errors
from jaxmnt.data.feed import to_devices
from jaxmnt.models.contract import Params
from jaxmnt.parallel.layout import map_with_axes
from jaxmnt.parallel.sharding import parameter_name
from jaxmnt.training.build import build_spec, inference_spec
from jaxmnt.training.inference import Generator, Sampling, row_logits
from jaxmnt.training.spec import StepSpec
from jaxmnt.training.state import abstract_state
from jaxmnt.training.step import mean_gradients
from jaxmnt.training.trained import select_trained

TOLERANCE = 1e-4
"""Maximum difference between two arrays, relative to the largest element. Float32 differs by about 1e-6."""

_NOISE = 0.05
"""Standard deviation of the noise on initial parameters, without which zeros would hide mistakes."""
_NEW_TOKENS = 8


class Difference(NamedTuple):
    """A number or an array that is off."""

    name: str
    error: float
    """The largest difference, relative to the largest element on one device."""
    remark: str = ""


@dataclass(frozen=True)
class StepResults:
    """The results of a step, in the checkpoint layout."""

    numbers: dict[str, float]
    """The loss, the loss's own metrics, and the losses that layers return."""
    gradients: dict[str, np.ndarray]
    updates: dict[str, np.ndarray]
    """The optimizer's second update from the gradients of one device."""


class Checker:
    """Compares meshes with one device."""

    def __init__(self, one_device: Trial, vocab_size: int):
        self._one_device, self._vocab_size = one_device, vocab_size
        self._spec = self._build(one_device)
        self._rows = _random_rows(self._spec, vocab_size)
        self._params, self._buffers = _noisy_parameters(self._spec)
        self._expected = self._step(self._spec, None)

    def differences(self, trial: Trial) -> list[Difference]:
        """Returns what differs on a mesh, the largest errors first. Raises `ConfigError` if the mesh is refused."""
        spec = self._build(trial)
        results = self._step(spec, self._expected.gradients)
        differences = [
            Difference(name, error)
            for name, number in sorted(results.numbers.items(), key=lambda pair: (pair[0] != "loss", pair[0]))
            if (error := _error(np.array(number), np.array(self._expected.numbers[name]))) > TOLERANCE
        ]
        if differences:
            differences[0] = differences[0]._replace(remark=self._explanation(results))
        for kind in ("gradients", "updates"):
            arrays, expected = getattr(results, kind), getattr(self._expected, kind)
            errors = {name: _error(arrays[name], expected[name]) for name in expected}
            ranked = sorted(errors.items(), key=lambda pair: -pair[1])
            differences += [Difference(f"{kind[:-1]} of {name}", error) for name, error in ranked if error > TOLERANCE]
        return differences

    def decoding_differences(self) -> list[Difference]:
        """Returns the tokens that generation with a cache takes, but that are not the likeliest according to a pass
        over the whole text, on one device."""
        spec = inference_spec(self._one_device.config, self._vocab_size)
        length = self._one_device.config.data.sequence_length
        prompts = [self._rows["tokens"][row, : length // (2 + row)] for row in (0, 1)]
        generator = Generator(spec)
        weights = generator.place(self._params, self._buffers)
        tokens = np.stack(list(generator.generate(weights, prompts, _NEW_TOKENS, Sampling(0.0))), axis=1)
        logits_of = jax.jit(functools.partial(row_logits, spec))
        differences = []
        for number, prompt in enumerate(prompts):
            text = np.concatenate([prompt, tokens[number]])
            logits_LV = np.asarray(logits_of(self._params, self._buffers, text[None, :-1]))[0, len(prompt) - 1 :]
            best_L = logits_LV.max(axis=-1)
            behind_L = (best_L - logits_LV[np.arange(len(logits_LV)), tokens[number]]) / np.abs(logits_LV).max()
            if behind_L.max() > TOLERANCE:
                place = int(np.argmax(behind_L > TOLERANCE))
                remark = (
                    f"token {place + 1} after {len(prompt)} tokens is {tokens[number][place]}, but a pass over the "
                    f"whole text finds {int(np.argmax(logits_LV[place]))}"
                )
                differences.append(Difference("generation with a cache", float(behind_L.max()), remark))
        return differences

    def _build(self, trial: Trial) -> StepSpec:
        with attributing_user_errors(trial.config):
            return build_spec(trial.config, self._vocab_size, jax.devices()[: trial.devices])

    def _step(self, spec: StepSpec, gradients: dict[str, np.ndarray] | None) -> StepResults:
        """Computes a step. The updates are those of these `gradients`, or of the step's own."""
        compute, arguments = self._program(spec)
        with jax.default_matmul_precision(spec.matmul_precision), attributing_user_errors(spec.config):
            numbers, own_gradients = jax.device_get(compute(*arguments))
            named = _by_name(own_gradients)
            updates = _second_update(spec, named if gradients is None else gradients)
        return StepResults({name: float(number) for name, number in numbers.items()}, named, updates)

    def _program(self, spec: StepSpec) -> tuple[Any, tuple[Any, ...]]:
        """Returns a function that computes the numbers and the gradients of a step, and its arguments on the mesh."""
        state, definition = abstract_state(spec), spec.definition
        count = spec.config.data.global_batch_size
        sharding = spec.placement.sharding(("batch", "length"))
        batch = to_devices(self._rows, list(range(count)), count, sharding)

        def compute(params: Params, buffers: Params, batch: Any) -> tuple[dict[str, Any], Params]:
            means = mean_gradients(spec, params, buffers, batch, jnp.int32(0))
            numbers = {"loss": means.sums.loss * means.scale, "cross-entropy": means.sums.cross_entropy * means.scale}
            numbers |= {f"metric {name}": ratio for name, ratio in means.sums.ratios.items()}
            for path, leaf in jax.tree.leaves_with_path(means.layers):
                numbers[f"sum {parameter_name(path)} of the layers"] = jnp.sum(leaf)
            gradients = map_with_axes(spec.layout.to_checkpoint_layout, means.gradients, spec.trained_axes)
            return numbers, gradients

        place = lambda tree, axes, like: jax.jit(
            functools.partial(map_with_axes, spec.layout.to_device_layout, axes=axes),
            out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like),
        )(tree)
        on_mesh = place(self._params, definition.axes, state["params"])
        buffers = place(self._buffers, definition.buffer_axes, state["buffers"]) if "buffers" in state else {}
        return jax.jit(compute), (on_mesh, buffers, batch)

    def _explanation(self, results: StepResults) -> str:
        """Returns a cause for another loss, if it is that some parameters count several times, or not at all."""
        compute, (params, buffers, batch) = self._program(self._spec)
        names = sorted({name for path, _ in jax.tree.leaves_with_path(params) for name in _prefixes(path)})
        for name in names:
            for factor in (2.0, 4.0, 8.0, 0.5, 0.0):
                scaled = jax.tree.map_with_path(
                    lambda path, leaf, name=name, factor=factor: leaf * factor if name in _prefixes(path) else leaf,
                    params,
                )
                with jax.default_matmul_precision(self._spec.matmul_precision):
                    numbers, _ = compute(scaled, buffers, batch)
                if _error(np.array(results.numbers["loss"]), np.asarray(numbers["loss"])) < TOLERANCE / 10:
                    times = "not at all" if factor == 0 else f"{factor:g} times"
                    return f"as if {name} counted {times}: is share_of or a sum over devices missing?"
        return ""


def _prefixes(path: Any) -> list[str]:
    """Returns the names of an array and of the modules that contain it."""
    parts = parameter_name(path).split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _by_name(tree: Any) -> dict[str, np.ndarray]:
    return {parameter_name(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def _error(array: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest difference relative to the largest element; infinite if something is not finite."""
    if not np.isfinite(array).all():
        return float("inf")
    largest = np.abs(expected).max()
    difference = np.abs(array - expected).max()
    return float(difference / largest) if largest else float(difference)


def _second_update(spec: StepSpec, gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the optimizer's update after it was given the same gradients twice. All are in the checkpoint layout, by
    name."""
    axes, state = spec.trained_axes, abstract_state(spec)
    shapes = select_trained(spec.definition.abstract, axes)
    tree = jax.tree.map_with_path(lambda path, _: gradients[parameter_name(path)], shapes)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, select_trained(state["params"], axes))
    place = jax.jit(functools.partial(map_with_axes, spec.layout.to_device_layout, axes=axes), out_shardings=shardings)
    restore = jax.jit(functools.partial(map_with_axes, spec.layout.to_checkpoint_layout, axes=axes))
    on_mesh = place(tree)
    update = jax.jit(spec.optimizer.update)
    _, optimizer = update(on_mesh, jax.jit(spec.optimizer.init)(on_mesh), on_mesh)
    updates, _ = update(on_mesh, optimizer, on_mesh)
    return _by_name(jax.device_get(restore(updates)))


def _noisy_parameters(spec: StepSpec) -> tuple[Params, Params]:
    """Returns parameters and buffers in the checkpoint layout: initial values, and noise on the parameters."""
    params, buffers = jax.jit(spec.definition.init)(jax.random.key(spec.config.seed))
    rng = np.random.default_rng(spec.config.seed)
    add_noise = lambda leaf: np.asarray(leaf) + _NOISE * rng.standard_normal(leaf.shape).astype(np.float32)
    return jax.tree.map(add_noise, params), jax.device_get(buffers)


def _random_rows(spec: StepSpec, vocab_size: int) -> dict[str, np.ndarray]:
    """Returns rows with documents that end inside them, tokens without a target, and additional fields."""
    shape = (spec.config.data.global_batch_size, spec.config.data.sequence_length)
    rng = np.random.default_rng(spec.config.seed)
    tokens = rng.integers(0, vocab_size, (shape[0], shape[1] + 1), np.int32)
    segments = 1 + np.cumsum(rng.random(shape) < 0.1, axis=1, dtype=np.int32)
    columns = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
    begins = np.concatenate([np.ones((shape[0], 1), bool), np.diff(segments, axis=1) > 0], axis=1)
    rows = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": (rng.random(shape) < 0.8).astype(np.float32),
        "segments": segments,
        "positions": columns - np.maximum.accumulate(np.where(begins, columns, 0), axis=1).astype(np.int32),
    }
    for field in spec.fields:
        if field.name not in rows:
            rows[field.name] = rng.integers(0, 10, shape).astype(field.dtype)
    return {field.name: rows[field.name] for field in spec.fields}

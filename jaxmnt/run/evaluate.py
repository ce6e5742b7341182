"""Evaluates a run's model between steps: the held-out loss, and samples of text.

An evaluation is exact: each token of a fixed part of every source's held-out data counts once, whatever the number of
hosts. `train.eval_tokens` sets the size of that part.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxmnt.data.batches import EvaluationData
from jaxmnt.data.feed import process_rows, to_devices
from jaxmnt.data.run_tokenizer import tokenizer_of_data
from jaxmnt.data.sources import Sources
from jaxmnt.data.text_pieces import decode_after
from jaxmnt.errors import ConfigError, shortened
from jaxmnt.parallel.axes import without_stages
from jaxmnt.parallel.layout import map_with_axes
from jaxmnt.parallel.sharding import SCALES_AND_BIASES
from jaxmnt.telemetry.metrics import EvaluationSums
from jaxmnt.training.build import inference_spec
from jaxmnt.training.compile import Program
from jaxmnt.training.inference import Generator, Sampling
from jaxmnt.training.spec import ControlFlags
from jaxmnt.training.state import abstract_state, canonical_abstract, model_state

_TEMPERATURE = 0.7


class Evaluator:
    """Evaluates on the held-out split of each source that has one, and on the config's evaluation sets.

    The rows are planned once, so every evaluation of a run reads the same ones.
    """

    def __init__(self, program: Program, data: Sources):
        config = program.spec.config
        self._program = program
        self._control = ControlFlags(program.control_sharding)
        self._parts = {name: EvaluationData(config, part) for name, part in data.parts.items() if part.tokens("eval")}
        for name, part in data.eval_sets.items():
            self._parts[name] = EvaluationData(config, part, "eval" if part.tokens("eval") else "train")
        self._limit_rows(config.eval_limit, config.data.sequence_length)
        self._rows = process_rows(program.batch_sharding, program.eval_rows, config.data.sequence_length)

    def _limit_rows(self, tokens: int | None, length: int) -> None:
        """Distributes `tokens` over sources and sets in proportion to their sizes, with at least one row each."""
        if tokens is None:
            return
        row_limit = -(-tokens // length)
        all_rows = sum(part.row_count for part in self._parts.values())
        for part in self._parts.values():
            part.limit_rows(max(1, round(part.row_count * row_limit / all_rows)))

    def compile(self) -> None:
        """Compiles the evaluation, if any data is held out. Does nothing if it is compiled already."""
        if self._parts:
            _ = self._program.evaluate

    def __call__(
        self,
        state: dict[str, Any],
        stop: Callable[[], bool] = lambda: False,
        note_progress: Callable[[str], None] = lambda done: None,
    ) -> dict[str, EvaluationSums] | None:
        """Returns the result of each source and set, equal in all processes. Empty if no data is held out.

        A source without targets has a sum over 0 tokens. Calls `stop` before each batch to ask whether this process
        should stop, and `note_progress` after each batch. Returns None, in all processes after the same batch, if any
        process stops.
        """
        results = {}
        done = 0
        batches = sum(-(-part.row_count // self._program.eval_rows) for part in self._parts.values())
        for name, part in self._parts.items():
            loss, tokens = 0.0, 0
            for values in self._batches(model_state(state), part, stop):
                done += 1
                note_progress(f"batch {done} of {batches}")
                if values["stop"]:
                    return None
                loss, tokens = loss + float(values["loss_sum"]), tokens + int(values["tokens"])
            results[name] = EvaluationSums(loss, tokens, part.bytes_per_target and tokens * part.bytes_per_target)
        return results

    def _batches(self, model: dict[str, Any], part: EvaluationData, stop: Callable[[], bool]) -> Iterator[Any]:
        """Yields the values of each batch, fetched while the devices compute the next one."""
        program, settings = self._program, self._program.spec.config.data
        batches = part.batches(self._rows, program.eval_rows, prefetch=settings.prefetch, threads=settings.read_threads)
        pending = None
        for local in batches:
            placed = to_devices(local, self._rows, program.eval_rows, program.batch_sharding)
            dispatched = program.evaluate(model, placed | {"control": self._control.array(stop=stop())})
            if pending is not None:
                yield jax.device_get(pending)
            pending = dispatched
        if pending is not None:
            yield jax.device_get(pending)


class Sampler:
    """Continues the prompts of the config, on all devices of the run.

    Inference uses no pipeline: its mesh has the stages as additional ways of fsdp. So the devices hold a second copy
    of the parameters for a while, in the compute dtype.
    """

    def __init__(self, program: Program, data: Sources):
        """Raises `ConfigError` if the data's tokens are not text, or a prompt is empty or too long."""
        self._config, self._program, self._data = program.spec.config, program, data
        if not data.is_text:
            raise ConfigError("telemetry.samples: the data does not record the tokenizer of its tokens; leave it out")
        self._tokenizer = tokenizer_of_data(data.tokenizer, data.vocab_size, data.folder).open()
        self._prompts = [self._encoded(text) for text in self._config.telemetry.samples]

    def compile(self) -> None:
        """Prepares the transfer of the parameters; the first samples compile the programs of the generator."""
        _ = self._inference_model

    @functools.cached_property
    def _inference_model(self) -> tuple[Callable[[Any], Any], Generator]:
        """Returns a function that casts and moves the model to the inference mesh, and a generator there."""
        program, mesh = self._program, self._config.mesh
        inference_mesh = without_stages(mesh, program.spec.placement.sizes)
        devices = list(program.spec.placement.mesh.devices.flat)
        spec = inference_spec(self._config, self._data.vocab_size, inference_mesh, devices)
        abstract = model_state(canonical_abstract(spec, abstract_state(spec)))

        def place(model: Any) -> Any:
            cast = lambda leaf, names: leaf if SCALES_AND_BIASES & {*names} else leaf.astype(spec.dtype)
            return model | {"params": map_with_axes(cast, model["params"], spec.definition.axes)}

        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        return jax.jit(place, out_shardings=shardings), Generator(spec)

    def __call__(
        self, state: Any, step: int, note_progress: Callable[[str], None] = lambda done: None
    ) -> list[dict[str, str]]:
        """Returns each prompt with its continuation, equal in all processes. Calls `note_progress` at each token."""
        place, generator = self._inference_model
        settings = self._config.telemetry
        generated = []
        model = place(self._program.to_canonical(model_state(state)))
        weights = generator.place(model["params"], model.get("buffers", {}))
        sampling = Sampling(_TEMPERATURE, seed=self._config.seed + step)
        for tokens in generator.generate(weights, self._prompts, settings.sample_tokens, sampling):
            generated.append(tokens)
            note_progress(f"token {len(generated)} of {settings.sample_tokens} of the samples")
        end = self._data.end_of_document
        return [
            {"prompt": text, "text": decode_after(self._tokenizer, prompt, row[: _length(row, end)])}
            for text, prompt, row in zip(settings.samples, self._prompts, np.stack(generated, axis=1), strict=True)
        ]

    def _encoded(self, text: str) -> np.ndarray:
        end, longest = self._data.end_of_document, self._config.data.sequence_length
        ids = ([] if end is None else [end]) + self._tokenizer.encode_batch([text])[0].tolist()
        if not ids:
            raise ConfigError("telemetry.samples: a prompt is empty, and no token ends documents; give some text")
        if len(ids) + self._config.telemetry.sample_tokens > longest:
            raise ConfigError(
                f"telemetry.samples: {shortened(repr(text))} has {len(ids)} tokens; with telemetry.sample_tokens "
                f"({self._config.telemetry.sample_tokens}) it must fit data.sequence_length ({longest}); shorten one"
            )
        return np.array(ids, np.int32)


def _length(row: np.ndarray, end: int | None) -> int:
    """Returns the number of tokens before the end of the document."""
    ended = np.flatnonzero(row == (-1 if end is None else end))
    return int(ended[0]) if len(ended) else len(row)

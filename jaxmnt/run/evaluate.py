"""Evaluates a run's model between steps: the held-out loss, and samples of text.

An evaluation is exact: each token of a fixed part of every source's held-out data counts once, regardless of the number
of hosts. `train.eval_tokens` sets the size of that part.
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

    The rows are planned once, so every evaluation of a run reads the same rows.
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
        """Limits an evaluation to `tokens`, in rows of `length`, divided among the sources and sets in proportion to
        their sizes. Each gets at least one row."""
        if tokens is None:
            return
        row_limit = -(-tokens // length)  # rounded up
        total_rows = sum(part.row_count for part in self._parts.values())
        for part in self._parts.values():
            part.limit_rows(max(1, round(part.row_count * row_limit / total_rows)))

    def compile(self) -> None:
        """Compiles the evaluation if any data is held out and it is not compiled yet."""
        if self._parts:
            _ = self._program.evaluate  # compiled at the first access

    def __call__(
        self,
        state: dict[str, Any],
        should_stop: Callable[[], bool] = lambda: False,
        note_progress: Callable[[str], None] = lambda done: None,
    ) -> dict[str, EvaluationSums] | None:
        """Returns the result of each source and set, equal in all processes. Empty if no data is held out.

        The result of a source without targets is a sum over 0 tokens. Calls `should_stop` before each batch to ask
        whether this process wants to stop, and `note_progress` after each batch. If any process wants to stop, returns
        None in all processes after the same batch.
        """
        results = {}
        batches_done = 0
        batch_count = sum(-(-part.row_count // self._program.eval_rows) for part in self._parts.values())
        for name, part in self._parts.items():
            loss_sum, tokens = 0.0, 0
            for values in self._evaluate_batches(model_state(state), part, should_stop):
                batches_done += 1
                note_progress(f"batch {batches_done} of {batch_count}")
                if values["stop"]:
                    return None
                loss_sum += float(values["loss_sum"])
                tokens += int(values["tokens"])
            target_bytes = part.bytes_per_target and tokens * part.bytes_per_target
            results[name] = EvaluationSums(loss_sum, tokens, target_bytes)
        return results

    def _evaluate_batches(
        self, model: dict[str, Any], part: EvaluationData, should_stop: Callable[[], bool]
    ) -> Iterator[Any]:
        """Yields the results of each batch, which are fetched while the devices evaluate the next batch."""
        program, settings = self._program, self._program.spec.config.data
        batches = part.batches(self._rows, program.eval_rows, prefetch=settings.prefetch, threads=settings.read_threads)
        pending = None
        for local_batch in batches:
            device_batch = to_devices(local_batch, self._rows, program.eval_rows, program.batch_sharding)
            dispatched = program.evaluate(model, device_batch | {"control": self._control.array(stop=should_stop())})
            if pending is not None:
                yield jax.device_get(pending)
            pending = dispatched
        if pending is not None:
            yield jax.device_get(pending)


class Sampler:
    """Continues the prompts of the config, on all devices of the run.

    Inference uses no pipeline. Its mesh divides the parameters over the pipeline's stages as additional fsdp ways, so
    the devices hold a second copy of the parameters for a while, in the compute dtype.
    """

    def __init__(self, program: Program, data: Sources):
        """Raises `ConfigError` if the data's tokens are not text, or a prompt is empty or too long."""
        self._config, self._program, self._data = program.spec.config, program, data
        if not data.is_text:
            raise ConfigError("telemetry.samples: the data does not record the tokenizer of its tokens; leave it out")
        self._tokenizer = tokenizer_of_data(data.tokenizer, data.vocab_size, data.folder).open()
        self._prompts = [self._encode_prompt(text) for text in self._config.telemetry.samples]

    def compile(self) -> None:
        """Prepares the transfer of the parameters.

        The generator compiles its programs when it makes the first samples.
        """
        _ = self._inference_model

    @functools.cached_property
    def _inference_model(self) -> tuple[Callable[[Any], Any], Generator]:
        """Returns a function that casts the model and moves it to the inference mesh, and a generator on that mesh."""
        program, mesh = self._program, self._config.mesh
        inference_mesh = without_stages(mesh, program.spec.placement.sizes)
        devices = list(program.spec.placement.mesh.devices.flat)
        spec = inference_spec(self._config, self._data.vocab_size, inference_mesh, devices)
        abstract = model_state(canonical_abstract(spec, abstract_state(spec)))

        def cast_and_move(model: Any) -> Any:
            cast = lambda leaf, names: leaf if SCALES_AND_BIASES & {*names} else leaf.astype(spec.dtype)
            return model | {"params": map_with_axes(cast, model["params"], spec.definition.axes)}

        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        return jax.jit(cast_and_move, out_shardings=shardings), Generator(spec)

    def __call__(
        self, state: Any, step: int, note_progress: Callable[[str], None] = lambda done: None
    ) -> list[dict[str, str]]:
        """Returns each prompt with its continuation, equal in all processes. Calls `note_progress` at each token."""
        cast_and_move, generator = self._inference_model
        settings = self._config.telemetry
        token_rows = []  # the next token of every prompt, one array for each position
        model = cast_and_move(self._program.to_canonical(model_state(state)))
        weights = generator.place(model["params"], model.get("buffers", {}))
        sampling = Sampling(_TEMPERATURE, seed=self._config.seed + step)
        for tokens in generator.generate(weights, self._prompts, settings.sample_tokens, sampling):
            token_rows.append(tokens)
            note_progress(f"token {len(token_rows)} of {settings.sample_tokens} of the samples")
        end_id = self._data.end_of_document
        return [
            {"prompt": text, "text": decode_after(self._tokenizer, prompt, row[: _length_before(row, end_id)])}
            for text, prompt, row in zip(settings.samples, self._prompts, np.stack(token_rows, axis=1), strict=True)
        ]

    def _encode_prompt(self, text: str) -> np.ndarray:
        end_id, max_length = self._data.end_of_document, self._config.data.sequence_length
        ids = ([] if end_id is None else [end_id]) + self._tokenizer.encode_batch([text])[0].tolist()
        if not ids:
            raise ConfigError(
                "telemetry.samples: a prompt is empty, and the data has no end-of-document token that could begin it; "
                "give some text"
            )
        if len(ids) + self._config.telemetry.sample_tokens > max_length:
            raise ConfigError(
                f"telemetry.samples: {shortened(repr(text))} has {len(ids)} tokens; with telemetry.sample_tokens "
                f"({self._config.telemetry.sample_tokens}) it must fit data.sequence_length ({max_length}); shorten "
                "the prompt or the sample"
            )
        return np.array(ids, np.int32)


def _length_before(row: np.ndarray, end_id: int | None) -> int:
    """Returns the number of tokens in `row` before the first `end_id`, which ends documents."""
    end_positions = np.flatnonzero(row == (-1 if end_id is None else end_id))
    return int(end_positions[0]) if len(end_positions) else len(row)

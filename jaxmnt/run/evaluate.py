"""What a run finds out about its model between steps: the held-out loss, and samples of what it writes.

An evaluation is exact: each token of a fixed part of what every source holds out counts once, whatever the number of
hosts. `train.eval_tokens` says how large that part is.
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
    """Evaluates on the held-out split of each source that has one, and on the sets of the config; rows are planned
    once."""

    def __init__(self, program: Program, data: Sources):
        config = program.spec.config
        self._program = program
        self._wishes = ControlFlags(program.control_sharding)
        self._parts = {name: EvaluationData(config, part) for name, part in data.parts.items() if part.tokens("eval")}
        for name, part in data.eval_sets.items():
            self._parts[name] = EvaluationData(config, part, "eval" if part.tokens("eval") else "train")
        self._limit_rows(config.eval_limit, config.data.sequence_length)
        self._rows = process_rows(program.batch_sharding, program.eval_rows, config.data.sequence_length)

    def _limit_rows(self, tokens: int | None, length: int) -> None:
        """Spreads so many tokens over sources and sets, by what each of them holds; at least one row each."""
        if tokens is None:
            return
        wanted, all_rows = -(-tokens // length), sum(part.row_count for part in self._parts.values())
        for part in self._parts.values():
            part.limit_rows(max(1, round(part.row_count * wanted / all_rows)))

    def compile(self) -> None:
        """Compiles what a call executes, if anything is held out. It takes no time when it is done already."""
        if self._parts:
            _ = self._program.evaluate

    def __call__(
        self,
        state: dict[str, Any],
        stop: Callable[[], bool] = lambda: False,
        got_further: Callable[[str], None] = lambda done: None,
    ) -> dict[str, EvaluationSums] | None:
        """The result of each source and set; all processes get the same. Empty if nothing is held out. What has no
        targets has a sum over 0 tokens.

        `stop` asks with each batch whether this process wants to stop, and `got_further` hears of it after it. None, in
        all processes after the same batch, if one of them did.
        """
        results, done = {}, 0
        batches = sum(-(-part.row_count // self._program.eval_rows) for part in self._parts.values())
        for name, part in self._parts.items():
            loss, tokens = 0.0, 0
            for values in self._batches(model_state(state), part, stop):
                done += 1
                got_further(f"batch {done} of {batches}")
                if values["stop"]:
                    return None
                loss, tokens = loss + float(values["loss_sum"]), tokens + int(values["tokens"])
            results[name] = EvaluationSums(loss, tokens, part.bytes_per_target and tokens * part.bytes_per_target)
        return results

    def _batches(self, model: dict[str, Any], part: EvaluationData, stop: Callable[[], bool]) -> Iterator[Any]:
        """The values of each batch, read while the next one is computed."""
        program, settings = self._program, self._program.spec.config.data
        batches = part.batches(self._rows, program.eval_rows, prefetch=settings.prefetch, threads=settings.read_threads)
        pending = None
        for local in batches:
            placed = to_devices(local, self._rows, program.eval_rows, program.batch_sharding)
            dispatched = program.evaluate(model, placed | {"control": self._wishes.array(stop=stop())})
            if pending is not None:
                yield jax.device_get(pending)
            pending = dispatched
        if pending is not None:
            yield jax.device_get(pending)


class Sampler:
    """Continues the prompts of the config, on all devices of the run.

    A pipeline's stages become more ways of fsdp, since a model is called without a pipeline. For that the devices hold
    the parameters once more for a while, in the dtype of computation.
    """

    def __init__(self, program: Program, data: Sources):
        """Raises `ConfigError` if the data's tokens are no text, or the prompts are too long."""
        self._config, self._program, self._data = program.spec.config, program, data
        if not data.is_text:
            raise ConfigError("telemetry.samples: the data is of tokens whose tokenizer is not recorded; leave it out")
        self._tokenizer = tokenizer_of_data(data.tokenizer, data.vocab_size, data.folder).open()
        self._prompts = [self._encoded(text) for text in self._config.telemetry.samples]

    def compile(self) -> None:
        """Prepares what moves the parameters; the programs that call them are compiled by the first samples."""
        _ = self._called_model

    @functools.cached_property
    def _called_model(self) -> tuple[Callable[[Any], Any], Generator]:
        """Returns what moves the parameters to where they are called, and what calls them there."""
        program, mesh = self._program, self._config.mesh
        called_on = without_stages(mesh, program.spec.placement.sizes)
        devices = list(program.spec.placement.mesh.devices.flat)
        spec = inference_spec(self._config, self._data.vocab_size, called_on, devices)
        wanted = model_state(canonical_abstract(spec, abstract_state(spec)))

        def place(model: Any) -> Any:
            cast = lambda leaf, names: leaf if SCALES_AND_BIASES & {*names} else leaf.astype(spec.dtype)
            return model | {"params": map_with_axes(cast, model["params"], spec.definition.axes)}

        shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted)
        return jax.jit(place, out_shardings=shardings), Generator(spec)

    def __call__(
        self, state: Any, step: int, got_further: Callable[[str], None] = lambda done: None
    ) -> list[dict[str, str]]:
        """Each prompt with its continuation: the same in all processes. `got_further` hears of each token."""
        place, generator = self._called_model
        settings, made = self._config.telemetry, []
        model = place(self._program.to_canonical(model_state(state)))
        weights = generator.place(model["params"], model.get("buffers", {}))
        sampling = Sampling(_TEMPERATURE, seed=self._config.seed + step)
        for tokens in generator.generate(weights, self._prompts, settings.sample_tokens, sampling):
            made.append(tokens)
            got_further(f"token {len(made)} of {settings.sample_tokens} of the samples")
        end = self._data.end_of_document
        return [
            {"prompt": text, "text": decode_after(self._tokenizer, prompt, row[: _length(row, end)])}
            for text, prompt, row in zip(settings.samples, self._prompts, np.stack(made, axis=1), strict=True)
        ]

    def _encoded(self, text: str) -> np.ndarray:
        end, longest = self._data.end_of_document, self._config.data.sequence_length
        ids = ([] if end is None else [end]) + self._tokenizer.encode_batch([text])[0].tolist()
        if not ids:
            raise ConfigError("telemetry.samples: a prompt is empty, and nothing ends documents here; give some text")
        if len(ids) + self._config.telemetry.sample_tokens > longest:
            raise ConfigError(
                f"telemetry.samples: {shortened(repr(text))} has {len(ids)} tokens; with telemetry.sample_tokens "
                f"({self._config.telemetry.sample_tokens}) it must fit data.sequence_length ({longest}); shorten one"
            )
        return np.array(ids, np.int32)


def _length(row: np.ndarray, end: int | None) -> int:
    """Up to the end of the document."""
    ended = np.flatnonzero(row == (-1 if end is None else end))
    return int(ended[0]) if len(ended) else len(row)

"""Samples of a model in training: prompts that are continued after each evaluation, for the events and the report."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxmnt.config.schema import Config
from jaxmnt.data.manifest import NAMELESS
from jaxmnt.data.run_tokenizer import of_data
from jaxmnt.data.sources import Sources
from jaxmnt.data.text_pieces import decode_after
from jaxmnt.data.tokenizer import Tokenizer
from jaxmnt.errors import ConfigError, shortened
from jaxmnt.parallel.axes import without_stages
from jaxmnt.parallel.layout import map_with_axes
from jaxmnt.parallel.sharding import SCALES_AND_BIASES
from jaxmnt.training.build import inference_spec
from jaxmnt.training.compile import Program
from jaxmnt.training.inference import Generator, Sampling
from jaxmnt.training.state import abstract_state, canonical_abstract, model_state

_TEMPERATURE = 0.7


class Sampler:
    """Continues the prompts of the config, on all devices of the run.

    A pipeline's stages become more ways of fsdp, since a model is called without a pipeline. For that the devices hold
    the parameters once more for a while, in the dtype of computation.
    """

    def __init__(self, program: Program, data: Sources):
        """Raises `ConfigError` if the data's tokens are no text, or the prompts are too long."""
        self._config, self._program, self._data = program.spec.config, program, data
        self._tokenizer = _tokenizer(self._config, data)
        self._prompts = [self._encoded(text) for text in self._config.telemetry.samples]
        self._place: Callable[[Any], Any] | None = None

    @property
    def wanted(self) -> bool:
        return bool(self._prompts)

    def compile(self) -> None:
        """What moves the parameters to where they are called; the programs that call them are compiled by the first
        samples."""
        if self._place is not None or not self.wanted:
            return
        program, mesh = self._program, self._config.mesh
        called_on = without_stages(mesh, program.spec.placement.sizes)
        devices = list(program.spec.placement.mesh.devices.flat)
        spec = inference_spec(self._config, self._data.vocab_size, called_on, devices)
        self._generator = Generator(spec)
        wanted = model_state(canonical_abstract(spec, abstract_state(spec)))

        def place(model: Any) -> Any:
            cast = lambda leaf, names: leaf if SCALES_AND_BIASES & {*names} else leaf.astype(spec.dtype)
            return model | {"params": map_with_axes(cast, model["params"], spec.definition.axes)}

        shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted)
        self._place = jax.jit(place, out_shardings=shardings)

    def __call__(self, state: Any, step: int, got_further: Callable[[], None] = lambda: None) -> list[dict[str, str]]:
        """Each prompt with its continuation: the same in all processes. `got_further` is called after each token."""
        self.compile()
        assert self._place is not None and self._tokenizer is not None
        settings, made = self._config.telemetry, []
        model = self._place(self._program.to_canonical(model_state(state)))
        weights = self._generator.place(model["params"], model.get("buffers", {}))
        sampling = Sampling(_TEMPERATURE, seed=self._config.seed + step)
        for tokens in self._generator.generate(weights, self._prompts, settings.sample_tokens, sampling):
            made.append(tokens)
            got_further()
        end = self._data.end_of_document
        return [
            {"prompt": text, "text": decode_after(self._tokenizer, prompt, row[: _length(row, end)])}
            for text, prompt, row in zip(settings.samples, self._prompts, np.stack(made, axis=1), strict=True)
        ]

    def _encoded(self, text: str) -> np.ndarray:
        assert self._tokenizer is not None
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


def _tokenizer(config: Config, data: Sources) -> Tokenizer | None:
    if not config.telemetry.samples:
        return None
    if data.tokenizer["name"] in (NAMELESS, "synthetic"):
        raise ConfigError("telemetry.samples: the data is of tokens whose tokenizer is not recorded; leave it out")
    return of_data(data.tokenizer, data.vocab_size, data.folder).open()

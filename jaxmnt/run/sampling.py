"""Continues the prompts of `telemetry.samples` after an evaluation, and compares the texts with what they should be."""

import functools
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmnt.config.schema import Sample
from jaxmnt.data.chat.model_chat import ModelChat
from jaxmnt.data.run_tokenizer import tokenizer_of_data
from jaxmnt.data.sources import Sources
from jaxmnt.data.text_pieces import decode_after
from jaxmnt.data.vocabulary import Vocabulary, stop_ids
from jaxmnt.errors import ConfigError, shortened
from jaxmnt.parallel.axes import mesh_for_generation
from jaxmnt.parallel.layout import map_with_axes
from jaxmnt.parallel.sharding import SCALES_AND_BIASES
from jaxmnt.training.build import inference_spec
from jaxmnt.training.compile import Program
from jaxmnt.training.inference import Generator, Sampling
from jaxmnt.training.state import abstract_state, canonical_abstract, model_state

_TEMPERATURE = 0.7
"""Temperature of samples that expect nothing. The others take the likeliest tokens."""


class _Prompt(NamedTuple):
    sample: Sample
    ids: np.ndarray


class Sampler:
    """Continues the prompts of the config, on all devices of the run.

    Generation uses neither a pipeline nor context parallelism. Its mesh divides the parameters over the devices of
    these axes as over additional devices of fsdp, so the devices hold a second copy of the parameters for a while, in
    the compute dtype.
    """

    def __init__(self, program: Program, data: Sources):
        """Raises `ConfigError` if the data's tokens are not text, or a prompt is empty or too long."""
        self._config, self._program, self._data = program.spec.config, program, data
        if not data.is_text:
            raise ConfigError("telemetry.samples: the data does not record the tokenizer of its tokens; leave it out")
        self._tokenizer = tokenizer_of_data(data.tokenizer, data.vocab_size, data.folder).open()
        samples = [
            Sample(prompt=sample) if isinstance(sample, str) else sample for sample in self._config.telemetry.samples
        ]
        end_id = data.end_of_document
        self._stop_ids = stop_ids(self._tokenizer, end_id, data.chat)
        start_ids = [] if end_id is None else [end_id]
        vocabulary = Vocabulary(self._tokenizer, data.vocab_size, start_ids, end_id, frozenset(self._stop_ids))
        with closing(ModelChat(data.chat, vocabulary, is_trained=True)) as self._chat:
            self._prompts = [_Prompt(sample, self._encode_prompt(sample)) for sample in samples]

    def compile(self) -> None:
        """Prepares the transfer of the parameters.

        The generator compiles its programs when it makes the first samples.
        """
        _ = self._inference_model

    @functools.cached_property
    def _inference_model(self) -> tuple[Callable[[Any], Any], Generator]:
        """Returns a function that casts the model and moves it to the inference mesh, and a generator on that mesh."""
        program, mesh = self._program, self._config.mesh
        inference_mesh = mesh_for_generation(mesh, program.spec.placement.sizes)
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
    ) -> list[dict[str, Any]]:
        """Returns each prompt with its continuation, equal in all processes, in the order of the config.

        A sample that expects a text also has `expect`, and `exact`: True if the texts are equal but for white space at
        their ends. Calls `note_progress` at each token.
        """
        cast_and_move, generator = self._inference_model
        model = cast_and_move(self._program.to_canonical(model_state(state)))
        weights = generator.place(model["params"], model.get("buffers", {}))
        seed = self._config.seed + step
        results: dict[int, dict[str, Any]] = {}
        for expects, temperature in ((False, _TEMPERATURE), (True, 0.0)):
            numbers = [n for n, prompt in enumerate(self._prompts) if (prompt.sample.expect is not None) == expects]
            if numbers:
                texts = self._generate(generator, weights, numbers, Sampling(temperature, seed=seed), note_progress)
                results |= {n: _result(self._prompts[n].sample, text) for n, text in zip(numbers, texts, strict=True)}
        return [results[number] for number in range(len(self._prompts))]

    def _generate(
        self,
        generator: Generator,
        weights: Any,
        numbers: list[int],
        sampling: Sampling,
        note_progress: Callable[[str], None],
    ) -> Iterable[str]:
        """Yields the continuations of the prompts with these numbers."""
        prompts = [self._prompts[number].ids for number in numbers]
        num_tokens = self._config.telemetry.sample_tokens
        token_rows = []  # the next token of every prompt, one array for each position
        for tokens in generator.generate(weights, prompts, num_tokens, sampling):
            token_rows.append(tokens)
            note_progress(f"token {len(token_rows)} of {num_tokens} of the samples")
        for number, ids, row in zip(numbers, prompts, np.stack(token_rows, axis=1), strict=True):
            text = decode_after(self._tokenizer, ids, row[: self._length_before_stop(row)])
            yield _before_stops(text, self._chat.stop_texts) if self._prompts[number].sample.chat else text

    def _length_before_stop(self, row: np.ndarray) -> int:
        """Returns the number of tokens before the first that ends a text."""
        end_positions = np.flatnonzero(np.isin(row, sorted(self._stop_ids)))
        return int(end_positions[0]) if len(end_positions) else len(row)

    def _encode_prompt(self, sample: Sample) -> np.ndarray:
        end_id, max_length = self._data.end_of_document, self._config.data.sequence_length
        text = sample.prompt
        if sample.chat:
            ids = self._encode_conversation(sample)
        else:
            ids = [] if end_id is None else [end_id]
            ids += self._tokenizer.encode_batch([text])[0].tolist()
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
        self._check_expected(sample)
        return np.array(ids, np.int32)

    def _check_expected(self, sample: Sample) -> None:
        """Raises `ConfigError` if `telemetry.sample_tokens` is too small for the expected text and its end."""
        if sample.expect is None:
            return
        ends = self._chat.stop_texts if sample.chat else ()
        text = sample.expect + max(ends, key=len, default="")
        required = len(self._tokenizer.encode_batch([text])[0]) + 1
        if required > self._config.telemetry.sample_tokens:
            raise ConfigError(
                f"telemetry.sample_tokens: {self._config.telemetry.sample_tokens} are too few for the expected text "
                f"{shortened(repr(sample.expect))}, which has {required} tokens with its end; set at least {required}"
            )

    def _encode_conversation(self, sample: Sample) -> list[int]:
        """Returns the ids of a user's turn, and the beginning of the answer, in the chat template of the data."""
        if self._data.chat is None:
            raise ConfigError(
                "telemetry.samples: chat is true, but the data has no conversations from prepare --chat; set it to "
                "false"
            )
        messages = [{"role": "user", "content": sample.prompt}]
        if sample.system is not None:
            messages.insert(0, {"role": "system", "content": sample.system})
        return self._chat.ids(messages, f"telemetry.samples: {shortened(repr(sample.prompt))}")


def exact_match(samples: Iterable[dict[str, Any]]) -> float | None:
    """Returns the share of the samples with an expected text that have it; None if none expects any."""
    matches = [sample["exact"] for sample in samples if "exact" in sample]
    return sum(matches) / len(matches) if matches else None


def _result(sample: Sample, text: str) -> dict[str, Any]:
    """Returns the entry of a sample for the event."""
    result: dict[str, Any] = {"prompt": sample.prompt, "text": text} | ({"chat": True} if sample.chat else {})
    if sample.expect is None:
        return result
    return result | {"expect": sample.expect, "exact": text.strip() == sample.expect.strip()}


def _before_stops(text: str, stops: Iterable[str]) -> str:
    """Returns the part of a text before the first of the stops."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]

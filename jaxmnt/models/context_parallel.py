"""Causal attention in rows that are divided among the devices of the mesh axis `context`.

Each device has two chunks of each row (`parallel.chunks`): an *early* one in the first half of the row, and a *late*
one in the second half. It computes the outputs of its own queries, for which it gathers the keys and values of all
devices (as in Llama Team 2024, arXiv:2407.21783, section 3.3.2). The work has three parts, equal on all devices:

- each chunk attends to itself, causally;
- the late chunk attends to the first half of the row, all of which precedes it;
- in c - 1 steps, one of the two chunks attends to one earlier chunk of its half: of the other devices' chunks in the
  first half, those of lower rank precede the early chunk, and in the second half, those of higher rank precede the late
  chunk.

The results are merged by their statistics. The kernels of one device compute each of them, and no mask of length ×
length exists. Between two different chunks at most one document is shared: the first of the later chunk, which is the
last of the earlier chunk. The backward pass gathers keys and values again.

If a layer has a window, each chunk is put behind the tokens that its window reaches (a *halo*), and only these are
gathered if they are at most a chunk long.

Everything is exchanged by gathers and scatters within the groups of devices that share rows. A ring of permutes would
involve all devices of the mesh, of which some are idle in a pipeline. It needs only the sums of `Part` and a loop over
the same steps, should rows become so long that the gathered keys do not fit.

Shapes: B batch, S tokens of this device's piece of a row, C = S / 2 tokens of a chunk, L tokens of the row, H query
heads, G key/value heads, K head width, c devices. 2 stands for the early and the late chunk.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxmnt.models.attention_parts import (
    Part,
    PartInputs,
    SharedDocument,
    attend_to_part,
    differentiate_part,
)
from jaxmnt.models.blockwise import ATTENTION, ScoreOptions
from jaxmnt.models.kernels import Kernel, attend
from jaxmnt.parallel.chunks import halo_length
from jaxmnt.parallel.collectives import gather_chunks, index_along, sum_and_scatter_chunks, with_backward
from jaxmnt.parallel.sharding import Placement

EARLY, LATE = 0, 1
"""Indices of a device's two chunks, and of the halves of the row in which they lie."""


class DividedRows(NamedTuple):
    """The division of rows among devices, with what each device knows of the whole rows."""

    placement: Placement
    reduce_dtype: jnp.dtype
    """The dtype in which devices exchange the gradients of keys and values."""
    segments_BL: Array | None
    """The segments of the whole rows in their order; None if documents need not be kept apart."""

    @property
    def devices(self) -> int:
        """The number of devices that share a row."""
        return self.placement.num_shards("length")


def attend_across_devices(
    q_BSHK: Array,
    k_BSGK: Array,
    v_BSGK: Array,
    rows: DividedRows,
    kernel: Kernel,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    sinks_H: Array | None = None,
    bias_HD: Array | None = None,
) -> Array:
    """Does the same as `kernels.attend` for rows that are divided among devices. Returns [B, S, H, K]."""
    length = q_BSHK.shape[1] * rows.devices
    if window is not None and window < length:
        options = {"window": window, "soft_cap": soft_cap, "scale": scale, "sinks_H": sinks_H, "bias_HD": bias_HD}
        return _attend_within_window(q_BSHK, k_BSGK, v_BSGK, rows, kernel, options)
    score_options = ScoreOptions(q_BSHK.shape[-1] ** -0.5 if scale is None else scale, None, soft_cap)
    if soft_cap is not None or sinks_H is not None or bias_HD is not None:
        kernel = "blockwise"
    settings = _Settings(kernel, score_options, rows.placement, rows.reduce_dtype)
    return _attend(settings, q_BSHK, k_BSGK, v_BSGK, rows.segments_BL, sinks_H, bias_HD)


# -- without a window


class _Settings(NamedTuple):
    """The static part of attention across devices."""

    kernel: Kernel
    causal_options: ScoreOptions
    """Options of the part in which each chunk attends to itself."""
    placement: Placement
    reduce_dtype: jnp.dtype


class _Step(NamedTuple):
    """A part of the work in which queries of one of this device's chunks attend to keys that all precede them."""

    chunk: int | Array
    """The index of the chunk with the queries, `EARLY` or `LATE`."""
    half: int | Array
    """The half of the row with the keys, `EARLY` or `LATE`."""
    first_key: int | Array
    """The index of the first key among the gathered keys of that half."""
    num_keys: int
    shared: SharedDocument | None
    first_query: int | Array
    """The index in the row of the first query, minus that of the first key."""

    def queries(self, x_2BCHK: Array) -> Array:
        """Returns the entry of an array that belongs to the queries."""
        return jax.lax.dynamic_index_in_dim(x_2BCHK, self.chunk, keepdims=False)

    def keys(self, x_2BLGK: Array) -> Array:
        """Returns the part of gathered keys or values that belongs to this step."""
        starts, sizes = self._slice(x_2BLGK)
        return jax.lax.dynamic_slice(x_2BLGK, starts, sizes)[0]

    def add_keys(self, total_2BLGK: Array, x_BJGK: Array) -> Array:
        """Returns float32 gradients of all gathered keys or values, with those of this step's keys added."""
        starts, _ = self._slice(total_2BLGK)
        new = self.keys(total_2BLGK) + x_BJGK.astype(jnp.float32)
        return jax.lax.dynamic_update_slice(total_2BLGK, new[None], starts)

    def _slice(self, x_2BLGK: Array) -> tuple[Any, Any]:
        _, batch, _, groups, width = x_2BLGK.shape
        return (self.half, 0, self.first_key, 0, 0), (1, batch, self.num_keys, groups, width)


class RowPart(NamedTuple):
    """A device's part of its rows, which are two chunks of each, and the steps of its work."""

    devices: int
    """The number of devices that share a row."""
    rank: int | Array
    """The index of this device among them."""
    chunk_length: int
    segments_BL: Array | None
    """The segments of the whole rows in their order; None if documents need not be kept apart."""

    @property
    def steps(self) -> int:
        """The number of steps in which a chunk attends to one other chunk."""
        return self.devices - 1

    def chunk_numbers(self) -> tuple[int | Array, int | Array]:
        """Returns the numbers of this device's two chunks among those of the row."""
        return self.rank, 2 * self.devices - 1 - self.rank

    def own_segments(self) -> Array | None:
        """Returns the segments of this device's chunks, [2, B, C]."""
        if self.segments_BL is None:
            return None
        return jnp.stack([self._segments(number, 1) for number in self.chunk_numbers()])

    def late_to_first_half(self) -> _Step:
        """Returns the step in which the late chunk attends to the first half of the row."""
        late_number = self.chunk_numbers()[LATE]
        shared = self._shared_document(late_number, 0, self.devices)
        return _Step(LATE, EARLY, 0, self.devices * self.chunk_length, shared, late_number * self.chunk_length)

    def chunk_to_chunk(self, number: Array) -> _Step:
        """Returns one of the `steps`, numbered from 1, in which a chunk attends to one chunk of the same half."""
        sender = (self.rank + number) % self.devices
        is_early = sender < self.rank
        early_number, late_number = self.chunk_numbers()
        later = jnp.where(is_early, early_number, late_number)
        earlier = jnp.where(is_early, sender, 2 * self.devices - 1 - sender)
        half = jnp.where(is_early, EARLY, LATE)
        shared = self._shared_document(later, earlier, 1)
        first_query = (later - earlier) * self.chunk_length
        return _Step(half, half, sender * self.chunk_length, self.chunk_length, shared, first_query)

    def _shared_document(self, later: int | Array, earlier: int | Array, chunks: int) -> SharedDocument | None:
        """Returns the document that a later chunk shares with the earlier `chunks` from number `earlier` on. Chunks
        that end before the later one begins share it only if it reaches over all tokens between them."""
        if self.segments_BL is None:
            return None
        queries_BC, keys_BJ = self._segments(later, 1), self._segments(earlier, chunks)
        document_B1 = queries_BC[:, :1]
        key_count_B = jnp.sum(keys_BJ == document_B1, axis=1, dtype=jnp.int32)
        query_count_B = jnp.sum(queries_BC == document_B1, axis=1, dtype=jnp.int32)
        return SharedDocument(jnp.where(key_count_B > 0, query_count_B, 0), keys_BJ.shape[1] - key_count_B)

    def _segments(self, first_chunk: int | Array, chunks: int) -> Array:
        """Returns the segments of consecutive chunks of the row."""
        assert self.segments_BL is not None
        length = self.chunk_length
        return jax.lax.dynamic_slice_in_dim(self.segments_BL, first_chunk * length, chunks * length, axis=1)


def _by_chunk(x_BS: Array) -> Array:
    """Returns an array [B, S, …] as [2, B, C, …]."""
    batch, length, *rest = x_BS.shape
    return jnp.moveaxis(x_BS.reshape(batch, 2, length // 2, *rest), 1, 0)


def _by_row(x_2BC: Array) -> Array:
    """Returns an array [2, B, C, …] as [B, S, …]."""
    _, batch, length, *rest = x_2BC.shape
    return jnp.moveaxis(x_2BC, 0, 1).reshape(batch, 2 * length, *rest)


def _as_rows(x_2BC: Array) -> Array:
    """Returns an array [2, B, C, …] as [2 · B, C, …], in which each chunk is a row."""
    return x_2BC.reshape(-1, *x_2BC.shape[2:])


def _as_chunks(x_NC: Array) -> Array:
    """Returns an array [2 · B, C, …] as [2, B, C, …]."""
    return x_NC.reshape(2, -1, *x_NC.shape[1:])


class Chunks(NamedTuple):
    """The inputs of attention by chunk, on a device that has gathered the keys and values of others."""

    q_2BCHK: Array
    k_2BCGK: Array
    v_2BCGK: Array
    gathered_k_2BLGK: Array
    """The keys of all devices, [2, B, L / 2, G, K]: in rising order in the first half of the row, and in falling order
    in the second half."""
    gathered_v_2BLGK: Array
    sinks_H: Array | None
    bias_HD: Array | None = None

    def own_inputs(self, row: RowPart) -> PartInputs:
        """Returns the inputs of the part in which each chunk attends to itself."""
        segments_2BC = row.own_segments()
        segments_NC = None if segments_2BC is None else _as_rows(segments_2BC)
        q_NCHK, k_NCGK, v_NCGK = map(_as_rows, (self.q_2BCHK, self.k_2BCGK, self.v_2BCGK))
        return PartInputs(q_NCHK, k_NCGK, v_NCGK, segments_NC, sinks_H=self.sinks_H, bias_HD=self.bias_HD)

    def step_inputs(self, step: _Step) -> PartInputs:
        """Returns the inputs of a part in which a chunk attends to earlier keys."""
        k_BJGK, v_BJGK = step.keys(self.gathered_k_2BLGK), step.keys(self.gathered_v_2BLGK)
        q_BCHK = step.queries(self.q_2BCHK)
        return PartInputs(
            q_BCHK, k_BJGK, v_BJGK, shared=step.shared, bias_HD=self.bias_HD, first_query=step.first_query
        )


def attend_by_parts(kernel: Kernel, causal_options: ScoreOptions, row: RowPart, chunks: Chunks) -> Part:
    """Returns the attention of a device's queries to all keys, by chunk, with the output in float32."""
    diagonal = attend_to_part(kernel, causal_options, chunks.own_inputs(row))
    total_2 = Part(*map(_as_chunks, diagonal))
    total_2 = total_2._replace(a_BLHK=total_2.a_BLHK.astype(jnp.float32))

    def add(total_2: Part, step: _Step) -> Part:
        new = attend_to_part(kernel, _earlier(causal_options), chunks.step_inputs(step))
        merged = Part(*map(step.queries, total_2)).merged_with(new)
        put = lambda old, x: jax.lax.dynamic_update_index_in_dim(old, x, step.chunk, axis=0)
        return Part(*map(put, total_2, merged))

    return _fold_steps(row, add, total_2)


class ChunkGradients(NamedTuple):
    """The gradients of attention on a device."""

    q_2BCHK: Array
    """Float32."""
    own_k_NCGK: Array
    """Those from the part in which each chunk attends to itself, in the compute dtype."""
    own_v_NCGK: Array
    gathered_k_2BLGK: Array
    """Float32, from the other parts."""
    gathered_v_2BLGK: Array
    sinks_H: Array | None
    bias_HD: Array | None = None
    """The sum over all parts."""


def differentiate_by_parts(
    kernel: Kernel, causal_options: ScoreOptions, row: RowPart, chunks: Chunks, total_2: Part, gradient_2BCHK: Array
) -> ChunkGradients:
    """Returns the gradients. `total_2` is the result of attention by chunk, with the output in the compute dtype."""
    diagonal_total = Part(*map(_as_rows, total_2))
    diagonal = differentiate_part(
        kernel, causal_options, chunks.own_inputs(row), diagonal_total, _as_rows(gradient_2BCHK)
    )
    zeros_2BLGK = jnp.zeros(chunks.gathered_k_2BLGK.shape, jnp.float32)

    def add(sums: tuple[Array, Array, Array, Array | None], step: _Step) -> tuple[Array, Array, Array, Array | None]:
        q_2BCHK, k_2BLGK, v_2BLGK, bias_HD = sums
        step_total = Part(*map(step.queries, total_2))
        step_gradient = step.queries(gradient_2BCHK)
        new = differentiate_part(kernel, _earlier(causal_options), chunks.step_inputs(step), step_total, step_gradient)
        q_sum_BCHK = step.queries(q_2BCHK) + new.q_BLHK.astype(jnp.float32)
        return (
            jax.lax.dynamic_update_index_in_dim(q_2BCHK, q_sum_BCHK, step.chunk, axis=0),
            step.add_keys(k_2BLGK, new.k_BJGK),
            step.add_keys(v_2BLGK, new.v_BJGK),
            jax.tree.map(jnp.add, bias_HD, new.bias_HD),
        )

    start = (_as_chunks(diagonal.q_BLHK).astype(jnp.float32), zeros_2BLGK, zeros_2BLGK, diagonal.bias_HD)
    q_2BCHK, k_2BLGK, v_2BLGK, bias_HD = _fold_steps(row, add, start)
    return ChunkGradients(q_2BCHK, diagonal.k_BJGK, diagonal.v_BJGK, k_2BLGK, v_2BLGK, diagonal.sinks_H, bias_HD)


def _fold_steps(row: RowPart, add: Callable[[Any, _Step], Any], initial: Any) -> Any:
    """Returns the result of `add` after all steps in which a chunk attends to earlier keys."""
    result = add(initial, row.late_to_first_half())
    add_chunk = lambda result, number: (add(result, row.chunk_to_chunk(number)), None)
    return jax.lax.scan(add_chunk, result, 1 + jnp.arange(row.steps))[0]


def _earlier(causal_options: ScoreOptions) -> ScoreOptions:
    """Returns the options of the parts in which all keys precede all queries."""
    return causal_options._replace(causal=False)


def _row_and_chunks(
    settings: _Settings,
    q_BSHK: Array,
    k_BSGK: Array,
    v_BSGK: Array,
    segments_BL: Array | None,
    sinks_H: Array | None,
    bias_HD: Array | None,
) -> tuple[RowPart, Chunks]:
    """Returns this device's part of its rows, and its chunks with the gathered keys and values."""
    placement = settings.placement
    rank = index_along("length", placement)
    row = RowPart(placement.num_shards("length"), rank, q_BSHK.shape[1] // 2, segments_BL)
    q_2BCHK, k_2BCGK, v_2BCGK = map(_by_chunk, (q_BSHK, k_BSGK, v_BSGK))
    gathered_k_2BLGK, gathered_v_2BLGK = (gather_chunks(x, placement, 2) for x in (k_2BCGK, v_2BCGK))
    return row, Chunks(q_2BCHK, k_2BCGK, v_2BCGK, gathered_k_2BLGK, gathered_v_2BLGK, sinks_H, bias_HD)


def _backward(
    settings: _Settings, saved: tuple[Any, ...], gradient_BSHK: Array
) -> tuple[Array, Array, Array, None, Array | None, Array | None]:
    """Returns the gradients of queries, keys, values, sinks and biases. Segments have none."""
    *inputs, total = saved
    row, chunks = _row_and_chunks(settings, *inputs)
    total_2, gradient_2BCHK = Part(*map(_by_chunk, total)), _by_chunk(gradient_BSHK)
    gradients = differentiate_by_parts(settings.kernel, settings.causal_options, row, chunks, total_2, gradient_2BCHK)

    def total_of_keys(gradient_2BLGK: Array, own_NCGK: Array) -> Array:
        others_2BCGK = sum_and_scatter_chunks(gradient_2BLGK.astype(settings.reduce_dtype), settings.placement, 2)
        sum_2BCGK = others_2BCGK.astype(jnp.float32) + _as_chunks(own_NCGK).astype(jnp.float32)
        return _by_row(sum_2BCGK).astype(own_NCGK.dtype)

    return (
        _by_row(gradients.q_2BCHK).astype(gradient_BSHK.dtype),
        total_of_keys(gradients.gathered_k_2BLGK, gradients.own_k_NCGK),
        total_of_keys(gradients.gathered_v_2BLGK, gradients.own_v_NCGK),
        None,
        gradients.sinks_H,
        gradients.bias_HD,
    )


@with_backward(_backward, static=1)
def _attend(
    settings: _Settings,
    q_BSHK: Array,
    k_BSGK: Array,
    v_BSGK: Array,
    segments_BL: Array | None,
    sinks_H: Array | None,
    bias_HD: Array | None,
) -> tuple[Array, tuple[Any, ...]]:
    """Returns attention without a window. The output and the statistics have the checkpoint name `attention`."""
    row, chunks = _row_and_chunks(settings, q_BSHK, k_BSGK, v_BSGK, segments_BL, sinks_H, bias_HD)
    a_BSHK, log_sum_BSH = map(_by_row, attend_by_parts(settings.kernel, settings.causal_options, row, chunks))
    # The names are for arrays that the backward pass uses as they are.
    total = Part(*(checkpoint_name(array, ATTENTION) for array in (a_BSHK.astype(q_BSHK.dtype), log_sum_BSH)))
    return total.a_BLHK, (q_BSHK, k_BSGK, v_BSGK, segments_BL, sinks_H, bias_HD, total)


# -- within a window


def _attend_within_window(
    q_BSHK: Array, k_BSGK: Array, v_BSGK: Array, rows: DividedRows, kernel: Kernel, options: dict[str, Any]
) -> Array:
    """Returns attention in which a query sees at most `options["window"]` tokens.

    Each chunk becomes the end of a row that begins with its halo. Halo tokens have no queries. Where a halo would reach
    beyond the start of the row, tokens that do not exist are moved behind the chunk, where no query sees them.
    """
    halo = _Halo(rows, q_BSHK.shape[1] // 2, options["window"])
    q_2BCHK, k_2BCGK, v_2BCGK = map(_by_chunk, (q_BSHK, k_BSGK, v_BSGK))
    segments_2BR = halo.segments()
    a_NRHK = attend(
        _as_rows(halo.before(q_2BCHK, [jnp.zeros_like(q_2BCHK, shape=halo.shape(x_BCHK)) for x_BCHK in q_2BCHK])),
        _as_rows(halo.before(k_2BCGK, halo.of(k_2BCGK))),
        _as_rows(halo.before(v_2BCGK, halo.of(v_2BCGK))),
        None if segments_2BR is None else _as_rows(segments_2BR),
        kernel,
        **options,
    )
    return _by_row(halo.after(_as_chunks(a_NRHK)))


class _Halo:
    """The tokens before each of this device's chunks that its window reaches."""

    def __init__(self, rows: DividedRows, chunk_length: int, window: int):
        self._rows, self._chunk_length = rows, chunk_length
        self._row = RowPart(rows.devices, index_along("length", rows.placement), chunk_length, rows.segments_BL)
        self._numbers = self._row.chunk_numbers()
        halo = halo_length(window, chunk_length, 2 * rows.devices * chunk_length)
        assert halo is not None, "the caller handles a window that is the row"
        self._halo_length = halo
        # The numbers of halo tokens that do not exist, because the row begins later.
        self._missing = [jnp.maximum(self._halo_length - number * chunk_length, 0) for number in self._numbers]

    def shape(self, x_BC: Array) -> tuple[int, ...]:
        """Returns the shape of the halo of an array [B, C, …]."""
        return (x_BC.shape[0], self._halo_length, *x_BC.shape[2:])

    def of(self, x_2BC: Array) -> list[Array]:
        """Returns the halos of both chunks. They are arbitrary before the start of the row."""
        if self._halo_length > self._chunk_length:
            chunks_2BL = gather_chunks(x_2BC, self._rows.placement, 2, self._rows.reduce_dtype)
            return self._from_whole_rows(self._in_order(chunks_2BL))
        tails_2BT = gather_chunks(x_2BC[:, :, -self._halo_length :], self._rows.placement, 2)
        return [self._tail(tails_2BT, number - 1) for number in self._numbers]

    def segments(self) -> Array | None:
        """Returns the segments of both chunks with their halos; None if documents need not be kept apart."""
        segments_2BC = self._row.own_segments()
        if segments_2BC is None:
            return None
        assert self._rows.segments_BL is not None
        return self.before(segments_2BC, self._from_whole_rows(self._rows.segments_BL))

    def before(self, x_2BC: Array, halos: list[Array]) -> Array:
        """Returns both chunks behind their halos. Halo tokens that do not exist come last instead."""
        joined = [jnp.concatenate([halo, x_BC], axis=1) for halo, x_BC in zip(halos, x_2BC, strict=True)]
        shifted = [jnp.roll(x_BR, -missing, axis=1) for x_BR, missing in zip(joined, self._missing, strict=True)]
        return jnp.stack(shifted)

    def after(self, x_2BR: Array) -> Array:
        """Returns the entries of the chunks, without those of the halos."""
        first = [self._halo_length - missing for missing in self._missing]
        slices = [
            jax.lax.dynamic_slice_in_dim(x_BR, start, self._chunk_length, axis=1)
            for x_BR, start in zip(x_2BR, first, strict=True)
        ]
        return jnp.stack(slices)

    def _tail(self, tails_2BT: Array, number: int | Array) -> Array:
        """Returns the last tokens of chunk `number`, which may be -1, from those of all chunks."""
        devices = self._rows.devices
        is_late = number >= devices
        rank = jnp.where(is_late, 2 * devices - 1 - number, jnp.maximum(number, 0))
        half = jax.lax.dynamic_index_in_dim(tails_2BT, jnp.where(is_late, LATE, EARLY), keepdims=False)
        return jax.lax.dynamic_slice_in_dim(half, rank * self._halo_length, self._halo_length, axis=1)

    def _from_whole_rows(self, x_BL: Array) -> list[Array]:
        """Returns the halos of both chunks from whole rows."""
        padded_BL = jnp.pad(x_BL, ((0, 0), (self._halo_length, 0), *[(0, 0)] * (x_BL.ndim - 2)))
        halo = lambda number: jax.lax.dynamic_slice_in_dim(
            padded_BL, number * self._chunk_length, self._halo_length, axis=1
        )
        return list(map(halo, self._numbers))

    def _in_order(self, x_2BL: Array) -> Array:
        """Returns gathered chunks [2, B, L / 2, …] in the order of the row, [B, L, …]."""
        first, second = x_2BL
        batch, _, *rest = second.shape
        rising = second.reshape(batch, self._rows.devices, self._chunk_length, *rest)[:, ::-1]
        return jnp.concatenate([first, rising.reshape(second.shape)], axis=1)

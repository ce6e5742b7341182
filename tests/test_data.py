"""Which rows make up a batch, and what they hold: the same for any number of hosts, threads and restarts."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmnt.config.load import parse_config
from jaxmnt.data.batches import EvaluationData, TrainingData, training_rows
from jaxmnt.data.open_shards import LazyShards, OpenShards
from jaxmnt.data.order import BLOCK, BranchPoint, MixturePhase, Order, block_shares, permute
from jaxmnt.data.packing import plan_rows
from jaxmnt.data.preparation.inputs import Selection, Settings
from jaxmnt.data.preparation.run import build
from jaxmnt.data.rows import Packed, Windows
from jaxmnt.data.sources import Sources
from jaxmnt.data.store import StoredTokens, open_prepared
from jaxmnt.errors import ConfigError

END = 0


class InMemory:
    """Offers what prepared data offers, for documents that are given as token arrays without their ends."""

    path = "memory"
    vocab_size = 1000

    def __init__(self, documents, shard=97, learn=False):
        whole = [np.append(tokens, END).astype(np.uint16) for tokens in documents]
        stream = np.concatenate(whole)
        self.starts = np.cumsum([0, *map(len, whole)])[:-1].astype(np.int64)
        shards = [stream[first : first + shard] for first in range(0, len(stream), shard)]
        masks = [(array % 2).astype(np.uint8) for array in shards] if learn else None
        self.documents = documents
        self._stream = StoredTokens(shards, lambda: self.starts, END, masks)

    def bytes_per_target(self, split):
        return None

    def stream(self, split):
        return self._stream

    def tokens(self, split):
        return self._stream.tokens


def documents(seed, count, longest=40):
    """Random documents; token ids tell them apart often enough."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 1000, size) for size in rng.integers(1, longest, count)]


def config(sources=1, weights=None, **data):
    tree = {"sequence_length": 16, "global_batch_size": 12} | data
    names = "abc"[:sources]
    weights = weights or [1.0, 0.5, 2.0]
    tree["sources"] = {name: {"path": name, "weight": weight} for name, weight in zip(names, weights, strict=False)}
    seed = tree.pop("seed", 0)
    steps = tree.pop("steps", 1000)
    return parse_config({"data": tree, "seed": seed, "train": {"steps": steps}})


def training(config, counts=(60, 80, 50)):
    names = sorted(config.data.sources)
    sources = {name: InMemory(documents(number, counts[number])) for number, name in enumerate(names)}
    return TrainingData(config, Sources(sources))


# -- the rule: a batch is a function of (data config, seed, step)


@settings(max_examples=80, deadline=None)
@given(
    hosts=st.sampled_from([1, 2, 3, 4, 6, 8]),
    rows_a_host=st.integers(1, 3),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
    rows=st.sampled_from(["windows", "packed"]),
    mask=st.booleans(),
    sources=st.integers(1, 3),
    step=st.integers(0, 300),
    threads=st.sampled_from([0, 1, 3]),
)
def test_hosts_threads_and_restarts_do_not_matter(
    hosts, rows_a_host, seed, shuffle, rows, mask, sources, step, threads
):
    """Each host's rows, read by however many threads from any step on, are its part of the one global batch."""
    total = hosts * rows_a_host
    settings = config(
        sources, global_batch_size=total, seed=seed, shuffle=shuffle, rows=rows, document_mask=mask,
        weight_changes=[{"from_step": 40, "weights": {"a": 3.0}}],
    )  # fmt: skip
    whole = [training(settings).batch(step + later, range(total)) for later in range(2)]
    data = training(settings)
    parts = []
    for host in range(hosts):
        own = range(host * rows_a_host, (host + 1) * rows_a_host)
        iterator = training_rows(data, own, step, prefetch=2, threads=threads)
        parts.append([next(iterator) for _ in range(2)])
    for later in range(2):
        for field, expected in whole[later].items():
            together = np.concatenate([part[later][field] for part in parts])
            assert together.dtype == expected.dtype and (together == expected).all(), field


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
    sources=st.integers(1, 3),
    batch=st.integers(1, 20),
    change=st.integers(1, 30),
)
def test_every_epoch_of_every_source_visits_each_row_once(seed, shuffle, sources, batch, change):
    """Also when weights change in the middle of an epoch and of a block."""
    rows = {"a": 37, "b": 11, "c": 90}
    rows = {name: rows[name] for name in "abc"[:sources]}
    weights = (5.0, 1.0, 3.0)[:sources], (1.0, 1.0, 7.0)[:sources]
    order = Order(
        rows,
        [MixturePhase(0, weights[0]), MixturePhase(change, weights[1])],
        seed=seed,
        shuffle=shuffle,
        global_rows=batch,
    )
    steps = 2500 // batch
    found = [order.locate(step, range(batch)) for step in range(steps)]
    source, epoch, row = (np.concatenate(column) for column in zip(*found, strict=True))
    for number, (name, size) in enumerate(rows.items()):
        mine = source == number
        assert order.used(steps)[name] == mine.sum()
        assert order.epochs(steps)[name] == mine.sum() / size
        for turn in range(int(mine.sum()) // size):
            visited = row[mine & (epoch == turn)]
            assert sorted(visited) == list(range(size))
            if not shuffle:
                assert (visited == np.arange(size)).all()
        if shuffle and mine.sum() >= 2 * size:
            assert (row[mine & (epoch == 0)] != row[mine & (epoch == 1)]).any()


@settings(max_examples=100, deadline=None)
@given(weights=st.lists(st.floats(0.001, 1e6), min_size=1, max_size=12), seed=st.integers(0, 3))
def test_shares_are_exact_in_every_block_and_even_within(weights, seed):
    shares = block_shares(weights)
    exact = np.array(weights) / np.sum(weights) * BLOCK
    assert shares.sum() == BLOCK and (np.abs(shares - exact) < 1 + 1e-6).all()
    names = [f"{number:02d}" for number in range(len(weights))]
    order = Order(dict.fromkeys(names, 7), [MixturePhase(0, tuple(weights))], seed=seed, shuffle=True, global_rows=100)
    for first in (0, 30):
        source = np.concatenate([order.locate(first + step, range(100)).source for step in range(10)])
        assert (np.bincount(source, minlength=len(weights)) == shares).all()
        for number, share in enumerate(shares.tolist()):  # any stretch holds about its part of the source
            stretch = (source[:250] == number).sum()
            assert abs(stretch - share / 4) <= len(weights) + 1


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 3000), key=st.integers(0, 2**63))
def test_permute_is_a_permutation(size, key):
    found = permute(np.arange(size), size, np.full(size, key, np.uint64))
    assert sorted(found.tolist()) == list(range(size))


def test_permute_never_changes_and_looks_random():
    """These values are part of every run that has been started: a change here changes what such runs read next."""
    found = permute(np.arange(10), 10, np.full(10, 7, np.uint64))
    assert found.tolist() == [7, 0, 6, 8, 5, 2, 1, 4, 9, 3]
    large = permute(np.arange(100_000), 100_000, np.full(100_000, 1, np.uint64))
    assert abs(np.corrcoef(np.arange(100_000), large)[0, 1]) < 0.02
    assert abs(np.corrcoef(large[:-1], large[1:])[0, 1]) < 0.02
    assert (np.abs(np.diff(large)) == 1).mean() < 1e-3


def test_adding_a_source_leaves_the_order_within_the_others():
    alone = Order({"b": 50}, [MixturePhase(0, (1.0,))], seed=3, shuffle=True, global_rows=10)
    both = Order({"a": 20, "b": 50}, [MixturePhase(0, (1.0, 1.0))], seed=3, shuffle=True, global_rows=10)
    rows = [np.concatenate([one.locate(step, range(10)).row for step in range(20)]) for one in (alone, both)]
    source = np.concatenate([both.locate(step, range(10)).source for step in range(20)])
    assert (rows[1][source == 1][:50] == rows[0][:50]).all()


# -- rows


PAST = [MixturePhase(0, (2.0, 1.0)), MixturePhase(50, (1.0, 1.0))]


def ordered(rows, *, weights=PAST, branches=(), skip=(), names=("a", "b")):
    sizes = {"a": 70, "b": 90, "c": 30}
    sizes = {name: sizes[name] for name in names}
    return Order(sizes, weights, seed=3, shuffle=True, global_rows=rows, skip=skip, branches=branches)


def left_at(order, step):
    return BranchPoint(step, order.rows_taken(step), order.used(step))


@pytest.mark.parametrize("skip", [(), [(100, 130)], [(630, 700)]])
@pytest.mark.parametrize("size", [16, 4, 5])
def test_a_branch_with_another_batch_size_goes_on_at_the_row_of_its_origin(size, skip):
    """The rows of the origin follow each other, cut into other steps; also after a second branch."""
    origin = ordered(8, skip=skip)
    assert origin.rows_taken(80) == 640
    branch = ordered(size, branches=[left_at(origin, 80)], skip=skip)
    assert branch.first_step == 80 and branch.used(80) == origin.used(80) and branch.epochs(80) == origin.epochs(80)
    second = ordered(8, branches=[left_at(branch, 120), left_at(origin, 80)], skip=skip)
    rows = [*branched_rows(branch, 80, 120, size), *branched_rows(second, 120, 140, 8)]
    assert rows == branched_rows(origin, 80, 400, 8)[: len(rows)]
    assert second.rows_skipped(119) == branch.rows_skipped(119), "the last row before the second branch"


def branched_rows(order, first, last, size):
    return [tuple(row) for step in range(first, last) for row in np.array(order.locate(step, range(size))).T.tolist()]


def test_a_branch_with_other_weights_goes_on_in_each_source():
    """No row of a source is read again, none is left out; a source that is new begins at its first row."""
    origin = ordered(8)
    point = left_at(origin, 80)
    branch = ordered(8, weights=[MixturePhase(0, (1.0, 3.0, 1.0))], branches=[point], names=("a", "b", "c"))
    assert branch.used(80) == {**point.used, "c": 0} and branch.used(180)["c"] == 160
    sources, epochs, rows = np.array(branched_rows(branch, 80, 90, 8)).T
    kinds, *later = np.array(branched_rows(origin, 80, 120, 8)).T
    for number in (0, 1):
        read = [*zip(epochs[sources == number], rows[sources == number], strict=True)]
        goes_on = [row for kind, *row in zip(kinds, *later, strict=True) if kind == number]
        assert read == [tuple(row) for row in goes_on[: len(read)]]


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(2, 70),
    rows=st.integers(1, 8),
    mask=st.booleans(),
    packed=st.booleans(),
    learn=st.booleans(),
    seed=st.integers(0, 5),
)
def test_every_token_is_a_target_once_with_the_right_input(length, rows, mask, packed, learn, seed):
    data = InMemory(documents(seed, 40), learn=learn)
    stream, whole = data.stream("eval"), np.concatenate([np.append(d, END) for d in data.documents])
    reader = Packed(stream, length) if packed else Windows(stream, length, mask)
    before = np.concatenate([[END], whole[:-1]])
    seen = np.zeros(len(whole), int)
    for first in range(0, reader.row_count_with_partial, rows):
        numbers = range(first, first + rows)
        batch = reader.read(numbers)
        assert {name: (values.dtype, values.shape) for name, values in batch.items()} == {
            name: (np.float32 if name == "weights" else np.int32, (rows, length)) for name in batch
        }
        for line, row in enumerate(numbers):
            offsets = reader.offsets(row) if row < reader.row_count_with_partial else np.full(length, -1)
            real = offsets >= 0
            seen[offsets[real]] += 1
            assert (batch["targets"][line][real] == whole[offsets[real]]).all()
            assert (batch["tokens"][line][real] == before[offsets[real]]).all()
            assert ((batch["segments"][line] > 0) == real).all()  # 0 marks padding
            assert (batch["weights"][line] == np.where(real, whole[offsets] % 2 if learn else 1, 0)).all()
    assert (seen == 1).all()


@pytest.mark.parametrize("kind", ["windows", "packed"])
def test_segments_and_positions_are_those_of_documents(kind):
    data = InMemory(documents(1, 60))
    stream = data.stream("train")
    reader = Packed(stream, 24) if kind == "packed" else Windows(stream, 24, document_mask=True)
    batch = reader.read(range(reader.rows))
    for row in range(reader.rows):
        offsets = reader.offsets(row)
        real = offsets >= 0
        document = stream.documents(offsets[real])
        segments, positions = batch["segments"][row], batch["positions"][row]
        assert (segments[~real] == 0).all() and segments[0] == 1
        changed = np.diff(document) != 0
        assert (np.diff(segments[real]) == changed).all()
        assert (positions[real][1:] == np.where(changed, 0, positions[real][:-1] + 1)).all()
        opens = offsets[real] == stream.document_starts[document]
        assert (positions[real][opens] == 0).all() and (batch["tokens"][row][real][opens] == END).all()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=0, max_size=200),
    row=st.integers(2, 100),
    window=st.integers(1, 64),
)
def test_packing_places_every_token_once(lengths, row, window):
    starts = np.cumsum([0, *lengths])[:-1].astype(np.int64)
    plan = plan_rows(starts, sum(lengths), row, window)
    seen = np.zeros(sum(lengths), int)
    for start, length in zip(plan.start, plan.length, strict=True):
        seen[start : start + length] += 1
    assert (seen == 1).all()
    filled = [int(plan.length[a:b].sum()) for a, b in zip(plan.first_piece, plan.first_piece[1:], strict=False)]
    assert all(0 < tokens <= row for tokens in filled)
    assert (plan.opens == np.isin(plan.start, starts)).all()
    whole = sum(length <= row for length in lengths)
    assert (plan.opens & (plan.length < row + 1)).sum() >= whole  # what fits a row is not cut
    short = plan_rows(starts, sum(lengths), row, window, skip_long=True)
    fitting = [(start, length) for start, length in zip(starts.tolist(), lengths, strict=True) if length <= row]
    assert sorted(zip(short.start.tolist(), short.length.tolist(), strict=True)) == fitting and short.opens.all()
    again = plan_rows(starts, sum(lengths), row, window)
    assert (again.start == plan.start).all() and (again.first_piece == plan.first_piece).all()


def test_packing_fills_rows():
    """Lengths as of real text, from a few to many times a row: at least 0.97 of all places hold a token."""
    sizes = np.maximum(1, np.random.default_rng(0).lognormal(6, 1.4, 20_000)).astype(np.int64)
    starts = np.cumsum(np.concatenate([[0], sizes]))
    for row in (512, 2048, 8192):
        assert plan_rows(starts[:-1], int(starts[-1]), row).fill(row) >= 0.99


# -- what a config asks for


def test_changing_a_token_changes_just_the_batches_that_read_it():
    settings = config(global_batch_size=4)
    original = documents(0, 60)
    changed = [tokens.copy() for tokens in original]
    changed[20][0] = 1 + changed[20][0] % 998
    before, after = (TrainingData(settings, Sources({"a": InMemory(d)})) for d in (original, changed))
    place = int(InMemory(original).starts[20])
    affected = 0
    for step in range(15):
        rows = before.order.locate(step, range(4)).row
        same = (before.batch(step, range(4))["tokens"] == after.batch(step, range(4))["tokens"]).all()
        reads_it = (place + 1) // 16 in rows  # a token is the input before the target at its place
        assert same != reads_it
        affected += reads_it
    assert affected


def test_evaluation_fills_up_with_rows_without_targets():
    for rows in ("windows", "packed"):
        data = EvaluationData(config(rows=rows, sequence_length=100), InMemory(documents(0, 60)))
        batches = list(data.batches(range(8), 8, prefetch=2, threads=1))
        assert sum(batch["weights"].sum() for batch in batches) == InMemory(documents(0, 60)).tokens("eval")
        assert {len(batch["tokens"]) for batch in batches} == {8}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"global_batch_size": 100}, r"data\.global_batch_size: a batch takes 100 rows of a, which has"),
        ({"sequence_length": 10**6}, r"data\.sequence_length: 1000000 is more than the \d+ tokens"),
        ({"on_end": "stop"}, r"train\.steps: a ends after step 6 and must not repeat; lower train\.steps to 6"),
        ({"sources": 2, "weights": [1e-5, 1.0]}, r"data\.sources\.a\.weight: 1e-05 of 1\.00001 is less than one row"),
        ({"sources": 2, "weights": [0.0, 0.0]}, r"data\.sources: from step 0 on no source has a weight above 0"),
        ({"weight_changes": [{"from_step": 5, "weights": {"x": 1.0}}]}, r"no source is named x; known: a"),
        (
            {"weight_changes": [{"from_step": 5, "weights": {}}, {"from_step": 5, "weights": {}}]},
            r"data\.weight_changes: from_step 5 must be above 5",
        ),
    ],
)
def test_what_cannot_be_fed_is_refused(data, message):
    with pytest.raises(ConfigError, match=message):
        training(config(**data))


def test_a_source_that_must_not_repeat_may_last_just_long_enough():
    training(config(on_end="stop", steps=6))


# -- more shards than a process may open


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    limit=st.integers(1, 4),
    ranges=st.lists(st.tuples(st.integers(0, 250), st.integers(1, 40)), max_size=20),
)
def test_shards_are_opened_when_they_are_read(lengths, limit, ranges):
    """With few open at a time, rows are those of the whole stream."""
    stream = np.arange(sum(lengths), dtype=np.uint16)
    bounds = np.cumsum([0, *lengths])
    open_shards = OpenShards(limit)
    opened = []

    def open_shard(number: int) -> np.ndarray:
        opened.append(number)
        return stream[bounds[number] : bounds[number + 1]]

    shards = LazyShards(len(lengths), open_shard, open_shards)
    stored = StoredTokens(shards, lambda: np.zeros(1, np.int64), END, lengths=lengths)
    assert not opened and stored.tokens == len(stream)
    for start, length in ranges:
        if start + length <= len(stream):
            out = np.empty(length, np.int64)
            stored.read(start, out)
            assert (out == stream[start : start + length]).all() and open_shards.count <= limit
    del stored, shards
    assert open_shards.count == 0


def test_more_shards_than_open_files(tmp_path):
    """A process that may open 100 files reads 500 shards."""
    (tmp_path / "in.txt").write_text("ab " * 1400)
    build(
        Selection([tmp_path / "in.txt"]), tmp_path / "out", Settings(shard_tokens=8, eval_fraction=0.0), lambda *_: None
    )
    code = (
        "import sys, numpy as np; from jaxmnt.data.store import open_prepared\n"
        "data = open_prepared(sys.argv[1]); data.check(); stream = data.stream('train')\n"
        "out = np.empty(stream.tokens, np.int64); stream.read(0, out)\n"
        "print(len(data.manifest['splits']['train']['shards']), bytes(out[:-1].tolist()).decode() == 'ab ' * 1400)"
    )
    command = ["bash", "-c", 'ulimit -n 100; exec "$@"', "-", sys.executable, "-c", code, str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout == "526 True\n", result.stderr


def test_a_file_is_looked_up_once(tmp_path, monkeypatch):
    """The check asks for the size of each file of a shard once and opens none, and a row opens its shard."""
    (tmp_path / "in.txt").write_text("ab " * 100)
    settings = Settings(shard_tokens=16, eval_fraction=0.0)
    build(Selection([tmp_path / "in.txt"]), tmp_path / "out", settings, lambda *_: None)
    opened = []
    real_open = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **more: opened.append(path) or real_open(path, *rest, **more))
    in_shards = lambda: sum(Path(path).parent.name == "train" for path in opened if isinstance(path, str | Path))
    data = open_prepared(tmp_path / "out")
    stream = data.stream("train")
    assert in_shards() == 0
    stream.read(40, np.empty(4, np.int64))
    assert in_shards() == 1
    opened.clear()
    looked_up = []
    real_stat = os.stat
    monkeypatch.setattr(os, "stat", lambda path, **more: looked_up.append(path) or real_stat(path, **more))
    data.check()
    assert in_shards() == 0
    looked_up_shards = [path for path in looked_up if Path(path).parent.name == "train"]
    assert len(looked_up_shards) == 3 * len(data.manifest["splits"]["train"]["shards"])

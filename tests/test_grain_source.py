"""A user's own Grain datasets as sources of training data."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import TINY, command, launch, metrics
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmnt
from jaxmnt.config.load import apply_overrides, parse_config
from jaxmnt.data import elements as elements_module
from jaxmnt.data import grain_source
from jaxmnt.data.batches import TrainingData
from jaxmnt.data.elements import DocumentStream, Elements, measure_elements
from jaxmnt.data.rows import batch_digest, make_reader, row_digests
from jaxmnt.data.sources import Sources, open_sources
from jaxmnt.data.store import StoredTokens
from jaxmnt.errors import ConfigError, ExitCode, PreflightError, UnreadableError
from jaxmnt.train import train

MODULE = """
    import grain
    import numpy as np

    def document(number, ids=250):
        generator = np.random.default_rng(int(number))
        return {"tokens": generator.integers(0, ids, generator.integers(5, 90)), "url": f"https://example.org/{number}"}

    documents = grain.MapDataset.range(300).map(document).shuffle(seed=3)

    def held_out():
        return grain.MapDataset.range(1000, 1020).map(document)

    def row(number):
        whole = np.random.default_rng(int(number)).integers(0, 250, 33)
        return {"tokens": whole[:-1], "targets": whole[1:], "weights": np.arange(32) % 2}

    def rows():
        return grain.MapDataset.range(200).map(row)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes a module of this text that can be imported, here and in new processes; its name."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = []

    def make(text: str = MODULE) -> str:
        names.append(f"users_{len(names)}_{tmp_path.name}")
        (tmp_path / f"{names[-1]}.py").write_text(textwrap.dedent(text))
        return names[-1]

    yield make
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def asked(module, tmp_path):
    """Makes a config that reads a dataset of the module; arguments are overrides."""
    name = module()

    def make(*overrides: str, train=f"{name}.documents", **grain):
        tree = {name: dict(section) for name, section in TINY.items()}
        tree["data"]["grain"] = {"train": train, "vocab_size": 256, "end_of_document": 255} | grain
        tree["run"] = {"dir": str(tmp_path / "run")}
        apply_overrides(tree, list(overrides))
        return parse_config(tree)

    return make


# -- documents are what prepared ones are


class _Given:
    """A dataset of arrays."""

    def __init__(self, elements):
        self.elements = elements

    def __len__(self):
        return len(self.elements)

    def __getitem__(self, number):
        return self.elements[number]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any),
    st.sampled_from([7, None]),
    st.booleans(),
    st.sampled_from([("windows", False), ("windows", True), ("packed", False)]),
)
def test_rows_of_documents_are_those_of_stored_ones(lengths, end, weighted, kind):
    rng = np.random.default_rng(len(lengths))
    raw = [{"tokens": rng.integers(8, 99, size), "weights": rng.integers(0, 2, size)} for size in lengths]
    elements = [
        None if not len(one["tokens"]) and number % 2 else one if weighted else {"tokens": one["tokens"]}
        for number, one in enumerate(raw)
    ]
    dataset = Elements(_Given(elements), "data.grain.train", "memory.dataset", "documents", 100)
    index = measure_elements(dataset, end, lambda text: None)
    ours = DocumentStream(dataset, index, end)

    kept = [one for one in raw if len(one["tokens"])]
    ended = lambda values, last: values if end is None else np.append(values, last)
    tokens = [ended(one["tokens"], end).astype(np.uint16) for one in kept]
    masks = [ended(one["weights"], one["weights"][-1]).astype(np.uint8) for one in kept]
    starts = np.cumsum([0, *map(len, tokens)])[:-1]
    stored = StoredTokens([np.concatenate(tokens)], lambda: starts, end, [np.concatenate(masks)] if weighted else None)
    length = 9
    expected, found = (make_reader(stream, kind[0], length, kind[1]) for stream in (stored, ours))
    numbers = np.arange(expected.row_count_with_partial + 1)  # and one past the end
    assert (expected.rows, expected.row_count_with_partial) == (found.rows, found.row_count_with_partial)
    for field, values in expected.read(numbers).items():
        np.testing.assert_array_equal(values, found.read(numbers)[field])


def test_an_end_that_is_there_is_not_added():
    elements = Elements(_Given([{"tokens": [1, 2, 9]}, {"tokens": [3]}]), "key", "path", "documents", 10)
    stream = DocumentStream(elements, measure_elements(elements, 9, lambda text: None), 9)
    out = np.empty(5, np.int32)
    stream.read(0, out)
    assert out.tolist() == [1, 2, 9, 3, 9]


def test_few_documents_are_held(monkeypatch):
    monkeypatch.setattr(elements_module, "_MAX_CACHED_TOKENS", 50)
    elements = Elements(_Given([{"tokens": np.full(20, n)} for n in range(9)]), "key", "path", "documents", 10)
    stream = DocumentStream(elements, measure_elements(elements, None, lambda text: None), None)
    out = np.empty(180, np.int32)
    stream.read(0, out)
    assert out.tolist() == np.repeat(np.arange(9), 20).tolist() and len(stream._cache._documents) == 2


# -- rows


def test_rows_of_a_run_are_a_source(prepared, module, asked):
    """What `load_rows` gives is taken as it is: the batches are those of the run that it was made for."""
    first = parse_config(
        {"data": {"path": str(prepared), "rows": "packed", "sequence_length": 32, "global_batch_size": 16}}
    )
    rows = module(f"""
        import jaxmnt
        from jaxmnt.config.load import parse_config

        rows = jaxmnt.load_rows(parse_config({first.model_dump()}))[:160]
    """)
    config = asked("data.rows=packed", "data.shuffle=false", train=f"{rows}.rows", vocab_size=257, elements="rows")
    expected, found = (TrainingData(one, open_sources(one.data)) for one in (first, config))
    for step in (0, 9, 3):
        for field, values in expected.batch(step, range(16)).items():
            np.testing.assert_array_equal(values, found.batch(step, range(16))[field])


def test_held_out_rows_are_filled_up(asked, module):
    config = asked(train=f"{asked().data.grain.train.partition('.')[0]}.rows", elements="rows")
    part = open_sources(config.data).parts["data"]
    assert (part.tokens("train"), part.documents("train"), part.tokens("eval")) == (6400, 200, 0)
    reader = TrainingData(config, Sources({"data": part})).readers["data"]
    read = reader.read([199, 200])
    assert read["weights"].sum(axis=1).tolist() == [16, 0] and read["targets"][1].max() == 0
    assert read["segments"].sum(axis=1).tolist() == [32, 0]


# -- runs


@pytest.fixture
def mixture(prepared, module, tmp_path):
    """A config file that mixes prepared data with datasets of documents and of rows."""
    name = module()
    tree = {section: dict(values) for section, values in TINY.items()}
    tree["data"] |= {
        "rows": "packed",
        "sources": {
            "prepared": {"path": str(prepared)},
            "documents": {"grain": {"train": f"{name}.documents", "eval": f"{name}.held_out"}, "weight": 2.0},
            "rows": {"grain": {"train": f"{name}.rows", "elements": "rows"}},
        },
    }
    tree["train"] |= {"steps": 6}

    def make(folder: str) -> Path:
        path = tmp_path / f"{folder}.yaml"
        path.write_text(json.dumps(tree | {"run": {"dir": str(tmp_path / folder)}}))
        return path

    return make


@pytest.mark.exhaustive
def test_two_processes_stop_and_one_goes_on(mixture, tmp_path):
    """The batches are those that the config means, and the documents are indexed once."""
    config, index = mixture("run"), tmp_path / "run" / "data_index"
    stopped = launch(config, "train.stop_after=3", processes=2, devices=1)
    assert stopped.returncode == 75, stopped.stderr
    before = {path.name: path.read_bytes() for path in index.iterdir()}
    resumed = command("jaxmnt.train", "--config", str(config))
    assert resumed.returncode == 0, resumed.stderr
    assert len(before) == 2 and before == {path.name: path.read_bytes() for path in index.iterdir()}
    loaded = jaxmnt.load_config(config)
    sources = open_sources(loaded.data)
    data = TrainingData(loaded, sources)
    expected = [batch_digest(row_digests(data.batch(step, range(16))["tokens"])) for step in range(6)]
    assert [line["batch_digest"] for line in metrics(tmp_path / "run")] == expected
    evaluated = metrics(tmp_path / "run", "eval")[-1]["sources"]
    assert sorted(evaluated) == ["documents", "prepared"]
    assert evaluated["documents"]["tokens"] == sources.parts["documents"].tokens("eval") > 500


VALUED = """
    import grain
    import jax.numpy as jnp
    import numpy as np
    from jaxmnt.training.loss import LossSums

    def row(number):
        generator = np.random.default_rng(int(number))
        whole = generator.integers(0, 250, 33)
        first = generator.integers(4, 28)
        segments = np.where(np.arange(32) < first, 1, 2)
        positions = np.where(segments == 1, np.arange(32), np.arange(32) - first)
        # A number of each document, at all of its tokens.
        value = generator.uniform(0, 2, 2)[segments - 1]
        return {
            "tokens": whole[:-1], "targets": whole[1:], "segments": segments, "positions": positions, "value": value,
        }

    rows = grain.MapDataset.range(200).map(row)

    def valued(logits, tokens, train):
        each = logits.log_sum_exp() - logits.pick(tokens["targets"])
        return LossSums(jnp.sum(each * tokens["weights"] * tokens["value"]), jnp.sum(each * tokens["weights"]))
"""


@pytest.mark.slow
def test_a_field_of_ones_own_reaches_a_loss_on_any_number_of_hosts(asked, module, tmp_path):
    """The losses of a run depend on the field, and not on the processes and meshes."""
    name = module(VALUED)
    overrides = ("data.rows=packed", "train.steps=3", "optimizer.warmup_steps=1", f"train.loss={name}.valued")
    chosen = asked(*overrides, "data.fields={value: float32}", train=f"{name}.rows", elements="rows", eval=None)
    here = lambda folder: {"run": {"dir": str(tmp_path / folder)}}
    numbers = {}
    for folder, devices, changes in (
        ("one", 1, {}),
        ("mesh", 8, {"mesh": {"fsdp": 2, "model": 2, "data": 2}}),
        ("without", 1, {"train": chosen.train.model_dump() | {"loss": None}}),
    ):
        assert train(parse_config(chosen.model_dump() | here(folder) | changes), devices=jax.devices()[:devices]) == 0
        numbers[folder] = [[line["loss"], line["grad_norm"]] for line in metrics(tmp_path / folder)]
    config = tmp_path / "two.yaml"
    config.write_text(json.dumps(chosen.model_dump() | here("two")))
    two = launch(config, processes=2, devices=1)
    assert two.returncode == 0, two.stderr
    numbers["two"] = [[line["loss"], line["grad_norm"]] for line in metrics(tmp_path / "two")]
    np.testing.assert_allclose(numbers["mesh"], numbers["one"], rtol=1e-5)
    np.testing.assert_allclose(numbers["two"], numbers["one"], rtol=1e-5)
    assert abs(numbers["without"][0][1] / numbers["one"][0][1] - 1) > 1e-3


@pytest.mark.slow
def test_a_run_goes_on_only_with_the_same(asked, module):
    config = asked("train.steps=3", "optimizer.warmup_steps=1", "train.stop_after=1")
    assert train(config, devices=jax.devices()[:1]) == ExitCode.STOPPED
    other = module(MODULE.replace("range(300)", "range(301)"))
    changed = asked("train.steps=3", "optimizer.warmup_steps=1", train=f"{other}.documents")
    with pytest.raises(ConfigError, match="other data: data has other content"):
        train(changed, devices=jax.devices()[:1])


def test_an_index_is_read_again_and_damage_is_made_good(asked, monkeypatch):
    config = asked()
    read = []
    monkeypatch.setattr(grain_source, "measure_elements", lambda *given: read.append(given) or measure_elements(*given))
    opened = lambda: open_sources(config.data, config.run.dir).parts["data"]
    opened().make_index(lambda text: None)
    file = next((Path(config.run.dir) / "data_index").iterdir())
    content = file.read_bytes()
    assert opened().tokens("train") == opened().stream("train").tokens and len(read) == 1
    file.write_bytes(content[:-1])
    opened().make_index(lambda text: None)
    assert file.read_bytes() == content and len(read) == 2


def test_the_data_command_shows_datasets(mixture):
    config = str(mixture("shown"))
    shown = command("jaxmnt.data", "--config", config, "--verify", "--rows", "3", "data.global_batch_size=8")
    assert shown.returncode == 0, shown.stderr
    assert ".documents element " in shown.stdout and "\nrow 2: " in shown.stdout
    assert "verified every element of the Grain dataset of " in shown.stderr


# -- what is refused

BAD = """
    import itertools
    import grain
    import numpy as np

    good = grain.MapDataset.range(40).map(lambda n: {"tokens": np.arange(20) + n})
    late = grain.MapDataset.range(40).map(lambda n: {"tokens": np.arange(20), "weights": np.full(20, 2)})
    iterated = good.to_iter_dataset()
    generator = (one for one in good)
    listed = [{"tokens": [1, 2]}]
    endless = good.repeat()
    empty = good[:0]
    holes = good.map(lambda one: one | {"targets": one["tokens"]}).filter(lambda one: one["tokens"][0] % 2 == 0)
    text = grain.MapDataset.range(40).map(lambda n: {"text": "words"})
    bare = grain.MapDataset.range(40)
    foreign = grain.MapDataset.range(40).map(lambda n: {"tokens": np.arange(20) + 250})
    floats = grain.MapDataset.range(40).map(lambda n: {"tokens": np.arange(20.0)})
    ragged = grain.MapDataset.range(40).map(lambda n: {"tokens": [[1, 2], [3]]})
    uneven = grain.MapDataset.range(40).map(lambda n: {"tokens": np.arange(20), "targets": np.arange(19)})
    short = grain.MapDataset.range(40).map(lambda n: {"tokens": np.arange(20), "targets": np.arange(20)})
    several = grain.MapDataset.range(40).map(
        lambda n: {"tokens": np.arange(32), "targets": np.arange(32), "segments": np.arange(32) // 8 + 1}
    )
    scattered = several.map(lambda one: one | {"segments": one["segments"] % 3})
    padded = several.map(lambda one: one | {"segments": one["segments"] - 1})
    infinite = several.map(lambda one: one | {"value": np.where(one["tokens"] == 3, np.inf, 0)})
    broken = grain.MapDataset.range(40).map(lambda n: 1 // (n - 39) and {"tokens": np.arange(20)})

    counter = itertools.count()
    chance = grain.MapDataset.range(40).map(lambda n: {"tokens": np.arange(20) + next(counter) % 3})

    def grows():
        return grain.MapDataset.range(40 + next(counter)).map(lambda n: {"tokens": np.arange(20)})

    class Unknown:
        def __getitem__(self, number):
            return {"tokens": np.arange(20)}

    def unknown():
        return grain.MapDataset.source(Unknown())

    def unreadable():
        open("/nonexistent/tokens")
"""


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("iterated", "documents", "is an IterDataset, which has no random access; give a grain.MapDataset"),
        ("generator", "documents", "is a generator, not a grain.MapDataset"),
        ("listed", "documents", "is a list, not a grain.MapDataset; convert it with grain.MapDataset.source"),
        ("endless", "documents", r"is endless; leave out repeat\(\)"),
        ("unknown", "documents", "has no len|length of .* is unknown"),
        ("empty", "documents", "is empty; give a dataset with elements"),
        ("text", "documents", r"element 0 of .*text is not a mapping with tokens, but the fields \['text'\]"),
        ("bare", "documents", "element 0 of .*bare is not a mapping with tokens, but a value of type int"),
        ("good", "rows", r"is not a mapping with tokens and targets, but the fields \['tokens'\]"),
        ("holes", "rows", "element 1 of .*holes is None, as if a filter had removed an element"),
        ("foreign", "documents", "element 0 of .*foreign has 256 among its tokens, which must be from 0 to 255"),
        ("ragged", "documents", "has tokens that are not an array .*; give a vector of numbers"),
        ("floats", "documents", r"has tokens of type float64 and shape \[20\]; give a vector of integers"),
        ("late", "documents", "has weights that are not a vector of 0 and 1"),
        ("uneven", "rows", "has 20 tokens and 19 targets; give as many of each"),
        ("broken", "documents", "element 39 of .*broken cannot be read: ZeroDivisionError"),
        ("chance", "documents", "element 0 of .*chance differs when it is read twice; make the dataset deterministic"),
        ("grows", "documents", "has 40 elements, and 41 when it is made again"),
        ("missing", "documents", "cannot be made: AttributeError: .* has no attribute 'missing'; it must be"),
        ("infinite", "rows", "has value that are not a vector of finite numbers"),
        ("several", "rows", "is not a mapping with tokens and targets and value"),
        ("unreadable", "documents", "cannot be made: FileNotFoundError.*; check that it is mounted and readable"),
    ],
)
def test_what_cannot_be_a_source(asked, module, name, kind, words):
    own = ["data.fields={value: float32}"] if name in ("infinite", "several") else []
    config = asked(*own, train=f"{module(BAD)}.{name}", elements=kind)
    with pytest.raises(ConfigError, match=f"data.grain.train: .*{words}"):
        open_sources(config.data)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("short", "has 20 tokens, but data.sequence_length is 32; make them equal"),
        ("several", "keeps documents apart by segments and positions; set data.document_mask: true"),
        ("padded", "has targets in segment 0, which is padding; number documents from 1"),
        ("scattered", "has a segment in several places; the tokens of a document must be contiguous"),
    ],
)
def test_rows_that_do_not_fit_the_config(asked, module, name, words):
    mask = f"data.document_mask={name in ('scattered', 'padded')}"
    config = asked(mask, train=f"{module(BAD)}.{name}", elements="rows")
    with pytest.raises(ConfigError, match=words):
        TrainingData(config, open_sources(config.data))


def test_prepared_data_has_no_fields_of_ones_own(prepared):
    config = parse_config({"data": {"path": str(prepared), "sequence_length": 32, "fields": {"value": "float32"}}})
    with pytest.raises(ConfigError, match=r"data.fields: .* does not provide value; only Grain datasets of rows do"):
        TrainingData(config, open_sources(config.data))


@pytest.mark.parametrize("change", [lambda one: one + 1, lambda one: one[:-1], lambda one: None])
def test_a_document_that_changes_later_is_refused(change):
    """One that the samples at the start did not show."""
    held = _Given([{"tokens": np.arange(20)} for _ in range(40)])
    elements = Elements(held, "data.grain.train", "users.documents", "documents", 99)
    stream = DocumentStream(elements, measure_elements(elements, None, lambda text: None), None)
    tokens = change(np.arange(20))
    held.elements[17] = None if tokens is None else {"tokens": tokens}
    with pytest.raises(ConfigError, match=r"element 17 of users\.documents is not what it was when the run indexed"):
        stream.read(0, np.empty(800, np.int32))


@pytest.mark.parametrize("error", [OSError("the mount is gone"), RuntimeError("503")])
def test_reading_that_fails_later_may_be_tried_again(asked, error):
    """It is the user's code: nobody knows what may pass by itself."""

    class Away(_Given):
        def __getitem__(self, number):
            raise error

    elements = Elements(Away([None] * 9), "data.grain.train", "users.rows", "rows", 99)
    with pytest.raises(UnreadableError, match=r"element 3 of users\.rows cannot be read: .*(gone|503); correct"):
        elements.read(3)


def test_a_dataset_that_is_changed_where_no_sample_is_taken_is_another(asked, module):
    """The index of the run is lost, and made anew of a dataset in which one document of 300 has changed."""
    config = asked("train.steps=3", "optimizer.warmup_steps=1", "train.stop_after=1")
    assert train(config, devices=jax.devices()[:1]) == ExitCode.STOPPED
    text = MODULE.replace("integers(5, 90))", "integers(5, 90) + int(number == 7))")
    other = asked("train.steps=3", "optimizer.warmup_steps=1", train=f"{module(text)}.documents")
    samples = [open_sources(one.data).parts["data"].sample_digest for one in (config, other)]
    if samples[0] != samples[1]:
        pytest.fail("the document that has changed is a sample: choose another for this test")
    shutil.rmtree(tmp := Path(config.run.dir) / "data_index")
    with pytest.raises(ConfigError, match="data has other content than before"):
        train(other, devices=jax.devices()[:1])
    assert tmp.is_dir()


def test_few_documents_among_holes_are_a_dataset(asked, module):
    few = module("""
        import grain
        import numpy as np

        some = grain.MapDataset.range(4000).filter(lambda n: n % 97 == 5).map(lambda n: {"tokens": np.arange(9)})
        none = grain.MapDataset.range(40).filter(lambda n: False)
        late = grain.MapDataset.range(99).map(
            lambda n: {"tokens": np.arange(9)} | ({"weights": np.arange(9) % 2} if n == 5 else {})
        )
    """)
    assert open_sources(asked(train=f"{few}.some").data).parts["data"].documents("train") == 42
    stream = open_sources(asked(train=f"{few}.late").data).parts["data"].stream("train")
    assert stream.has_learn_mask, "one of them has weights, and no sample"
    no_documents = r"data\.grain\.train: .*none has no documents; give a dataset with documents"
    with pytest.raises(ConfigError, match=no_documents):
        open_sources(asked(train=f"{few}.none").data).parts["data"].tokens("train")


def test_a_folder_that_cannot_be_written_is_a_message(asked, tmp_path):
    config = asked(f"run.dir={tmp_path}/file/run")
    (tmp_path / "file").write_text("no folder")
    part = open_sources(config.data, config.run.dir).parts["data"]
    with pytest.raises(UnreadableError, match=r"run\.dir: .* cannot be used: Not a directory; fix that"):
        part.make_index(lambda text: None)


def test_an_index_that_does_not_appear_is_named(asked, monkeypatch):
    monkeypatch.setattr(grain_source, "_INDEX_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(grain_source, "_POLL_SECONDS", 0.05)
    config = asked()
    with pytest.raises(
        PreflightError, match=r"process 0 has written .*data_index/.*-train, but .* cannot read all of it"
    ):
        open_sources(config.data, config.run.dir).parts["data"].load_index(made_elsewhere=True)


def test_the_current_folder_is_where_modules_are_looked_for(asked, module, tmp_path, monkeypatch):
    name = module()
    monkeypatch.delenv("PYTHONPATH")
    script = Path(sys.executable).with_name("jaxmnt")
    shown = subprocess.run(
        [script, "data", "--config", os.devnull, f"data.grain.train={name}.documents", "data.grain.vocab_size=256",
         "data.sequence_length=32", "data.global_batch_size=4"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert shown.returncode == 0 and f"{name}.documents" in shown.stdout, shown.stderr


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"grain": {"train": "words"}}, "data.grain.train: 'words' is not a dotted path such as package.module.name"),
        ({"grain": {"train": "a.b:c"}}, "is not a dotted path"),
        ({"grain": {"eval": "a.b"}}, r"data\.grain\.train: not set"),
        ({"grain": {"train": "a.b"}, "path": "x"}, r"data\.grain: data\.path is also set"),
        (
            {"sources": {"one": {"grain": {"train": "a.b"}, "path": "x"}}},
            r"one\.grain: data\.sources\.one\.path is also set",
        ),
        ({"grain": {"train": "a.b", "vocab_size": 9, "end_of_document": 9}}, "must be below"),
    ],
)
def test_settings_that_contradict_each_other(data, words):
    with pytest.raises(ConfigError, match=words):
        parse_config({"data": data})


def test_a_vocabulary_is_needed_and_may_be_that_of_prepared_data(asked, prepared):
    grain = {"train": asked().data.grain.train}
    with pytest.raises(ConfigError, match=r"data\.grain\.vocab_size: not set; give the number of token ids of"):
        open_sources(parse_config({"data": {"grain": grain}}).data)
    sources = {"a": {"grain": grain}, "b": {"path": str(prepared)}}
    both = open_sources(parse_config({"data": {"sources": sources}}).data)
    assert both.vocab_size == 257 and both.end_of_document == 256 and both.folder == prepared
    sources["a"]["grain"] |= {"vocab_size": 300}
    with pytest.raises(
        ConfigError,
        match=r"a\.grain\.vocab_size: 300 differs from that of the prepared data in the same config \(257\)",
    ):
        open_sources(parse_config({"data": {"sources": sources}}).data)

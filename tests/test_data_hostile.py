"""Prepared data that was damaged, or changed by someone: what is cheap to know is known without data.verify."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxmnt.config.load import parse_config
from jaxmnt.data import manifest as manifests
from jaxmnt.data.batches import EvaluationData, TrainingData, training_rows
from jaxmnt.data.preparation.inputs import ReadOptions, Selection, Settings
from jaxmnt.data.preparation.run import build
from jaxmnt.data.sources import open_sources
from jaxmnt.data.store import open_prepared
from jaxmnt.errors import ConfigError

DIGEST_BEFORE = "a6e00254"


@pytest.fixture
def copy(prepared, tmp_path) -> Path:
    """Prepared data that may be damaged."""
    return Path(shutil.copytree(prepared, tmp_path / "data"))


def rewrite(folder: Path, change) -> None:
    """Changes the manifest and seals it again: the seal must not be all that is looked at."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("seal", None)
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifests.sealed(manifest)))


def shard(folder: Path, kind: str = "tokens", number: int = 0) -> Path:
    return sorted((folder / "train").glob(f"{kind}-*"))[number]


def read_all(folder: Path, rows: str = "windows", mask: bool = False) -> None:
    """Reads every training row, as a run would."""
    settings = {
        "path": str(folder),
        "rows": rows,
        "document_mask": mask,
        "sequence_length": 32,
        "global_batch_size": 16,
    }
    config = parse_config({"data": settings})
    sources = open_sources(config.data)
    data = TrainingData(config, sources)
    for first in range(0, data.readers["data"].row_count_with_partial, 16):
        data.readers["data"].read(range(first, first + 16))
    list(EvaluationData(config, sources.parts["data"]).batches(range(16), 16, prefetch=1, threads=0))


# -- the manifest


def test_digests_of_data_from_before_and_after_the_seal_are_the_same(copy):
    """A run goes on with data of the version before, and with the same data prepared again by this one."""
    now = open_prepared(copy)
    old = {name: value for name, value in now.manifest.items() if name != "seal"} | {"version": 2}
    (copy / "manifest.json").write_text(json.dumps(old, indent=1))
    before = open_prepared(copy)
    assert before.digest == now.digest and now.is_sealed and not before.is_sealed
    read_all(copy, "packed")
    before.verify()


def test_this_input_has_the_digest_that_it_always_had(tmp_path):
    """Made by the version before the seal: runs know their data by it."""
    (tmp_path / "in").mkdir()
    for number in range(5):
        (tmp_path / "in" / f"{number}.txt").write_text(f"text {number}\n" * 50)
    lines = [json.dumps({"text": f"record {number} ä" * number}) for number in range(40)]
    (tmp_path / "in" / "a.jsonl").write_text("\n\n".join(lines) + "\n \n ")
    build(Selection([tmp_path / "in"]), tmp_path / "out", Settings(eval_fraction=0.2), lambda *progress: None)
    assert open_prepared(tmp_path / "out").digest[:8] == DIGEST_BEFORE


ODD_MANIFESTS = {
    "nested": ("[" * 100_000, "nested too deeply"),
    "nested in a key": ('{"format": ' + '{"a":' * 50_000, "nested too deeply"),
    "no object": ("[1]", "has format null null"),
    "infinity": ('{"format": Infinity}', "holds Infinity"),
    "cut off": ('{"format": "jaxmnt-tokens", "vers', "is damaged"),
    "long number": ('{"vocab_size": ' + "9" * 5000 + "}", "is damaged"),
    "escape": ('{"format": "\\u001b[2Jx"}', r"has format \\x1b\[2Jx null"),
}


@pytest.mark.parametrize("name", ODD_MANIFESTS)
def test_a_manifest_that_is_none(copy, name):
    text, message = ODD_MANIFESTS[name]
    (copy / "manifest.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"data\.path: .*{message}") as raised:
        open_prepared(copy)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


def _first(manifest):
    return manifest["splits"]["train"]["shards"][0]


ODD_VALUES = {
    "vocabulary": (lambda m: m.update(vocab_size=-1), "vocab_size is -1"),
    "huge vocabulary": (lambda m: m.update(vocab_size=10**400), "vocab_size is a number of more than 20 digits"),
    "largest id": (lambda m: m.update(largest_id=257), "largest_id is 257"),
    "float": (lambda m: m.update(vocab_size=257.0), r"vocab_size is 257\.0"),
    "true": (lambda m: m["splits"]["train"].update(documents=True), "documents of train is true"),
    "other vocabulary": (lambda m: m.update(vocab_size=300_000), "dtype uint16 is not that of 300000 ids"),
    "other dtype": (lambda m: m.update(dtype="float32"), "dtype float32 is not that of 257"),
    "lacking": (lambda m: m.pop("learn_mask"), "it lacks learn_mask"),
    "foreign": (lambda m: m.update(extra=1), "has the unknown key extra"),
    "foreign below": (lambda m: _first(m).update(extra=1), "shard 0 of train has the unknown key"),
    "version": (lambda m: m.update(version=99), "has format jaxmnt-tokens 99, but this version reads"),
    "true version": (lambda m: m.update(version=True), "has format jaxmnt-tokens true"),
    "no object": (lambda m: m.update(splits=[]), "splits is a list of 0"),
    "no list": (lambda m: m["splits"]["eval"].update(shards={}), "shards of eval is not a list"),
    "end": (lambda m: m["tokenizer"].update(end_of_document=999), "end_of_document is 999"),
    "no end": (lambda m: m["tokenizer"].update(end_of_document=None), "end_of_document is null"),
    "tokenizer": (lambda m: m["tokenizer"].update(name="\x1b[2J"), r"name is \\x1b\[2J"),
    "path": (lambda m: _first(m).update(name="../../../etc"), r"name of shard 0 of train is \.\./\.\./\.\./etc"),
    "digest": (lambda m: m["files"].update({"sources.txt": "x"}), r"digest of sources\.txt is x"),
    "other file": (lambda m: m["files"].update({"../x": "0" * 64}), r"has the unknown key \.\./x"),
    "sum": (lambda m: m["splits"]["train"].update(tokens=5), "differs from the totals"),
    "negative": (lambda m: _first(m).update(tokens=-5), "tokens of shard 0 of train is -5"),
    "bytes of a target": (lambda m: m.update(bytes_per_target={"train": None}), "bytes_per_target lacks eval"),
    "nats": (lambda m: m["unigram_nats"].update(eval=1e300), "unigram_nats of eval is 1e"),
}


@pytest.mark.parametrize("name", ODD_VALUES)
def test_a_manifest_with_an_odd_value(copy, name):
    change, message = ODD_VALUES[name]
    rewrite(copy, change)
    with pytest.raises(ConfigError, match=rf"data\.path: .*{message}") as raised:
        open_prepared(copy)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_a_changed_manifest_is_told_by_its_seal(copy):
    path = copy / "manifest.json"
    text = path.read_text()
    for found in re.finditer(r'"[0-9a-f]{64}"', text):  # another digest for a file is as plausible as before
        place = found.start() + 9
        path.write_text(text[:place] + ("1" if text[place] == "0" else "0") + text[place + 1 :])
        with pytest.raises(ConfigError, match="its seal does not match its contents"):
            open_prepared(copy)


# -- the files


def _resave(path: Path, change) -> None:
    np.save(path, change(np.load(path)))


ODD_FILES = {
    "floats": ("tokens", lambda a: a.astype(np.float16), "holds float16 of shape"),
    "signed": ("tokens", lambda a: a.astype(np.int16), "holds int16"),
    "wide": ("tokens", lambda a: a.astype(np.int64), "holds int64"),
    "columns": ("tokens", lambda a: a.reshape(-1, 1), r"of shape \(\d+, 1\)"),
    "scalar": ("tokens", lambda a: a[0], r"of shape \(\)"),
    "objects": ("tokens", lambda a: np.array([{}], object), "cannot be read"),
    "float offsets": ("documents", lambda a: a.astype(float), "holds float64"),
    "offsets": ("origins", lambda a: a[:, 0], "but must hold int64"),
    "other order": ("origins", np.asfortranarray, "but must hold int64"),
}


@pytest.mark.parametrize("name", ODD_FILES)
def test_a_file_of_another_type_is_named(copy, name):
    """Before anything else if its size differs, too; else when it is opened."""
    kind, change, message = ODD_FILES[name]
    path = shard(copy, kind)
    if name == "objects":
        np.save(path, np.array([{}], object), allow_pickle=True)
    else:
        _resave(path, change)
    with pytest.raises(ConfigError, match=rf"data\.path: .*{path.name} .*{message}"):
        check_and_read(copy)


def check_and_read(folder: Path) -> None:
    data = open_prepared(folder)
    data.check()
    stream = data.stream("train")
    _ = stream.document_starts
    stream.read(0, np.empty(stream.tokens, np.int32))
    for document in range(data.documents("train")):
        data.origin("train", document)


@pytest.mark.parametrize("damage", ["longer", "shorter", "header", "zip"])
def test_a_file_of_another_size_is_named(copy, damage):
    path = shard(copy)
    raw = path.read_bytes()
    if damage == "zip":
        np.savez(path.open("wb"), raw)
    else:
        header = b"\x93NUMPY\x01\x00v\x00" + b"{'descr': [[[[" + raw[24:]
        path.write_bytes({"longer": raw + b"\0\0", "shorter": raw[:-2], "header": header}[damage])
    with pytest.raises(ConfigError, match=rf"data\.path: .*{path.name} (cannot be read|has \d+ bytes)"):
        if damage == "header":
            check_and_read(copy)
        open_prepared(copy).check()


@pytest.mark.parametrize("change", ["negative", "beyond", "absurd", "falling", "twice", "late"])
def test_documents_start_one_after_another_within_the_file(copy, change):
    def changed(starts):
        starts[{"negative": 0, "beyond": -1, "absurd": -1, "falling": 2, "twice": 2, "late": 0}[change]] = {
            "negative": -1, "beyond": 10**6, "absurd": 2**63 - 1, "falling": 0, "twice": starts[1], "late": 1,
        }[change]  # fmt: skip
        return starts

    _resave(shard(copy, "documents"), changed)
    for rows, mask in (("packed", False), ("windows", True)):
        with pytest.raises(ConfigError, match=rf"{shard(copy, 'documents').name} do not start one after another"):
            read_all(copy, rows, mask)


@pytest.mark.parametrize("rows", ["windows", "packed"])
@pytest.mark.parametrize("token", [257, 65535])
def test_an_id_beyond_the_vocabulary_is_named_where_a_batch_is_made(copy, rows, token):
    path = shard(copy, number=1)

    def changed(tokens):
        tokens[77] = token
        return tokens

    _resave(path, changed)
    with pytest.raises(ConfigError, match=rf"{path.name} is damaged: it holds the id {token} at element 77, and"):
        read_all(copy, rows)


def test_whoever_reads_ahead_in_threads_is_told(copy):
    for path in (copy / "train").glob("tokens-*"):
        _resave(path, lambda tokens: np.full_like(tokens, 300))
    config = parse_config({"data": {"path": str(copy), "sequence_length": 32, "global_batch_size": 16}})
    batches = training_rows(TrainingData(config, open_sources(config.data)), range(16), 0, prefetch=2, threads=2)
    with pytest.raises(ConfigError, match=r"it holds the id 300 at element \d+, and its ids are below \d+; "):
        next(batches)


def test_ids_as_large_as_ids_can_be(tmp_path):
    """Arrays of 32 bits: what would be negative as a signed number is not of the vocabulary either."""
    np.save(tmp_path / "t.npy", np.arange(2000, dtype=np.uint32) % 1000)
    settings = Settings(tokenizer=None, vocab_size=70_000, reading=ReadOptions(end_id=999), eval_fraction=0.0)
    build(Selection([tmp_path / "t.npy"]), tmp_path / "data", settings, lambda *progress: None)
    read_all(tmp_path / "data")

    def changed(tokens):
        tokens[10] = 2**32 - 1
        return tokens

    _resave(shard(tmp_path / "data"), changed)
    for rows in ("windows", "packed"):
        with pytest.raises(ConfigError, match=r"it holds the id 4294967295 at element 10"):
            read_all(tmp_path / "data", rows)


@pytest.mark.parametrize("rows", ["windows", "packed"])
def test_a_mask_holds_nothing_but_0_and_1(tmp_path, rows):
    record = {"prompt": "a question " * 10, "completion": "an answer " * 10}
    (tmp_path / "chat.jsonl").write_text((json.dumps(record) + "\n") * 20)
    settings = Settings(reading=ReadOptions(chat=True), eval_fraction=0.0)
    build(Selection([tmp_path / "chat.jsonl"]), tmp_path / "data", settings, lambda *progress: None)
    read_all(tmp_path / "data", rows)
    _resave(shard(tmp_path / "data", "learn"), lambda mask: mask * 200)
    with pytest.raises(ConfigError, match="a learn mask holds more than 0 and 1"):
        read_all(tmp_path / "data", rows)


def test_where_a_document_came_from_may_be_nowhere(copy):
    names = (copy / "sources.txt").read_text()
    for text in ("[" * 100_000, "5\n", "not JSON\n"):
        (copy / "sources.txt").write_text(text)
        with pytest.raises(ConfigError, match=r"sources\.txt (cannot be read|is damaged)"):
            open_prepared(copy).origin("train", 0)
    (copy / "sources.txt").write_text(names)
    _resave(shard(copy, "origins"), lambda origins: origins - [10**6, 0])
    with pytest.raises(ConfigError, match=r"origins-.* names record 1 of file -\d+, which is not there"):
        open_prepared(copy).origin("train", 0)

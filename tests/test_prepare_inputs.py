"""What prepare makes of its inputs: long documents, held-out files, arrays without ends, kinds of conversations."""

import gzip
import json
import os
import re
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import command as run_command

from jaxmnt.config.load import parse_config
from jaxmnt.data import tokenizer as tokenizers
from jaxmnt.data.batches import EvaluationData, TrainingData
from jaxmnt.data.preparation.inputs import ReadOptions, Selection, Settings
from jaxmnt.data.preparation.json_lines import Lines
from jaxmnt.data.preparation.parquet import columns_of, largest_page
from jaxmnt.data.preparation.part import read_array
from jaxmnt.data.preparation.run import build
from jaxmnt.data.rows import make_reader
from jaxmnt.data.sources import open_sources
from jaxmnt.data.store import open_prepared
from jaxmnt.data.tokenizer import Bytes, HuggingFace, choose_tokenizer, make_tokenizer
from jaxmnt.errors import ConfigError
from jaxmnt.prepare import main

MIB = 2**20


def prepare(inputs, output, eval_inputs=(), **options):
    selection = Selection([inputs] if isinstance(inputs, Path) else inputs, eval_inputs=eval_inputs)
    return build(selection, output, Settings(**{"eval_fraction": 0.0} | options), lambda *progress: None)


def command(*arguments: object) -> int:
    """`prepare` in this process."""
    return main([str(one) for one in (*arguments, "--workers", 1)])


def tokens_of(path: Path, split: str = "train") -> list[np.ndarray]:
    """The tokens of each document."""
    stream = open_prepared(path).stream(split)
    tokens = np.empty(stream.tokens, np.int64)
    stream.read(0, tokens)
    return np.split(tokens, stream.document_starts[1:]) if stream.tokens else []


def texts_of(path: Path, split: str = "train") -> list[tuple[str, int]]:
    """The text of each document, and its record."""
    data = open_prepared(path)
    tokenizer = make_tokenizer(data.tokenizer, path)
    pieces = enumerate(tokens_of(path, split))
    return [(tokenizer.decode(piece), data.origin(split, number).record) for number, piece in pieces]


# -- lines


@pytest.mark.parametrize("block", [1, 2, 3, 7, 10**6])
def test_lines_of_blocks_are_those_of_the_whole(block):
    text = b'\n\n  \n{"a": 1}\n\t\r\n\n  {"b"}\r\nlast\n\n \x0b\x0c\n end\n   '
    for raw in (text, text.strip(), b"", b"\n", b" ", b"x", b"\n" * 50):
        reader = Lines((raw[first : first + block] for first in range(0, len(raw), block)), 10**6)
        found = [(reader.number, line.strip()) for line in reader]
        expected = raw.split(b"\n") if not raw.endswith(b"\n") else raw.split(b"\n")[:-1]
        expected = [] if not raw else expected
        assert found == [(number, line.strip()) for number, line in enumerate(expected, 1) if line.strip()]
        assert (reader.number, reader.blank) == (len(expected), sum(not line.strip() for line in expected))


def test_blank_lines_are_counted_in_bulk(tmp_path):
    """Blank lines cost no Python each: 2 million take as long as some thousand records."""
    lines = 2_000_000
    with gzip.open(tmp_path / "t.jsonl.gz", "wb", compresslevel=1) as stream:
        stream.write(b"\n" * lines)
        stream.write(b'{"text": "end"}\n')
    counted = Counter()

    def progress(*given):
        counted["calls"] += 1

    settings = Settings(eval_fraction=0.0)
    build(Selection([tmp_path / "t.jsonl.gz"]), tmp_path / "out", settings, progress)
    assert open_prepared(tmp_path / "out").manifest["left_out"]["empty"] == lines
    assert texts_of(tmp_path / "out") == [("end", lines + 1)]
    assert counted["calls"] < 1000  # one a block; one a line would be two million


# -- documents that are too long


def long_lines(folder: Path, kind: str, text: bytes) -> Path:
    """A file of three records, the second of this text."""
    records = [
        b'{"text": "first"}\n',
        b'{"id": [1, {"x": "]"}], "text": "' + text + b'", "z": null}\n',
        b'{"text": "last"}',
    ]
    path = folder / f"t.{kind}"
    if kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": ["first", text.decode(), "last"]}), path, compression="zstd")
    elif kind == "jsonl.zst":
        import zstandard

        path.write_bytes(zstandard.compress(b"".join(records)))
    else:
        path.write_bytes(b"".join(records) if kind == "jsonl" else gzip.compress(b"".join(records)))
    return path


KINDS = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_document_is_an_error_or_left_out_or_split(tmp_path, kind):
    text = ("a ä 漢字 \U0001f600 " * 40_000).encode()
    path = long_lines(tmp_path, kind, text)
    reading = {"max_document": MIB // 4}
    where = r"t\.parquet: row 2" if kind == "parquet" else rf"t\.{kind}:2"
    with pytest.raises(ConfigError, match=rf"{where}: the record is longer than 0\.25 MiB; .*--max-document-mib, or"):
        prepare(path, tmp_path / "error", reading=ReadOptions(**reading))
    summary = prepare(path, tmp_path / "skip", reading=ReadOptions(**reading, long_documents="skip"))
    assert summary.long == 1 and texts_of(tmp_path / "skip") == [("first", 1), ("last", 3)]
    assert open_prepared(tmp_path / "skip").manifest["left_out"]["long"] == 1
    assert prepare(path, tmp_path / "more").documents["train"] == 3  # it is below the default
    split = ReadOptions(**reading, long_documents="split")
    if kind != "parquet":
        advice = "to allow for it: --max-document-mib, --long-documents skip, or its text in a plain text file"
        with pytest.raises(ConfigError, match=rf"{where}: .* 0\.25 MiB, and a JSON record cannot be split; {advice}"):
            prepare(path, tmp_path / "split", reading=split)
        return
    summary = prepare(path, tmp_path / "split", reading=split)
    found = texts_of(tmp_path / "split")
    assert summary.split == 1 and found[0] == ("first", 1) and found[-1] == ("last", 3)
    assert {record for _, record in found[1:-1]} == {2} and len(found) > 4
    assert "".join(piece for piece, _ in found[1:-1]) == text.decode()
    assert all(len(piece.encode()) <= MIB // 4 for piece, _ in found)


def test_a_bomb_takes_no_memory(tmp_path):
    """A line of 400 MB in a file of 13 KB, of which nothing is kept, and an error names its place."""
    import zstandard

    compressor = zstandard.ZstdCompressor().compressobj()
    with (tmp_path / "t.jsonl.zst").open("wb") as stream:
        stream.write(compressor.compress(b'{"text": "'))
        for _ in range(100):
            stream.write(compressor.compress(b"a" * 4 * 10**6))
        stream.write(compressor.compress(b'"}\n{"text": "last"}\n') + compressor.flush())
    limits = {"max_document": 8 * MIB}
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"t\.jsonl\.zst:1: the record is longer than 8 MiB"):
            prepare(tmp_path / "t.jsonl.zst", tmp_path / "error", reading=ReadOptions(**limits))
        prepare(tmp_path / "t.jsonl.zst", tmp_path / "skip", reading=ReadOptions(**limits, long_documents="skip"))
        assert texts_of(tmp_path / "skip") == [("last", 2)]
        assert tracemalloc.get_traced_memory()[1] < 100 * MIB
    finally:
        tracemalloc.stop()


def test_a_large_cell_of_parquet_is_refused_before_it_is_read(tmp_path):
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"text": ["first", "a" * 140 * MIB, "last"], "other": ["", "", ""]})
    parquet.write_table(table, tmp_path / "t.parquet", compression="zstd", use_dictionary=False)
    assert (tmp_path / "t.parquet").stat().st_size < MIB
    before = pyarrow.default_memory_pool().max_memory()
    with pytest.raises(
        ConfigError, match=r"a page between rows 1 and 3 has 140 MiB and must be read at once; raise --max"
    ):
        prepare(tmp_path / "t.parquet", tmp_path / "out")
    assert pyarrow.default_memory_pool().max_memory() <= max(before, 160 * MIB)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_pages_with_statistics_have_their_size(tmp_path, version):
    """Statistics in the header of a page hold text themselves."""
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"text": [f"text {n} of some words" for n in range(2000)]})
    path = tmp_path / "t.parquet"
    parquet.write_table(table, path, data_page_size=4000, data_page_version=version, use_dictionary=False)
    ((column,),) = columns_of(path, [0])
    with path.open("rb") as stream:
        largest = largest_page(stream, column)
    assert 4000 < largest < column.uncompressed_bytes


def test_a_long_conversation_is_not_split(tmp_path):
    record = {"messages": [{"role": "user", "content": "x" * 10_000}, {"role": "assistant", "content": "y"}]}
    (tmp_path / "t.jsonl").write_text(json.dumps(record) + "\n")
    reading = ReadOptions(chat=True, max_document=5000, long_documents="split")
    with pytest.raises(ConfigError, match=r"t\.jsonl:1: .*, and a conversation cannot be split"):
        prepare(tmp_path / "t.jsonl", tmp_path / "out", reading=reading)


def test_a_larger_limit_goes_on_with_what_is_done(tmp_path):
    """The error says to raise the limit: parts before it are not done again."""
    for name, size in (("a", 10), ("b", 9000)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name * size}) + "\n")
    inputs, out = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "out"
    with pytest.raises(ConfigError, match=r"b\.jsonl:1: the record is longer"):
        prepare(inputs, out, part_bytes=10, reading=ReadOptions(max_document=5000))
    assert list((out / "work").glob("part-*.json"))
    with pytest.raises(ConfigError, match="unfinished preparation with other long_documents"):
        prepare(inputs, out, part_bytes=10, reading=ReadOptions(max_document=500))
    prepare(inputs, out, part_bytes=10, reading=ReadOptions(max_document=5000, long_documents="skip"))
    assert texts_of(out) == [("a" * 10, 1)]


def prepare_stopped(inputs: list[Path], output: Path, **options):
    """Interrupted when a part is done."""

    def stop(*progress):
        if list((output / "work").glob("part-*.json")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(Selection(inputs), output, Settings(eval_fraction=0.0, part_bytes=10, **options), stop)


@pytest.mark.exhaustive
def test_a_part_that_left_long_records_out_is_not_gone_on_with_when_they_are_allowed(tmp_path):
    """The same input gives the same bytes, also in two goes."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": name * n}) + "\n" for n in (9000, 1)))
    inputs, out = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "out"
    as_errors = {"skip_bad": True, "part_bytes": 10, "reading": ReadOptions(max_document=5000)}
    prepare_stopped(inputs, out, skip_bad=True, reading=as_errors["reading"])
    for reading in (ReadOptions(max_document=5000, long_documents="split"), ReadOptions(max_document=10**4)):
        with pytest.raises(ConfigError, match="unfinished preparation with other long_documents"):
            prepare(inputs, out, **as_errors | {"reading": reading})
    assert prepare(inputs, out, **as_errors).skipped == 2


def test_a_tokenizer_trained_without_long_records_is_trained_again_when_they_are_allowed(tmp_path):
    records = [{"text": "words and words " * 400}, *({"text": f"other {number}"} for number in range(50))]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(record) + "\n" for record in reversed(records)))
    larger = ReadOptions(max_document=10**4)
    for name, parts_done in (("a", False), ("b", True)):
        out, given = tmp_path / name, {"train_tokenizer": 300, "part_bytes": 200}
        with pytest.raises(ConfigError, match="the record is longer"):
            prepare(tmp_path / f"{name}.jsonl", out, **given, reading=ReadOptions(max_document=5000))
        assert (out / "tokenizer.json").exists() and bool(list((out / "work").glob("part-*"))) == parts_done
        if parts_done:
            with pytest.raises(ConfigError, match="unfinished preparation with other long_documents"):
                prepare(tmp_path / f"{name}.jsonl", out, **given, reading=larger)
            continue
        prepare(tmp_path / f"{name}.jsonl", out, **given, reading=larger)
        prepare(tmp_path / f"{name}.jsonl", tmp_path / "at once", **given, reading=larger)
        assert files_digest(out) == files_digest(tmp_path / "at once")


def files_digest(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_long_cell_that_is_not_utf8_is_left_out_whole_or_its_bytes_are_replaced(tmp_path, capsys):
    write_cells(tmp_path / "t.parquet", [b"a" * 3 * MIB + b"\xff b", b"last"])
    given = ["--input", tmp_path / "t.parquet", "--max-document-mib", 1, "--long-documents", "split", "--output"]
    assert command(*given, tmp_path / "out", "--on-error", "skip", "--eval-fraction", 0) == 0
    said = capsys.readouterr().out
    assert "left out 1 record that cannot be used\n" in said
    assert f"t.parquet: row 1: not valid UTF-8 at byte {3 * MIB} of text" in said
    assert texts_of(tmp_path / "out") == [("last", 2)]
    assert command(*given, tmp_path / "replaced", "--replace-invalid", "--eval-fraction", 0) == 0
    said = capsys.readouterr().out
    assert "1 document is not valid UTF-8; the invalid bytes were replaced" in said and "left out" not in said
    text = "".join(piece for piece, record in texts_of(tmp_path / "replaced") if record == 1)
    assert text == "a" * 3 * MIB + "\ufffd b"


def test_pieces_of_a_document_are_held_out_together(tmp_path):
    path = write_cells(tmp_path / "t.parquet", [f"{number} ".encode() * 2000 for number in range(40)])
    reading = ReadOptions(max_document=2000, long_documents="split")
    prepare(path, tmp_path / "out", reading=reading, eval_fraction=0.3)
    splits = [{record for _, record in texts_of(tmp_path / "out", split)} for split in ("train", "eval")]
    assert all(splits) and not splits[0] & splits[1]


def test_a_long_text_has_the_tokens_of_the_whole(tmp_path, monkeypatch):
    """Encoded in stretches, for the memory's sake, and cut only where that changes nothing."""
    (tmp_path / "in.txt").write_text("".join(f"def f{n}(x):\n    return x  # ä 漢\n\n\n" for n in range(300)))
    prepare(tmp_path / "in.txt", tmp_path / "bpe", train_tokenizer=400)
    tokenizer = HuggingFace(tmp_path / "bpe" / "tokenizer.json")
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("ab \n\t.'ä漢"), 20_000)), "漢" * 9000, "a b" * 5000, "short", ""]
    whole = tokenizer.encode_batch(texts)
    monkeypatch.setattr(tokenizers, "_STRETCH_CHARACTERS", 1000)
    largest = []
    encode = tokenizer._plain.encode_batch_fast

    class Watched:
        usual = tokenizer._plain

        def __getattr__(self, name):
            return getattr(self.usual, name)

        def encode_batch_fast(self, given, **options):
            largest.append(max(map(len, given)))
            return encode(given, **options)

    monkeypatch.setattr(tokenizer, "_plain", Watched())
    for one, other in zip(tokenizer.encode_batch(texts), whole, strict=True):
        assert (one == other).all()
    assert max(largest) == 9000  # nothing to cut at; the others were


# -- held-out files


def write_records(path: Path, name: str, count: int = 20) -> Path:
    path.write_text("".join(json.dumps({"text": f"{name} {number}"}) + "\n" for number in range(count)))
    return path


def test_files_are_held_out_by_name(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    write_records(tmp_path / "in" / "a.jsonl", "a")
    held_out = write_records(tmp_path / "in" / "b.jsonl", "b")
    other = write_records(tmp_path / "other.jsonl", "other")
    out = tmp_path / "out"
    assert command("--input", tmp_path / "in", "--eval-input", held_out, other, "--output", out) == 0
    assert [text for text, _ in texts_of(out)] == [f"a {number}" for number in range(20)]
    assert [text for text, _ in texts_of(out, "eval")] == [f"{name} {n}" for name in ("b", "other") for n in range(20)]
    assert open_prepared(out).manifest["eval_fraction"] == 0
    share = ("--eval-fraction", "0.5", "--output", tmp_path / "both")
    assert command("--input", tmp_path / "in", "--eval-input", held_out, *share) == 0
    assert len(texts_of(tmp_path / "both", "eval")) > 20
    with pytest.raises(ConfigError, match=r"--eval-input: .* does not exist"):
        command("--input", tmp_path / "in", "--eval-input", tmp_path / "none", "--output", tmp_path / "o")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="--eval-input: nothing was found in it"):
        command("--input", tmp_path / "in", "--eval-input", tmp_path / "empty.jsonl", "--output", tmp_path / "o")


def test_token_arrays_are_held_out_by_their_names(tmp_path, capsys):
    for name, first in (("train", 0), ("val", 30)):
        (np.arange(30, dtype=np.uint16) + first).tofile(tmp_path / f"{name}.bin")
    given = ("--input", tmp_path / "train.bin", tmp_path / "val.bin", "--vocab-size", 65, "--output")
    assert command(*given, tmp_path / "out") == 0
    assert "held out because of their names: " in capsys.readouterr().out
    (train,), (held_out,) = tokens_of(tmp_path / "out"), tokens_of(tmp_path / "out", "eval")
    assert train.tolist() == list(range(30)) and held_out.tolist() == list(range(30, 60))
    assert command(*given, tmp_path / "all", "--eval-fraction", 0) == 0
    assert len(tokens_of(tmp_path / "all")) == 2 and not tokens_of(tmp_path / "all", "eval")
    (tmp_path / "train.bin").rename(tmp_path / "fineweb_val_1.bin")  # beside val.bin there is nothing to train on
    with pytest.raises(ConfigError, match=r"--input: .*train\.bin does not exist"):
        command(*given, tmp_path / "o")


# -- token arrays without ends


def test_without_an_end_every_file_is_one_document(tmp_path, capsys):
    """65 characters need 65 ids, and every one of them may occur."""
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 65, size).astype(np.uint16) for size in (3_000_000, 700)]
    for name, array in zip("ab", arrays, strict=True):
        np.save(tmp_path / f"{name}.npy", array)
    settings = {"tokenizer": None, "vocab_size": 65, "part_bytes": 10**6, "shard_tokens": 400_000}
    inputs = [tmp_path / "a.npy", tmp_path / "b.npy"]
    for workers in (1, 2):
        summary = prepare(inputs, tmp_path / str(workers), workers=workers, **settings)
        found = tokens_of(tmp_path / str(workers))
        assert summary.whole_arrays == 2 and [len(one) for one in found] == [3_000_000, 700]
        assert all((one == other).all() for one, other in zip(found, arrays, strict=True))
    data = open_prepared(tmp_path / "1")
    assert data.digest == open_prepared(tmp_path / "2").digest
    assert data.tokenizer == {"name": "none", "end_of_document": None}
    assert [data.origin("train", number) for number in (0, 1)] == [("a.npy", 1), ("b.npy", 1)]
    assert command("--input", *inputs, "--vocab-size", 65, "--output", tmp_path / "out") == 0
    shown = capsys.readouterr().out
    assert "token arrays: 2, each one document" in shown and "nothing is held out" in shown
    config = parse_config({"data": {"path": str(tmp_path / "out"), "sequence_length": 16, "global_batch_size": 4}})
    assert open_sources(config.data).end_of_document is None


@pytest.mark.parametrize(("rows", "mask"), [("windows", False), ("windows", True), ("packed", False)])
def test_what_has_nothing_before_it_is_no_target(tmp_path, rows, mask):
    """Every other token is, once, and what stands before it is its input."""
    for name, first in (("a", 1), ("b", 101)):
        np.save(tmp_path / f"{name}.npy", np.arange(first, first + 50, dtype=np.uint8))
    settings = {"tokenizer": None, "vocab_size": 151}
    prepare([tmp_path / "a.npy", tmp_path / "b.npy"], tmp_path / "out", **settings)
    reader = make_reader(open_prepared(tmp_path / "out").stream("train"), rows, 16, mask)
    batch = reader.read(range(reader.row_count_with_partial))
    learnt = batch["weights"] > 0
    openings = [1, 101] if mask or rows == "packed" else [1]
    expected = [token for token in [*range(1, 51), *range(101, 151)] if token not in openings]
    assert sorted(batch["targets"][learnt].tolist()) == expected
    before = np.where(batch["targets"][learnt] == 101, 50, batch["targets"][learnt] - 1)
    assert (batch["tokens"][learnt] == before).all()
    assert (batch["weights"] == learnt).all()
    tree = {"path": str(tmp_path / "out"), "rows": rows, "document_mask": mask, "sequence_length": 16}
    config = parse_config({"data": tree | {"global_batch_size": 2}})
    sources = open_sources(config.data)
    assert TrainingData(config, sources).batch(0, range(2))["tokens"].shape == (2, 16)
    assert EvaluationData(config, sources.parts["data"])


def test_an_end_that_is_a_token_of_the_text_is_noticed(tmp_path, capsys):
    text = np.random.default_rng(0).integers(0, 65, 50_000).astype(np.uint16)
    text[::9] = 64
    text.tofile(tmp_path / "t.bin")
    given = ("--input", tmp_path / "t.bin", "--vocab-size", 65, "--eval-fraction", 0, "--output")
    assert command(*given, tmp_path / "out", "--end-id", 64) == 0
    shown = capsys.readouterr().out
    documents = len(tokens_of(tmp_path / "out"))
    assert f"the id 64 cuts the token arrays into {documents:,} documents, with a median of 9 tokens" in shown
    assert "warning: documents this short suggest that 64 is an ordinary token of the text" in shown
    text[:] = 1
    text[99::100] = 0
    text.tofile(tmp_path / "t.bin")
    assert command(*given, tmp_path / "long", "--end-id", 0) == 0
    shown = capsys.readouterr().out
    assert "into 500 documents, with a median of 100 tokens" in shown and "warning" not in shown
    for wrong in (-1, 65):
        with pytest.raises(ConfigError, match=rf"--end-id: {wrong} is not one of the vocabulary's ids, which are 0 to"):
            command(*given, tmp_path / "o", "--end-id", wrong)
    with pytest.raises(ConfigError, match=r"--vocab-size: -1 must be from 2 to"):
        command("--input", tmp_path / "t.bin", "--vocab-size", -1, "--output", tmp_path / "o")


def test_a_tokenizer_without_an_end_goes_with_arrays(tmp_path):
    """Its ids turn into text again; documents cannot be encoded with it."""
    import tokenizers as library

    vocabulary = {character: number for number, character in enumerate("abcdefghij")}
    library.Tokenizer(library.models.WordLevel(vocabulary, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    np.save(tmp_path / "t.npy", np.arange(1000, dtype=np.uint8) % 10)
    prepare(tmp_path / "t.npy", tmp_path / "out", tokenizer=str(tmp_path))
    data = open_prepared(tmp_path / "out")
    assert data.tokenizer["end_of_document"] is None and len(tokens_of(tmp_path / "out")) == 1
    assert make_tokenizer(data.tokenizer, tmp_path / "out").decode(np.array([1, 2, 3])).replace(" ", "") == "bcd"
    assert choose_tokenizer(str(tmp_path)).end_of_document is None and choose_tokenizer("bytes").end_of_document == 256
    (tmp_path / "t.txt").write_text("abc")
    with pytest.raises(ConfigError, match="name the token that ends a document"):
        prepare(tmp_path / "t.txt", tmp_path / "o", tokenizer=str(tmp_path))


# -- conversations


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("record", "shape"),
    [
        ({"messages": [{"role": "user", "content": "q"}]}, "messages"),
        ({"conversations": [{"from": "human", "value": "q"}]}, "conversations"),
        ({"instruction": "q", "input": "", "output": "a"}, "instruction and output"),
        ({"prompt": "q", "completion": "a"}, "completion and prompt"),
    ],
)
def test_conversations_without_chat_are_told_as_what_they_are(tmp_path, kind, record, shape):
    if kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "chat.parquet")
    else:
        (tmp_path / "chat.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(ConfigError, match=rf"chat\.{kind}.*hold conversations \({shape}\): give --chat"):
        prepare(tmp_path / f"chat.{kind}", tmp_path / "out")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_other_shapes_of_conversations_become_messages(tmp_path, kind):
    def messages(*turns):
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    pairs = [
        (
            {"conversations": [{"from": who, "value": who} for who in ("system", "human", "gpt")]},
            messages(("system", "system"), ("user", "human"), ("assistant", "gpt")),
        ),
        (
            {"instruction": "do", "input": "this", "output": "done"},
            messages(("user", "do\n\nthis"), ("assistant", "done")),
        ),
        ({"instruction": "do", "input": "", "output": "done"}, messages(("user", "do"), ("assistant", "done"))),
    ]
    for side in (0, 1):
        records = [pair[side] for pair in pairs]
        if kind == "parquet":
            import pyarrow
            from pyarrow import parquet

            names = sorted({name for record in records for name in record})
            columns = {name: [record.get(name) for record in records] for name in names}
            parquet.write_table(pyarrow.table(columns), tmp_path / f"{side}.parquet")
        else:
            (tmp_path / f"{side}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        prepare(tmp_path / f"{side}.{kind}", tmp_path / str(side), reading=ReadOptions(chat=True))
    one, other = (open_prepared(tmp_path / str(side)).manifest["splits"]["train"]["shards"][0] for side in (0, 1))
    for name in ("tokens-00000-00.npy", "learn-00000-00.npy"):
        assert one["sha256"][name] == other["sha256"][name]
    assert texts_of(tmp_path / "0")[1][0].startswith("<|im_start|>user\ndo\n\nthis<|im_end|>")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"conversations": [{"from": "narrator", "value": "x"}]},
            r'turn 1: from is "narrator"; it must be system, human, user, gpt',
        ),
        ({"conversations": [{"from": ["human"], "value": "x"}]}, "turn 1: from is a list; it must be system"),
        ({"conversations": "x"}, "conversations is text; it must be a list"),
        ({"conversations": [{"from": "human"}]}, "turn 1: value is null or missing; it must be text"),
        ({"instruction": "x", "output": 5}, "needs instruction, output and"),
        ({"instruction": "x"}, "needs instruction, output and"),
        ({"\x1b[2J" * 1000: 1}, r"its fields: \\x1b\[2J"),
    ],
)
def test_a_conversation_of_another_shape(tmp_path, record, message):
    (tmp_path / "chat.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(ConfigError, match=rf"chat\.jsonl:1: .*{message}") as raised:
        prepare(tmp_path / "chat.jsonl", tmp_path / "out", reading=ReadOptions(chat=True))
    assert len(str(raised.value)) < 600


# -- what lies beside the records, and values of other kinds


def test_only_the_records_of_a_folder_as_git_or_a_hub_leaves_it_are_read(tmp_path, capsys):
    """Hidden files and cards are left out and named; a file that is given by name is read whatever it is called."""
    folder = tmp_path / "in"
    beside = (".git/HEAD", ".cache/hub/a.jsonl", ".gitattributes", "README.md", "data/_SUCCESS", "data/LICENSE")
    for name in (*beside, "notes/README.md", "other.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "data" / "train.jsonl").write_text('{"text": "record"}\n')
    assert command("--input", folder, "--output", tmp_path / "out", "--eval-fraction", 0) == 0
    assert [text for text, _ in texts_of(tmp_path / "out")] == ["record", "notes/README.md", "other.txt"]
    lines = capsys.readouterr().out.splitlines()
    assert "left out 3 hidden files and folders (in/.cache, in/.git, in/.gitattributes)" in lines
    assert "left out 3 files about a dataset (in/README.md, in/data/LICENSE, in/data/_SUCCESS)" in lines
    explicit = [folder / ".cache", folder / ".gitattributes", folder / "README.md", folder / "data"]
    (folder / ".cache" / "hub" / "a.jsonl").write_text('{"text": "hidden"}\n')
    prepare(explicit, tmp_path / "explicit")
    texts = [text for text, _ in texts_of(tmp_path / "explicit")]
    assert texts == ["hidden", ".gitattributes", "README.md", "record"]
    (folder / ".git" / "objects" / ".hidden").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"no files .* except ignored ones \(objects/\.hidden\); check"):
        prepare(folder / ".git" / "objects", tmp_path / "none")


def test_texts_without_records_beside_them_are_documents(tmp_path):
    for name in ("README.md", "_intro.md", "package/__init__.py"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    prepare(tmp_path / "in", tmp_path / "out")
    assert [text for text, _ in texts_of(tmp_path / "out")] == ["README.md", "_intro.md", "package/__init__.py"]


def test_what_is_left_of_nothing_is_told_with_its_reasons(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "binary").write_bytes(b"\0")
    (tmp_path / "in" / "empty").write_text("")
    (tmp_path / "in" / "odd.jsonl").write_text('{"text": 5}\n')
    os.mkfifo(tmp_path / "in" / "pipe")
    with pytest.raises(ConfigError) as raised:
        prepare(tmp_path / "in", tmp_path / "out", skip_bad=True)
    for part in (
        "nothing was found for training: left out 1 record that cannot be used; left out 1 empty document (in/empty); ",
        "; left out 1 special file or broken link (in/pipe); in/binary is binary (",
        'odd.jsonl:1: field "text" is a number; it must be a string); give more text',
    ):
        assert part in str(raised.value)
    (tmp_path / "t.txt").write_text("text")
    with pytest.raises(ConfigError, match="nothing was found for training: 1 document is held out; give more text, or"):
        prepare(tmp_path / "t.txt", tmp_path / "held out", eval_fraction=0.9999)


def test_a_preparation_that_finds_nothing_leaves_nothing_behind(tmp_path):
    """But for what it has not made, and then it says that the output is in the way."""
    (tmp_path / "prog.txt").write_bytes(b"\0")
    (tmp_path / "t.txt").write_text("text")
    out, own = tmp_path / "out", tmp_path / "own"
    own.mkdir()
    for folder in (out, own):
        with pytest.raises(ConfigError, match=r"^--input: nothing was .*: prog\.txt is binary; give more text$"):
            prepare(tmp_path / "prog.txt", folder)
    assert not out.exists() and not list(own.iterdir())
    with pytest.raises(ConfigError, match="1 document is held out; give more text"):
        prepare(tmp_path / "t.txt", out, eval_fraction=0.9999)
    assert not out.exists()

    def add_a_file(*progress):
        (out / "eval" / "mine").touch()

    with pytest.raises(ConfigError, match="prog\\.txt is binary; remove the output, then give more text"):
        build(Selection([tmp_path / "prog.txt"]), out, Settings(), add_a_file)
    assert (out / "eval" / "mine").exists() and not list(out.rglob("part-*"))


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (["--eval-fraction", "0.3"], r"held out (\d) documents, \d+ tokens: too little"),
        (["--eval-fraction", "0"], "nothing is held out, because of --eval-fraction 0"),
        (["--eval-fraction", "0.0001"], "nothing is held out: none of the 20 documents fell into the share of 0.0001;"),
    ],
)
def test_the_summary_says_how_little_is_held_out(tmp_path, capsys, share, words):
    (tmp_path / "in").mkdir()
    for number in range(20):
        (tmp_path / "in" / f"{number}.txt").write_text(f"text {number}")
    assert command("--input", tmp_path / "in", "--output", tmp_path / "out", *share) == 0
    assert re.search(words, capsys.readouterr().out)


def test_an_input_that_is_no_file_is_told_as_what_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nowhere")
    for path, message in (
        (tmp_path / "pipe", "pipe is a pipe, and cannot be read twice and in parts; write its contents to a file"),
        (Path("/dev/null"), "/dev/null is neither a file nor a folder, and cannot be read twice"),
        (Path("-"), r"- \(standard input\) cannot be read twice and in parts; write its contents to a file"),
        (tmp_path / "link", "link is a link to nowhere, which does not exist"),
        (tmp_path / "none", "none does not exist; check the path"),
    ):
        with pytest.raises(ConfigError, match=f"--input: .*{message}"):
            prepare(path, tmp_path / "out")
    (tmp_path / "tokenizer.model").write_text("")
    (tmp_path / "t.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"tokenizer\.model, which is not supported; convert it to a tokenizer\.json"):
        prepare(tmp_path / "t.txt", tmp_path / "out", tokenizer=str(tmp_path))


def test_values_of_another_kind_are_told_as_what_they_are(tmp_path):
    """A number in a field that is not read may be one that JSON or Python has no form for."""
    cases = Path(__file__).parent / "cases" / "data"
    with pytest.raises(ConfigError, match=r'odd\.jsonl:2: field "text" is a number; it must be a string'):
        prepare(cases / "odd.jsonl", tmp_path / "odd")
    prepare(cases / "nan.jsonl", tmp_path / "nan")
    assert texts_of(tmp_path / "nan") == [("fine", 1)]
    (tmp_path / "long.jsonl").write_text(f'{{"text": "fine", "number": {"9" * 5000}}}\n')
    prepare(tmp_path / "long.jsonl", tmp_path / "long")
    assert texts_of(tmp_path / "long") == [("fine", 1)]
    for value, kind in (("9" * 5000, "a number"), ("NaN", "NaN, a number"), ("[]", "a list"), ("true", "true")):
        (tmp_path / "t.jsonl").write_text(f'{{"text": {value}}}\n')
        with pytest.raises(ConfigError, match=rf't\.jsonl:1: field "text" is {kind}; it must be a string'):
            prepare(tmp_path / "t.jsonl", tmp_path / "out")
    (tmp_path / "twice.jsonl").write_text('{"text": "a", "b": 1, "b": 1}\n{"text": "a", "text": "b"}\n')
    with pytest.raises(ConfigError, match=r'twice\.jsonl:2: field "text" is given twice with different values'):
        prepare(tmp_path / "twice.jsonl", tmp_path / "out")


# -- names


def test_names_that_a_terminal_would_obey_are_escaped(tmp_path, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "fine.txt").write_text("text")
    (folder / "\x1b]0;owned\x07\nb").write_bytes(b"\0")
    os.mkfifo(folder / "pipe")  # is no file, and would be waited for
    assert command("--input", folder, "--output", tmp_path / "out", "--eval-fraction", 0) == 0
    shown = capsys.readouterr().out
    assert r"in/\x1b]0;owned\x07\nb" in shown and "\x1b" not in shown and "\x07" not in shown
    (folder / "\x1b[2J.jsonl").write_text('{"\x7f[": 1, "text": "\n')
    (folder / "\x1b[3J.jsonl").write_text('{"\\u001b[": 1}\n')
    for suffix, expected in ((["2J.jsonl"], r"\x1b[2J.jsonl:1"), (["3J.jsonl"], r"its fields: \x1b[ (")):
        with pytest.raises(ConfigError) as raised:
            prepare([folder / f"\x1b[{suffix[0]}"], tmp_path / "o")
        assert expected in str(raised.value) and "\x1b" not in str(raised.value)


def test_help_fits_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["--help"])
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())
    assert Bytes().end_of_document == 256


# -- the folder that is written to


def files_below(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["work/thesis", "train/a.py", "tokenizer.json"], "work holds thesis"),
        (["work/lock/thesis", "train/a.py"], "work holds lock"),
        (["work/part-00000.json", "train/a.py"], "holds work/part-00000.json but no work/plan.json"),
        (["work/lock", "tokenizer.json"], "holds tokenizer.json but no work/plan.json"),
        (["work/lock", "work/plan.json", "train/a.py"], "plan.json of an unfinished preparation is damaged"),
        (["work/thesis", "manifest.json"], "manifest.json that is damaged or not from jaxmnt"),
        (["work/plan.json", "manifest.json"], "manifest.json that is damaged or not from jaxmnt"),
    ],
)
def test_a_folder_of_a_person_is_left_alone(tmp_path, files, named):
    """Whatever lies in it, it is refused by name and nothing in it is gone."""
    (tmp_path / "in.txt").write_text("some text\n")
    for name in files:
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("" if name.endswith("/lock") else '{"mine": 1}')
    before = files_below(tmp_path / "out")
    with pytest.raises(ConfigError, match=named):
        prepare(tmp_path / "in.txt", tmp_path / "out")
    assert files_below(tmp_path / "out") == before


def test_what_is_not_ours_outlives_a_preparation_begun_anew_and_one_that_is_finished(tmp_path):
    (tmp_path / "in.jsonl").write_text("{\n")
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="not valid JSON"):
        prepare(tmp_path / "in.jsonl", out)
    (out / "train" / "notes").write_text("mine")
    (tmp_path / "in.jsonl").write_text('{"text": "good"}\n')
    prepare(tmp_path / "in.jsonl", out)
    assert (out / "train" / "notes").read_text() == "mine" and not (out / "work").exists()
    (out / "work").mkdir()
    (out / "work" / "thesis").write_text("mine")
    (out / "work" / "lock").write_text("")
    with pytest.raises(ConfigError, match="is prepared already"):
        prepare(tmp_path / "in.jsonl", out)
    assert [path.name for path in (out / "work").iterdir()] == ["thesis"]


def test_a_preparation_killed_before_its_plan_is_begun_again(tmp_path):
    (tmp_path / "in.txt").write_text("some text\n")
    for names in ([], ["lock"], ["lock", ".plan.json.tmp"]):
        out = tmp_path / f"out{len(names)}"
        (out / "work").mkdir(parents=True)
        for name in names:
            (out / "work" / name).write_text("{")
        prepare(tmp_path / "in.txt", out)
        assert not (out / "work").exists()


def test_the_last_step_takes_no_memory_for_each_part(tmp_path):
    """Each part counts every token of the vocabulary; here 16 parts with 4 MiB of counts."""
    inputs = [tmp_path / f"{number:02}.npy" for number in range(16)]
    for path in inputs:
        np.save(path, np.arange(1000, dtype=np.uint32))
    tracemalloc.start()
    try:
        prepare(inputs, tmp_path / "out", part_bytes=1000, tokenizer=None, vocab_size=2**18)
        assert tracemalloc.get_traced_memory()[1] < 50 * MIB
    finally:
        tracemalloc.stop()
    assert open_prepared(tmp_path / "out").manifest["splits"]["train"]["tokens"] == 16_000


def test_counts_of_no_dimension_are_damage(tmp_path):
    np.save(tmp_path / "counts.npy", np.array(3))
    with pytest.raises(ConfigError, match="of an unfinished preparation is damaged"):
        read_array(tmp_path / "counts.npy", 2, 257)


# -- names and line ends


def test_an_array_is_told_by_its_name_in_any_case(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16))
    (tmp_path / "a.npy").rename(tmp_path / "a.NPY")
    prepare(tmp_path / "a.NPY", tmp_path / "out", tokenizer=None, vocab_size=100)
    np.testing.assert_array_equal(tokens_of(tmp_path / "out")[0], np.arange(100))


def test_a_tokenizer_keeps_its_line_ends(tmp_path):
    (tmp_path / "in.txt").write_text("some words and others\n" * 20)
    prepare(tmp_path / "in.txt", tmp_path / "first", train_tokenizer=300)
    text = json.dumps(json.loads((tmp_path / "first" / "tokenizer.json").read_text()), indent=1)
    (tmp_path / "dos.json").write_bytes(text.replace("\n", "\r\n").encode())
    prepare(tmp_path / "in.txt", tmp_path / "out", tokenizer=str(tmp_path / "dos.json"))
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "dos.json").read_bytes()
    assert texts_of(tmp_path / "out") == texts_of(tmp_path / "first")


# -- odd files


HEADER = "{'descr': '<u2', 'fortran_order': False, 'shape': "


@pytest.mark.parametrize(
    "header",
    [HEADER + "(", "(" * 300, "'''", HEADER + "(9" + "9" * 30 + ",), }", "{[]: 1}", HEADER + "(True,), }"],
)
def test_an_odd_header_of_an_array_is_told_in_a_line(tmp_path, header):
    raw = header.encode() + b"\n"
    (tmp_path / "t.npy").write_bytes(b"\x93NUMPY\x01\0" + len(raw).to_bytes(2, "little") + raw + b"\0" * 64)
    with pytest.raises(ConfigError, match=r"t\.npy cannot be read as a token array: ") as caught:
        prepare(tmp_path / "t.npy", tmp_path / "out", tokenizer=None, vocab_size=10)
    assert str(caught.value).isprintable()


def write_cells(path: Path, cells: list[bytes]) -> Path:
    import pyarrow

    return write_column(path, pyarrow.array(cells))


def write_column(path: Path, column, name: str = "text") -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({name: column, "qqqq": pyarrow.array([""] * len(column))}), path)
    return path


def test_a_parquet_column_that_is_no_text_is_refused(tmp_path):
    import pyarrow

    for number, (values, kind) in enumerate((
        ([2**62], pyarrow.timestamp("us")), ([1], pyarrow.int64()), ([["a"]], pyarrow.list_(pyarrow.string())),
    )):  # fmt: skip
        path = write_column(tmp_path / f"{number}.parquet", pyarrow.array(values, kind))
        with pytest.raises(ConfigError, match=r"its column text holds .*, which is not text; --text-field names"):
            prepare(path, tmp_path / f"out{number}", skip_bad=True)


def test_odd_parquet_is_told_in_a_line(tmp_path):
    import pyarrow

    path = write_column(tmp_path / "t.parquet", pyarrow.array(["a"]))
    path.write_bytes(path.read_bytes().replace(b"qqqq", b"q\xff\xfeq"))
    with pytest.raises(ConfigError, match=r"t\.parquet cannot be read as Parquet: 'utf-8' codec"):
        prepare(path, tmp_path / "out")
    fields = {"role": pyarrow.string(), "content": pyarrow.string(), "created_at": pyarrow.timestamp("us")}
    messages = [[{"role": "user", "content": "x", "created_at": when}] for when in (0, 2**62)]
    column = pyarrow.array(messages, pyarrow.list_(pyarrow.struct(list(fields.items()))))
    path = write_column(tmp_path / "c.parquet", column, "messages")
    with pytest.raises(ConfigError, match=r"c\.parquet: row 2: cannot be decoded: "):
        prepare(path, tmp_path / "chat", reading=ReadOptions(chat=True))


def test_damage_that_aborts_the_reader_is_told_by_name(tmp_path):
    """Whoever asks pyarrow for the metadata of this file's column gets SIGABRT."""
    path = Path(__file__).parent / "cases" / "data" / "aborts.parquet"
    done = run_command("jaxmnt.prepare", "--input", str(path), "--output", str(tmp_path / "out"), "--workers", "1")
    assert done.returncode == 2 and re.search(r"aborts\.parquet cannot be read.*histogram size mismatch", done.stderr)
    with pytest.raises(ValueError, match=r"metadata of its columns ended with SIGABRT: .*histogram size mismatch"):
        columns_of(path, [0])


@pytest.mark.parametrize("encoding", ["dictionary", "string_view", "json"])
def test_text_of_any_encoding_has_its_size_and_is_the_same(tmp_path, encoding):
    import pyarrow

    column = pyarrow.array(["ä first", "b" * 6000, None])
    if encoding == "dictionary":
        column = column.dictionary_encode()
    elif encoding == "string_view":
        column = column.cast(pyarrow.string_view())
    else:
        column = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), column)
    path = write_column(tmp_path / "t.parquet", column)
    with pytest.raises(ConfigError, match=r"t\.parquet: row 2: the record is longer"):
        prepare(path, tmp_path / "error", reading=ReadOptions(max_document=5000))
    prepare(path, tmp_path / "split", reading=ReadOptions(max_document=5000, long_documents="split"))
    assert texts_of(tmp_path / "split") == [("ä first", 1), ("b" * 5000, 2), ("b" * 1000, 2)]
    prepare(path, tmp_path / "out")
    assert texts_of(tmp_path / "out") == [("ä first", 1), ("b" * 6000, 2)]

"""What `python -m jaxmnt.data` shows of a batch: all of its tokens, what of them is learned, and where they stand."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest

from jaxmnt.config.load import parse_config
from jaxmnt.data.__main__ import main as show
from jaxmnt.data.batch_contents import LineCounter
from jaxmnt.data.batches import TrainingData
from jaxmnt.data.sources import open_sources
from jaxmnt.data.tokenizer import make_tokenizer
from jaxmnt.prepare import main as prepare

TURNS = [("user", "What is it?"), ("assistant", "It is\na poem.")]


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """Prepared conversations, of which the answers are learned."""
    folder = tmp_path_factory.mktemp("chat")
    record = {"messages": [{"role": role, "content": content} for role, content in TURNS]}
    (folder / "chat.jsonl").write_text(f"{json.dumps(record)}\n" * 40)
    arguments = ["--input", folder / "chat.jsonl", "--chat", "--eval-fraction", "0", "--output", folder / "data"]
    assert prepare(list(map(str, arguments))) == 0
    return folder / "data"


@pytest.mark.parametrize("rows", ["windows", "packed"])
@pytest.mark.parametrize("mask", [False, True])
def test_every_token_of_a_mixed_batch_is_shown_once(prepared, chat, capsys, rows, mask):
    """Placed as the model gets it, with its being a target or not."""
    sources = {"text": {"path": str(prepared)}, "chat": {"path": str(chat)}}
    data = {"sources": sources, "rows": rows, "document_mask": mask, "global_batch_size": 8, "sequence_length": 200}
    config = parse_config({"data": data})
    batch = TrainingData(config, open_sources(config.data)).batch(1, range(8))
    settings = [f"data.{key}={json.dumps(value)}" for key, value in data.items()]
    assert show(["--config", "/dev/null", "--batch", "2", "--json", *settings]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["row"] for row in told["rows"]] == list(range(8)) and told["step"] == 2
    for row, targets_L, weights_L in zip(told["rows"], batch["targets"], batch["weights"], strict=True):
        ids, learned = np.zeros_like(targets_L), np.zeros_like(weights_L)
        for extract in row["extracts"]:
            place = extract["place"]
            for span in extract["spans"]:
                end = place + len(span["ids"])
                ids[place:end], learned[place:end] = span["ids"], span["learned"]
                place = end
        np.testing.assert_array_equal(learned, weights_L > 0)
        np.testing.assert_array_equal(ids[learned > 0], targets_L[learned > 0])
        assert row["targets"] == (weights_L > 0).sum()


def test_the_whole_text_shows_what_is_learned_and_where_it_stands(prepared, chat, tmp_path, capsys):
    settings = [f"data.path={chat}", "data.rows=packed", "data.global_batch_size=2", "data.sequence_length=100"]
    assert show(["--config", "/dev/null", "--batch", "1", "--rows", "1", "--full", *settings]) == 0
    shown = capsys.readouterr().out.split("\nrow 0: ")[1]
    assert shown.startswith("data, packed row ") and "chat.jsonl:" in shown and "line 1 of its text" in shown
    first = "".join(line for line in shown.splitlines(keepends=True) if "│" in line)
    assert "  reads │ <|im_start|>user\n         │ What is it?<|im_end|>" in first
    assert "  learns │ It is\n         │ a poem.<|im_end|>" in first
    assert "<end of document>" in shown
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("".join(f"line {number}\n" for number in range(1, 400)))
    arguments = ["--input", str(tmp_path / "in"), "--eval-fraction", "0", "--output", str(tmp_path / "lines")]
    assert prepare(arguments) == 0
    capsys.readouterr()
    settings = [f"data.path={tmp_path / 'lines'}", "data.global_batch_size=8", "data.sequence_length=100"]
    assert show(["--config", "/dev/null", "--batch", "1", "--json", *settings]) == 0
    for row in json.loads(capsys.readouterr().out)["rows"]:
        [extract] = row["extracts"]
        text = "".join(span["text"] for span in extract["spans"])
        number = int(text.split("line ")[1].split("\n")[0])  # of the first line that begins in the row
        assert extract["line"] == number - (not text.startswith("line "))
        assert extract["record"] == 1 and extract["record_unit"] == "file"


@pytest.fixture
def lines(tmp_path, capsys):
    """One text file of 4,000 lines, prepared with a tokenizer of its own, beside records of the other kinds."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("".join(f"line {number}\n\n" for number in range(1, 2001)))
    (folder / "b.jsonl").write_text('\n{"text": "first\\nlast"}\n' * 100)
    pyarrow.parquet.write_table(
        pyarrow.table({"text": [f"cell\n{number}" for number in range(100)]}), folder / "c.parquet"
    )
    arguments = ["--input", str(folder), "--eval-fraction", "0", "--output", str(tmp_path / "data")]
    assert prepare([*arguments, "--train-tokenizer", "300"]) == 0
    capsys.readouterr()
    return tmp_path / "data"


def test_each_document_is_shown_with_its_place_in_its_file(lines, capsys):
    """Of text the line where the row begins, of records their line or row; with --full also the line within them."""
    settings = ["data.global_batch_size=64", "data.sequence_length=100", "data.rows=packed"]
    assert show(["--path", str(lines), "--batch", "1", *settings]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("batch of step 1: 64 rows") and not any("epochs" in line for line in shown)
    places = {
        "a.txt": r"in/a\.txt line ([\d,]+)  '",
        "b.jsonl": r"in/b\.jsonl:(\d+)  'first",
        "c.parquet": r"in/c\.parquet row (\d+)  'cell",
    }
    for name, place in places.items():
        found = [re.search(place, line) for line in shown if name in line]
        assert found and all(found)
        if name == "a.txt":
            numbers = [int(match[1].replace(",", "")) for match in found if match]
            assert len(set(numbers)) > 10 and max(numbers) > 500
    assert all(int(match[1]) % 2 == 0 for line in shown if (match := re.search(places["b.jsonl"], line)))
    for row in re.findall(r"line ([\d,]+)  '(?:\\n)*line (\d+)\\n", "\n".join(shown)):
        assert int(row[0].replace(",", "")) in range(2 * int(row[1]) - 3, 2 * int(row[1]))
    assert show(["--path", str(lines), "--batch", "1", "--full", *settings]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert any(re.search(r"in/b\.jsonl:\d+, line 1 of its text$", line) for line in shown)
    assert any(re.search(r"in/c\.parquet row \d+, line 1 of its text$", line) for line in shown)
    assert any(re.search(r"in/a\.txt line [\d,]+$", line) for line in shown)


def test_lines_are_those_of_the_text_that_stands_before(lines):
    [part] = open_sources(parse_config({"data": {"path": str(lines)}}).data).parts.values()
    stream, tokenizer = part.stream("train"), make_tokenizer(part.tokenizer, lines)
    [text] = [number for number in range(part.documents("train")) if part.origin("train", number).file == "in/a.txt"]
    begin = int(stream.document_starts[text])
    counted = LineCounter(SimpleNamespace(stream=stream), tokenizer)
    for offset in (4000, 5, 0, 2999, 3000, 4000):
        before = np.empty(offset, np.int64)
        stream.read(begin, before)
        assert counted.line_of(text, begin + offset) == 1 + tokenizer.decode(before).count("\n")


def test_a_verification_is_told_with_what_was_compared(lines, capsys):
    """Also of less data than a batch takes by default. JSON stays alone on stdout."""
    assert show(["--path", str(lines), "--verify"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"verified \d+ files, [\d.]+ KiB: all match the manifest", shown[-1])
    assert [line.split()[0] for line in shown if line][-4:] == ["source", "data", "data", "verified"]
    assert show(["--path", str(lines), "--verify", "--json", "data.global_batch_size=2", "data.sequence_length=9"]) == 0
    streams = capsys.readouterr()
    assert json.loads(streams.out)["step"] == 1 and "all match the manifest" in streams.err


def test_a_step_after_the_last_is_told(lines, capsys):
    arguments = ["--path", str(lines), "--rows", "1", "data.global_batch_size=2", "data.sequence_length=9"]
    for step, steps, is_told in ((41, ["train.steps=40"], True), (40, ["train.steps=40"], False), (10**6, [], False)):
        assert show([*arguments, "--batch", str(step), *steps]) == 0
        assert ("is after the last step of the run, because train.steps is 40" in capsys.readouterr().err) == is_told

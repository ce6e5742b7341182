"""What `python -m jaxmnt.data` shows of a batch: all of its tokens, what of them is learned, and where they stand."""

import json

import numpy as np
import pytest

from jaxmnt.config.load import parse_config
from jaxmnt.data.__main__ import main as show
from jaxmnt.data.batches import TrainingData
from jaxmnt.data.sources import open_sources
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

"""Conversations: nothing that changes their meaning is dropped; what is context and what is a target."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from jaxmnt.data.preparation.documents import BadRecordError, Report
from jaxmnt.data.preparation.inputs import ReadOptions, Selection, Settings
from jaxmnt.data.preparation.markup import ConversationMarkup
from jaxmnt.data.preparation.run import build
from jaxmnt.data.store import open_prepared
from jaxmnt.data.tokenizer import Bytes
from jaxmnt.errors import ConfigError
from jaxmnt.prepare import main

CASES = Path(__file__).parent / "cases" / "chat"
CHAT = ReadOptions(chat=True)


def shown(record: dict, options: ReadOptions = CHAT) -> str:
    """The text of a conversation in ChatML; targets stand in [[ ]], and | is the end of the document."""
    report = Report(read_options=options, skip_bad=False, advance=lambda count: None)
    conversation = ConversationMarkup(options, None, None).render(record, report)
    pieces = [(str(segment.content), segment.learn) for segment in conversation.segments]
    pieces = [(text, learn) for text, learn in [*pieces, ("|", conversation.end_is_target)] if text]
    text = "".join(f"[[{text}]]" if learn else text for text, learn in pieces)
    return (
        text.replace("]][[", "").replace("<|im_start|>", "<").replace("<|im_end|>\n", ">\n").replace("<|im_end|>", ">")
    )


def turns(*messages: tuple[str, str], end: str = "|") -> str:
    return "".join(f"<{role}\n{text}\n" for role, text in messages) + end


def prepared(path: Path, output: Path, **options: object) -> list[str]:
    """The documents of a preparation with `--chat`, shown like `shown`."""
    settings = Settings(eval_fraction=0.0, reading=ReadOptions(chat=True, **options))
    build(Selection([path]), output, settings, lambda *progress: None)
    stream = open_prepared(output).stream("train")
    tokens = np.empty(stream.tokens, np.int64)
    stream.read(0, tokens)
    learn = np.concatenate([np.load(file) for file in sorted((output / "train").glob("learn-*.npy"))])
    starts = [*stream.document_starts, stream.tokens]
    documents = []
    for first, stop in pairwise(starts):
        cuts = [first, *(np.flatnonzero(np.diff(learn[first:stop])) + first + 1), stop]
        text = ""
        for begin, end in pairwise(cuts):
            piece = "".join("|" if token == 256 else Bytes().decode([token]) for token in tokens[begin:end])
            text += f"[[{piece}]]" if learn[begin] else piece
        documents.append(text.replace("<|im_start|>", "<").replace("<|im_end|>", ">"))
    return documents


def case(name: str) -> list[dict]:
    return [json.loads(line) for line in (CASES / f"{name}.jsonl").read_text().splitlines()]


def test_a_system_prompt_beside_the_turns_comes_first():
    (record,) = case("sg")
    with pytest.raises(BadRecordError, match="the record holds tools, which --chat does not render") as raised:
        shown(record)
    assert raised.value.advice == "to train without the field: --ignore-fields tools"
    begun = turns(("system", "You are a pirate.>"), ("user", "Hi>"), ("assistant", "[[Arr>]]"), end="[[|]]")
    assert shown(record, ReadOptions(chat=True, ignored_fields=("tools",))) == begun
    alpaca = {"instruction": "Hi", "output": "Arr", "system": "You are a pirate."}
    assert shown(alpaca) == shown(record | {"tools": "[]"}) == begun
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Arr"}]
    both = {"messages": [{"role": "system", "content": "You are a pirate."}, *messages]}
    assert shown({"messages": messages, "system": "You are a pirate."}) == shown(both | {"system": None}) == begun
    assert shown(both | {"system": "You are a pirate."}) == begun
    with pytest.raises(BadRecordError, match="one system prompt in its field 'system' and another in its first turn"):
        shown(both | {"system": "You are polite."})


def test_earlier_questions_and_answers_are_context():
    (record,) = case("hist")
    earlier = [("user", "How is summer?>"), ("assistant", "Hot.>")]
    now = [("user", "And in winter?>"), ("assistant", "[[Cold.>]]")]
    assert shown(record) == turns(*earlier, *now, end="[[|]]")
    assert shown(record | {"history": []}) == turns(*now, end="[[|]]")
    for history in ([["a"]], [["a", None]], "a", [["a", "b", "c"]], ["ab"]):
        with pytest.raises(BadRecordError, match="history must be a list of pairs"):
            shown(record | {"history": history})


@pytest.mark.parametrize("name", ["tc1", "tc2"])
def test_a_call_of_a_tool_is_named(name):
    with pytest.raises(BadRecordError, match="message 2 holds tool_calls, which --chat does not render"):
        shown(case(name)[0])


def test_a_message_can_say_that_it_is_no_target():
    wrong, right = [("user", "a>"), ("assistant", "WRONG>")], [("user", "b>"), ("assistant", "[[right>]]")]
    assert [shown(record) for record in case("w")] == [turns(*wrong, *right, end="[[|]]")] * 2
    last = {"messages": [*case("w")[0]["messages"][2:], *case("w")[0]["messages"][:2]]}
    assert shown(last) == turns(*right, *wrong)  # and neither is the end of the document
    for mark, message in (
        ({"weight": 0.5}, r"weight is 0\.5; it must be 0 or 1"),
        ({"train": "no"}, r"train is 'no'; it must be"),
        ({"weight": 1, "loss": False}, "weight and loss contradict each other"),
    ):
        with pytest.raises(BadRecordError, match=f"message 1: {message}"):
            shown({"messages": [{"role": "assistant", "content": "x", **mark}]})
    with pytest.raises(BadRecordError, match="message 1: train makes a target of a turn that is not the assistant's"):
        shown({"messages": [{"role": "user", "content": "x", "train": True}]})


def test_nothing_is_a_target_after_a_turn_that_is_none(tmp_path, capsys):
    """Records without a target are left out and counted; if all are, that is an error that says so."""
    path = CASES / "lastuser.jsonl"
    expected = "<user\na>\n<assistant\n[[b>]]\n<user\nthanks>\n|"
    assert prepared(path, tmp_path / "out") == [expected]
    manifest = open_prepared(tmp_path / "out").manifest
    assert manifest["left_out"] == {"bad": 0, "empty": 0, "binary": 0, "without_targets": 4}
    (tmp_path / "in.jsonl").write_text(path.read_text().splitlines()[0])
    with pytest.raises(ConfigError, match="nothing was found for training: left out 1 conversation without a target;"):
        prepared(tmp_path / "in.jsonl", tmp_path / "none")
    arguments = ["--input", path, "--output", tmp_path / "told", "--chat", "--workers", 1, "--eval-fraction", 0]
    assert main([str(argument) for argument in arguments]) == 0
    assert "left out 4 conversations without a target\n" in capsys.readouterr().out


def test_content_may_be_parts_and_the_developer_is_the_system():
    assert shown(case("parts")[0]) == turns(("user", "Hi>"), ("assistant", "[[Hello>]]"), end="[[|]]")
    expected = turns(("system", "Be kind>"), ("user", "Hi>"), ("assistant", "[[Hello>]]"), end="[[|]]")
    assert shown(case("dev")[0]) == expected
    for part, message in (
        ({"type": "image_url", "image_url": {"url": "x"}}, "part 2 has the type image_url; only text"),
        ({"type": "text", "text": None}, "part 2: text is null or missing"),
        ({"type": "text", "text": "x", "audio": "y"}, "part 2 holds audio"),
        (5, "part 2 is a number"),
    ):
        with pytest.raises(BadRecordError, match=f"message 1: content: {message}"):
            shown({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, part]}]})


def test_a_prompt_of_messages_is_context():
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    record = {"prompt": prompt, "completion": [{"role": "assistant", "content": "d"}]}
    expected = turns(("user", "a>"), ("assistant", "b>"), ("user", "c>"), ("assistant", "[[d>]]"), end="[[|]]")
    assert shown(record) == expected
    with pytest.raises(BadRecordError, match=r"needs messages, .*; its fields: completion, prompt"):
        shown(record | {"completion": "d"})


ANSWERED = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


@pytest.mark.parametrize(
    ("where", "field", "value"),
    [
        *(
            ("record", field, "x")
            for field in ("functions", "images", "videos", "documents", "rejected", "label", "chat_template_kwargs")
        ),
        ("record", "weight", 0),
        ("record", "train", False),
        ("record", "prompt", "another question"),
        ("record", "conversations", [{"from": "human", "value": "x"}]),
        *(
            ("message 2", field, "x")
            for field in (
                "function_call",
                "reasoning_content",
                "thinking",
                "name",
                "refusal",
                "mask",
                "audio",
                "images",
            )
        ),
        ("message 2", "mask", True),
    ],
)
def test_a_field_that_would_be_lost_is_named_or_left_out_on_request(where, field, value):
    record = json.loads(json.dumps(ANSWERED))
    (record if where == "record" else record["messages"][1])[field] = value
    with pytest.raises(BadRecordError, match=f"{where} holds {field}, which --chat does not render"):
        shown(record)
    assert shown(record, ReadOptions(chat=True, ignored_fields=(field,))) == shown(ANSWERED)


def test_fields_that_say_nothing_for_the_text_are_read_over():
    question, answer = ANSWERED["messages"]
    answer = answer | {"id": 7, "tool_calls": [], "audio": {"url": None}, "tool_call_id": "a", "weight": None}
    extra = {"prompt_id": "x", "source": "web", "score": 0.5, "score_chosen": 3, "tools": "[]", "images": None}
    repeated = {"prompt": "Hi", "text": "User: Hi\nAssistant: Hello"}
    assert shown({"messages": [question, answer], **extra, **repeated}) == shown(ANSWERED)


def test_fields_of_parquet_are_not_lost_either(tmp_path):
    import pyarrow
    from pyarrow import parquet

    for number, extra in enumerate(({"tools": "[]", "source": "web"}, {"tools": "[{}]"})):
        parquet.write_table(pyarrow.Table.from_pylist([ANSWERED | extra]), tmp_path / f"{number}.parquet")
    assert prepared(tmp_path / "0.parquet", tmp_path / "0") == ["<user\nHi>\n<assistant\n[[Hello>]]\n[[|]]"]
    with pytest.raises(ConfigError, match=r"1\.parquet: row 1: the record holds tools"):
        prepared(tmp_path / "1.parquet", tmp_path / "1")
    assert prepared(tmp_path / "1.parquet", tmp_path / "1", ignored_fields=("tools",))


def test_prepare_names_the_template_and_shows_the_targets(tmp_path, capsys):
    settings = Settings(train_tokenizer=300, eval_fraction=0.0)
    (tmp_path / "in.txt").write_text("some text")
    build(Selection([tmp_path / "in.txt"]), tmp_path / "tokenizer", settings, lambda *progress: None)
    (tmp_path / "chat.jsonl").write_text(json.dumps(ANSWERED))
    arguments = ["--input", tmp_path / "chat.jsonl", "--chat", "--tokenizer", tmp_path / "tokenizer", "--output"]
    assert main([*map(str, [*arguments, tmp_path / "chatml"]), "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    assert "chat   1 conversation in ChatML, because no chat template came with the tokenizer; all answers" in printed
    assert "  learns │ Hello<|im_end|>\n" in printed
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(template)
    assert main([*map(str, [*arguments, tmp_path / "own"]), "--workers", "1", "--learn", "last"]) == 0
    printed = capsys.readouterr().out
    assert (
        f"chat   1 conversation in the chat template of {tmp_path / 'tokenizer'}; last answers are targets" in printed
    )
    assert "   reads │ <user>Hi\n  learns │ <assistant>Hello<|endoftext|>\n" in printed, "it has no generation prompt"

"""What a run keeps of its tokens, so that generate and export work anywhere, and what generate says of a request."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import run_in as run
from hypothesis import given
from hypothesis import strategies as st

from jaxmnt import convert, generate, prepare, score
from jaxmnt.checkpoint import __main__ as checkpoint
from jaxmnt.data.run_tokenizer import RunTokenizer, read_tokenizer, write_tokenizer
from jaxmnt.data.store import open_prepared
from jaxmnt.data.tokenizer import Bytes, HuggingFace
from jaxmnt.errors import ConfigError, ExitCode
from jaxmnt.score import ScoreRequest, continuation_of
from jaxmnt.train import train
from jaxmnt.trained_model import _tokenizer, _vocabulary, find_model


@pytest.fixture
def asked(monkeypatch):
    """What is asked of the model, instead of asking it: the prompts and lengths. It answers 'xyz'."""
    found = []

    class Asked:
        def __init__(self, spec):
            self.size = spec.data_vocab_size

        def place(self, params, buffers):
            return params, buffers

        def generate(self, weights, prompts, most, sampling, numbers):
            found.append((prompts[0].tolist(), most, self.size))
            yield from ([np.full(len(prompts), token, np.int32) for token in b"xyz"])
            yield np.full(len(prompts), 256, np.int32)

    monkeypatch.setattr("jaxmnt.training.inference.Generator", Asked)
    return found


@pytest.mark.slow
def test_generate_needs_neither_the_data_nor_the_folder_of_the_start(moved, capsys):
    assert generate.main(["--run", str(run(moved)), "--prompt", "ab", "--tokens", "4"]) == ExitCode.FINISHED
    newest = capsys.readouterr().out
    assert newest.startswith("ab")
    assert generate.main(["--run", f"{run(moved)}@10", "--prompt", "ab", "--tokens", "4"]) == ExitCode.FINISHED
    assert capsys.readouterr().out == newest


def test_generate_takes_a_step_and_a_place_of_checkpoints(moved, asked, capsys):
    for named in (f"{run(moved)}@5", str(moved / "kept" / "a"), str(moved / "kept" / "a" / "checkpoints" / "5")):
        assert generate.main(["--run", named, "--prompt", "ab"]) == ExitCode.FINISHED
        assert capsys.readouterr().out == "abxyz\n"
    with pytest.raises(ConfigError, match="no checkpoint of step 7; there are: 5, 10"):
        generate.main(["--run", f"{run(moved)}@7"])


def test_export_carries_the_tokenizer(moved, capsys):
    assert checkpoint.main(["export", str(run(moved)), "weights"]) == ExitCode.FINISHED
    about = json.loads(Path("weights", "jaxmnt-tokenizer.json").read_text())
    assert about == {"tokenizer": {"name": "bytes", "end_of_document": 256}, "vocab_size": 257}


def test_a_run_from_before_it_kept_a_tokenizer_works_through_its_data(project, moved, asked, capsys):
    for home in (run(moved), moved / "kept" / "a"):
        shutil.rmtree(home / "tokenizer")
    with pytest.raises(
        ConfigError,
        match=r"--tokenizer: not given, and the run does not record it: data\.path: data is not a directory",
    ):
        generate.main(["--run", str(run(moved))])
    assert generate.main(["--run", str(run(moved)), "--tokenizer", "bytes"]) == ExitCode.FINISHED
    shutil.copytree(project / "data", moved / "data")
    assert generate.main(["--run", str(run(moved))]) == ExitCode.FINISHED
    assert asked[0] == asked[1]
    shutil.rmtree(moved / "data")
    assert checkpoint.main(["export", str(run(moved)), "weights"]) == ExitCode.FINISHED
    assert (
        "the export has no tokenizer" in capsys.readouterr().err and not Path("weights/jaxmnt-tokenizer.json").exists()
    )


def test_what_does_not_fit_the_window_is_said(moved, asked, capsys):
    assert generate.main(["--run", str(run(moved)), "--prompt", "ab", "--tokens", "999"]) == ExitCode.FINISHED
    told = capsys.readouterr()
    assert told.out == "abxyz\n"
    assert "999 and the prompt's 3 are more than the model's window of 32 tokens; 29 are generated" in told.err
    for more in ([], ["--tokens", "29"]):
        assert generate.main(["--run", str(run(moved)), "--prompt", "ab", *more]) == ExitCode.FINISHED
        assert capsys.readouterr().err == ""
    assert [length for _, length, _ in asked] == [29, 29, 29]
    with pytest.raises(ConfigError, match="100 tokens fill the model's window of 32; shorten the text"):
        generate.main(["--run", str(run(moved)), "--prompt", "a" * 99])


@pytest.mark.parametrize("wrong", [["--temperature", "nan"], ["--temperature", "inf"], ["--seed", "9" * 30]])
def test_numbers_that_no_sample_has(moved, wrong):
    with pytest.raises(ConfigError, match=r"takes|out of range"):
        generate.main(["--run", str(run(moved)), *wrong])


def letters_json(path: Path) -> Path:
    """A tokenizer.json of somebody else's: a letter a token, and nothing that ends a document."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = {letter: number for number, letter in enumerate("abcdefghij ?")}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(path))
    return path


def token_arrays(folder: Path, end: int | None) -> None:
    """Makes the run one that was trained on token arrays, as far as that shows."""
    from jaxmnt.data.run_tokenizer import RunTokenizer, write_tokenizer

    for home in (run(folder), folder / "kept" / "a"):
        write_tokenizer(home, RunTokenizer({"name": "none", "end_of_document": end}, 257, None))


def test_a_run_on_token_arrays_says_what_to_give_and_takes_it(moved, asked, capsys, tmp_path):
    token_arrays(moved, end=11)
    with pytest.raises(
        ConfigError,
        match=r"token arrays.*give --tokenizer bytes, or --tokenizer with the path of the tokenizer\.json that made",
    ):
        generate.main(["--run", str(run(moved)), "--prompt", "ab"])
    assert generate.main(["--run", str(run(moved)), "--prompt", "ab", "--tokenizer", "bytes"]) == ExitCode.FINISHED
    assert asked[-1][0] == [11, 97, 98] and capsys.readouterr().out == "abxyz\n"
    letters = letters_json(tmp_path / "letters.json")
    generate.main(["--run", str(run(moved)), "--prompt", "ab", "--tokenizer", str(letters)])
    assert asked[-1][0] == [11, 0, 1]
    assert (
        "has 12 ids, but the run's tokens have 257, so it may not be the tokenizer that made them"
        in capsys.readouterr().err
    )
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        generate.main(["--run", str(run(moved)), "--tokenizer", "nowhere"])


def test_documents_that_nothing_ends(moved, asked):
    token_arrays(moved, end=None)
    generate.main(["--run", str(run(moved)), "--prompt", "ab", "--tokenizer", "bytes"])
    assert asked[-1][0] == [97, 98]
    with pytest.raises(ConfigError, match="--prompt: empty"):
        generate.main(["--run", str(run(moved)), "--tokenizer", "bytes"])


def test_another_tokenizer_than_the_runs_own_is_refused(moved, asked, tmp_path):
    assert generate.main(["--run", str(run(moved)), "--tokenizer", "bytes"]) == ExitCode.FINISHED
    with pytest.raises(ConfigError, match=r"--tokenizer|--end-token"):
        generate.main(["--run", str(run(moved)), "--tokenizer", str(letters_json(tmp_path / "letters.json"))])


def reseal(path: Path, tokenizer) -> None:
    """Has a manifest say something else of the tokenizer, with a seal that fits it."""
    from jaxmnt.data.manifest import sealed, unsealed

    path.write_text(json.dumps(sealed(unsealed(json.loads(path.read_text())) | {"tokenizer": tokenizer})))


def test_a_copy_that_was_changed_is_not_believed_and_is_written_anew(tmp_path):
    from jaxmnt.data.run_tokenizer import RunTokenizer, read_tokenizer, tokenizer_of_data, write_tokenizer
    from jaxmnt.data.tokenizer import HuggingFace, train_bpe

    pytest.importorskip("tokenizers")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tokenizer.json").write_text(train_bpe(["some text, and more of it"] * 3, 300), newline="")
    description = HuggingFace(tmp_path / "data" / "tokenizer.json").description
    found = tokenizer_of_data(description, 300, tmp_path / "data")
    write_tokenizer(tmp_path, found)
    assert read_tokenizer(tmp_path) == found
    assert read_tokenizer(tmp_path).open().encode_batch(["some text"])[0].tolist()
    before = {path.name: path.read_bytes() for path in (tmp_path / "tokenizer").iterdir()}
    assert sorted(before) == ["manifest.json", "tokenizer.json"]
    rng = np.random.default_rng(0)
    for name, content in before.items():
        for _ in range(40):
            changed = bytearray(content)
            changed[rng.integers(len(changed))] ^= 1 << int(rng.integers(8))
            (tmp_path / "tokenizer" / name).write_bytes(changed)
            with pytest.raises(ConfigError, match="tokenizer is damaged"):
                read_tokenizer(tmp_path)
        write_tokenizer(tmp_path, found)
        assert (tmp_path / "tokenizer" / name).read_bytes() == content
    for hostile in (b"", b"[" * 99999, b"[]", b'"x"', b"{}", b'{"seal": 3}', b"\xff", b"\x00" * 99, b"NaN"):
        (tmp_path / "tokenizer" / "manifest.json").write_bytes(hostile)
        with pytest.raises(ConfigError, match="tokenizer is damaged"):
            read_tokenizer(tmp_path)
    for lie in ({"name": "huggingface"}, {"name": 3}, {"name": "bytes", "end_of_document": 300}, {}, []):
        (tmp_path / "tokenizer" / "manifest.json").write_bytes(before["manifest.json"])
        reseal(tmp_path / "tokenizer" / "manifest.json", lie)
        with pytest.raises(ConfigError, match="tokenizer is damaged"):
            read_tokenizer(tmp_path)
    (tmp_path / "tokenizer" / "tokenizer.json").unlink()
    write_tokenizer(tmp_path, found)
    assert read_tokenizer(tmp_path) == found
    (tmp_path / "tokenizer" / "manifest.json").unlink()
    assert read_tokenizer(tmp_path) is None, "cut off before the end counts as none"
    assert read_tokenizer(tmp_path / "nowhere") is None
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "tokenizer").symlink_to(tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match="is a link"):
        write_tokenizer(linked, RunTokenizer({"name": "bytes", "end_of_document": 256}, 257, None))


def lines(path: Path, records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def shown(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_lines_are_continued_in_batches_as_one_by_one(moved, tmp_path, capsys):
    asked = [{"prompt": text, "id": number} for number, text in enumerate(["ab", "a longer one", "", "z"])]
    command = ["--run", str(run(moved)), "--input", lines(tmp_path / "in", asked), "--tokens", "5", "--seed", "3"]
    assert generate.main([*command, "--batch", "3"]) == ExitCode.FINISHED
    found = shown(capsys)
    assert [{key: one[key] for key in ("prompt", "id")} for one in found] == asked
    assert all(one["finish"] in ("length", "end") and one["tokens"] <= 5 for one in found)
    assert generate.main([*command, "--batch", "1"]) == ExitCode.FINISHED
    assert shown(capsys) == found
    assert generate.main([*command, "--batch", "3", "mesh.fsdp=2", "mesh.model=4"]) == ExitCode.FINISHED
    assert shown(capsys) == found, "on eight devices"


def test_a_stop_text_is_not_shown(moved, asked, tmp_path, capsys):
    command = ["--run", str(run(moved)), "--prompt", "ab"]
    assert generate.main([*command, "--stop", "yz", "--stop", "zz"]) == ExitCode.FINISHED
    assert capsys.readouterr().out == "abx\n"
    stopped = ["--input", lines(tmp_path / "in", [{"prompt": "ab"}]), "--stop", "y"]
    assert generate.main([*command[:2], *stopped]) == ExitCode.FINISHED
    assert shown(capsys) == [{"prompt": "ab", "text": "x", "tokens": 2, "finish": "stop"}]
    assert generate.main([*command[:2], "--input", str(tmp_path / "in")]) == ExitCode.FINISHED
    assert shown(capsys) == [{"prompt": "ab", "text": "xyz", "tokens": 3, "finish": "end"}]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("[1]", "in:1: this line must be an object"),
        ("{", "in:1: this line is not JSON"),
        ('{"text": "a"}', 'in:1: it must have a "prompt" with a text'),
        ('{"prompt": 3}', 'in:1: it must have a "prompt" with a text'),
    ],
)
def test_a_line_that_says_nothing_is_named(moved, asked, tmp_path, capsys, record, words):
    """The other lines are answered all the same, as without it."""
    good = json.dumps({"prompt": "ab"})
    (tmp_path / "in").write_text(f"{record}\n{good}\n")
    assert generate.main(["--run", str(run(moved)), "--input", str(tmp_path / "in")]) == ExitCode.CONFIG
    out, err = capsys.readouterr()
    refused, answered = map(json.loads, out.splitlines())
    assert words in refused["error"] and answered["text"] == "xyz"
    assert "error: --input: 1 line was refused" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--top-p", "0"], "--top-p must be above 0 and at most 1, not 0"),
        (["--top-k", "-1"], "--top-k must be at least 0, not -1"),
        (["--stop", ""], "--stop: an empty text matches everywhere"),
        (["--batch", "0"], "--batch must be at least 1, not 0"),
        (["--system", "Be short."], "--system: only a conversation"),
        (["--chat"], "--chat: give --prompt or --input, or run it on a terminal to hold a conversation"),
        (["--chat", "--prompt", "x"], "--chat: the run has no chat template"),
        (["--expect", "completion"], "--expect: it names a field of the lines of --input; add --input"),
        (["train.steps=3"], "train.steps: only the mesh can be set here"),
        (["mesh.pipeline=2"], "mesh.pipeline: inference does not support a pipeline"),
        (["--input", "nowhere.jsonl"], "--input: nowhere.jsonl cannot be read"),
    ],
)
def test_what_generate_cannot_do_is_said(moved, arguments, words):
    with pytest.raises(ConfigError, match=words):
        generate.main(["--run", str(run(moved)), *arguments])


TEMPLATE = """{{ bos_token }}{% for message in messages %}
{%- if message.role == "tool" %}{{ raise_exception("no tools here") }}{% endif -%}
<{{ message.role }}>{{ message.content | trim }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def test_a_chat_is_rendered_by_the_models_own_template(moved, asked, tmp_path, capsys):
    (run(moved) / "huggingface").mkdir()
    (run(moved) / "huggingface" / "config.json").write_text('{"eos_token_id": [121, 9999]}')
    config = {"bos_token": {"content": "^"}, "chat_template": [{"name": "default", "template": TEMPLATE}]}
    (run(moved) / "huggingface" / "tokenizer_config.json").write_text(json.dumps(config))
    command = ["--run", str(run(moved)), "--chat"]
    assert generate.main([*command, "--prompt", " hi "]) == ExitCode.FINISHED
    assert bytes(asked[-1][0]) == b"^<user>hi\n<assistant>"
    assert capsys.readouterr().out == "x\n", "the turn ends at y, by the model's own config"
    told = [{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}]
    assert generate.main([*command, "--input", lines(tmp_path / "in", told)]) == ExitCode.FINISHED
    assert bytes(asked[-1][0]) == b"^<system>s\n<user>u\n<assistant>"
    assert shown(capsys) == [told[0] | {"text": "x", "tokens": 1, "finish": "end"}]
    told[0]["messages"][0]["role"] = "tool"
    assert generate.main([*command, "--input", lines(tmp_path / "in", told)]) == ExitCode.CONFIG
    assert "cannot render this conversation: TemplateError: no tools here" in shown(capsys)[0]["error"]
    assert generate.main([*command, "--input", lines(tmp_path / "in", [{"text": "x"}])]) == ExitCode.CONFIG
    assert 'in:1: it must have "messages", a list of objects' in shown(capsys)[0]["error"]


CALLING_TEMPLATE = """{{ bos_token }}{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% if enable_thinking is false %}!{% endif %}{% endif %}"""
SAME_LINE = [{"role": "user", "content": "hi"}]


def with_template(home: Path, template: str) -> None:
    (home / "huggingface").mkdir(exist_ok=True)
    (home / "huggingface" / "config.json").write_text('{"eos_token_id": 121}')
    (home / "huggingface" / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def test_what_a_line_gives_besides_its_messages_reaches_the_template(moved, asked, tmp_path, capsys):
    with_template(run(moved), CALLING_TEMPLATE)
    told = {
        "messages": SAME_LINE,
        "tools": [{"type": "function", "function": {"name": "w"}}],
        "chat_template_kwargs": {"enable_thinking": False},
        "documents": None,
    }
    command = ["--run", str(run(moved)), "--chat", "--input", lines(tmp_path / "in", [told])]
    assert generate.main(command) == ExitCode.FINISHED
    assert bytes(asked[-1][0]) == b"(w)<user>hi<assistant>!"
    assert shown(capsys) == [told | {"text": "x", "tokens": 1, "finish": "end"}]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tools": [{"name": "w"}]}, "in:1: the chat template of the model does not read tools; remove it"),
        ({"documents": [{"text": "w"}]}, "in:1: the chat template of the model does not read documents"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "in:1: .* does not read enable_thinking"),
        ({"tools": "w"}, 'in:1: "tools" must be a list of objects'),
        ({"chat_template_kwargs": [1]}, 'in:1: "chat_template_kwargs" must be an object'),
        ({"chat_template_kwargs": {"messages": []}}, 'in:1: "chat_template_kwargs" must not set messages'),
    ],
)
def test_what_the_template_does_not_read_is_named(moved, asked, tmp_path, capsys, more, words):
    with_template(run(moved), TEMPLATE)
    told = lines(tmp_path / "in", [{"messages": SAME_LINE} | more])
    assert generate.main(["--run", str(run(moved)), "--chat", "--input", told]) == ExitCode.CONFIG
    assert re.search(words, shown(capsys)[0]["error"])


def test_scores_of_texts(moved, tmp_path, capsys):
    records = [{"text": "def f():"}, {"context": "def ", "continuation": "f():"}, {"text": "x" * 100}]
    command = ["--run", str(run(moved)), "--input", lines(tmp_path / "in", records)]
    assert score.main([*command, "--batch", "2"]) == ExitCode.FINISHED
    found = shown(capsys)
    assert [one["tokens"] for one in found] == [8, 5, 100], "the blank belongs to what follows"
    assert found[0]["log_likelihood"] < found[1]["log_likelihood"] < 0
    bits = [-one["log_likelihood"] / math.log(2) / size for one, size in zip(found, [8, 5, 100], strict=True)]
    assert [one["bits_per_byte"] for one in found] == pytest.approx(bits)
    assert score.main([*command, "--batch", "1", "mesh.model=2", "mesh.fsdp=4"]) == ExitCode.FINISHED
    for one, other in zip(found, shown(capsys), strict=True):
        assert one["log_likelihood"] == pytest.approx(other["log_likelihood"], rel=1e-5)
    told = lines(tmp_path / "in", [{"prompt": "a"}, records[0]])
    assert score.main(["--run", str(run(moved)), "--input", told]) == ExitCode.CONFIG
    refused, scored = shown(capsys)
    assert 'in:1: it must have "text", or "context" and "continuation"' in refused["error"]
    assert scored["log_likelihood"] == pytest.approx(found[0]["log_likelihood"], rel=1e-5)


def test_a_model_from_elsewhere_begins_texts_as_its_tokenizer_does(moved, tmp_path):
    """Until it is trained further. An empty text begins with what ends documents."""
    pytest.importorskip("tokenizers")
    path = letters_json(tmp_path / "tokenizer.json")
    for home in (run(moved), moved / "kept" / "a"):
        write_tokenizer(home, RunTokenizer(HuggingFace(path, "?").description, 12, path.read_text()))
    vocabulary = lambda: find_model(str(run(moved)), None).vocabulary
    assert vocabulary().with_start([1, 2]) == [11, 1, 2]
    (run(moved) / "huggingface").mkdir()
    (run(moved) / "huggingface" / "config.json").write_text("{}")
    assert vocabulary().with_start([1, 2]) == [11, 1, 2], "it was trained here"
    named = find_model(str(run(moved)), None)
    fresh = replace(named.checkpoint, manifest=replace(named.checkpoint.manifest, tokens=0))
    begun = _vocabulary(_tokenizer(str(run(moved)), None, fresh), fresh, {"config.json": b"{}"})
    assert (begun.with_start([1, 2]), begun.with_start([])) == ([1, 2], [11]), (
        "this tokenizer puts nothing before a text"
    )
    assert continuation_of(begun, "ab", "c", "here") == ScoreRequest([0, 1, 2], 2)
    assert continuation_of(begun, "", "c", "here") == ScoreRequest([11, 2], 1)
    (run(moved) / "huggingface" / "generation_config.json").write_text("[")
    with pytest.raises(ConfigError, match=r"generation_config\.json, which came with the model, cannot be read"):
        vocabulary()


@pytest.mark.slow
def test_a_vocabulary_may_have_a_token_that_the_model_lacks(tiny, tmp_path, capsys):
    """As Gemma 3's text models lack that of an image."""
    tokenizers = pytest.importorskip("tokenizers")
    path = letters_json(tmp_path / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["<end>", "<image>"])
    tokenizer.save(str(path))
    (tmp_path / "text").write_text("abc" * 3000)
    given = [
        "--input",
        str(tmp_path / "text"),
        "--tokenizer",
        str(path),
        "--end-token",
        "<end>",
        "--eval-fraction",
        "0",
    ]
    assert prepare.main([*given, "--output", str(tmp_path / "data")]) == ExitCode.FINISHED
    assert (open_prepared(tmp_path / "data").vocab_size, open_prepared(tmp_path / "data").ids) == (14, 13)
    config = tiny(f"data.path={tmp_path / 'data'}", "model.vocab_size=13", "train.steps=5", "optimizer.warmup_steps=1")
    assert train(config, devices=jax.devices()[:1]) == ExitCode.FINISHED
    capsys.readouterr()
    assert generate.main(["--run", config.run.dir, "--prompt", "ab", "--tokens", "9"]) == ExitCode.FINISHED
    assert capsys.readouterr().out.startswith("ab")
    with pytest.raises(ConfigError, match="the data has ids up to 12, and the model only 12 rows; raise it to 14 or"):
        train(tiny(f"data.path={tmp_path / 'data'}", "model.vocab_size=12"), devices=jax.devices()[:1])


@given(count=st.integers(2, 200), begin=st.integers(1, 199), window=st.integers(2, 40))
def test_each_wanted_token_is_scored_once(count, begin, window):
    wanted = score.ScoreRequest(list(range(count)), min(begin, count - 1))
    scored = []
    for piece in score.windows(wanted, window):
        assert 1 <= piece.begin < len(piece.ids) <= window + 1
        scored += piece.ids[piece.begin :]
    assert scored == list(range(wanted.begin, count))
    if count - wanted.begin <= window:
        (whole,) = score.windows(wanted, window)
        assert whole.ids == wanted.ids[-window - 1 :], "in one piece, with as much before it as there is room for"


def test_a_run_becomes_a_folder_with_its_tokenizer(moved, tmp_path, capsys):
    """What begins and ends a text there is told, or it would be what is usual for the family."""
    pytest.importorskip("tokenizers")
    assert convert.main(["to-hf", str(run(moved)), str(tmp_path / "bytes")]) == ExitCode.FINISHED
    told = json.loads((tmp_path / "bytes" / "config.json").read_text())
    assert (told["eos_token_id"], told["bos_token_id"], told["max_position_embeddings"]) == (256, None, 32)
    assert not (tmp_path / "bytes" / "tokenizer.json").exists(), "bytes have none"
    assert convert.main(["from-hf", str(tmp_path / "bytes"), str(tmp_path / "back")]) == ExitCode.FINISHED
    assert read_tokenizer(tmp_path / "back").description == Bytes().description
    path = letters_json(tmp_path / "tokenizer.json")
    for home in (run(moved), moved / "kept" / "a"):
        write_tokenizer(home, RunTokenizer(HuggingFace(path, "?").description, 12, path.read_text()))
    assert convert.main(["to-hf", str(run(moved)), str(tmp_path / "letters")]) == ExitCode.FINISHED
    assert json.loads((tmp_path / "letters" / "config.json").read_text())["eos_token_id"] == 11
    assert "rows of the vocabulary are left out, because no id of the run's tokenizer" in capsys.readouterr().out
    assert (tmp_path / "letters" / "tokenizer.json").read_text() == path.read_text()
    assert json.loads((tmp_path / "letters" / "tokenizer_config.json").read_text())["eos_token"] == "?"

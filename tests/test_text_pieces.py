"""Text that is encoded in pieces, or decoded after a context, is that of the whole, for tokenizers of all kinds."""

import json
import shutil
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxmnt import prepare
from jaxmnt.data.preparation import text as text_files
from jaxmnt.data.store import open_prepared
from jaxmnt.data.text_pieces import Piece, decode_after, encode_pieces, encode_stretches
from jaxmnt.data.tokenizer import Bytes, HuggingFace, make_tokenizer
from jaxmnt.data.vocabulary import Vocabulary
from jaxmnt.errors import ConfigError, ExitCode
from jaxmnt.generate import Request
from jaxmnt.score import ScoreRequest, continuation_of

library = pytest.importorskip("tokenizers")
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers  # noqa: E402

CASES = Path(__file__).parent / "cases"
CORPUS = [
    "The capital of France is Paris.", "2+2=4 and  two  blanks", "hello world,\nhello there\n", "é ü ﬁ ＡＢ 漢字",
    "user assistant <|im_start|> <think> tool",
] * 20  # fmt: skip
BYTE_NAMES = [f"<0x{byte:02X}>" for byte in range(256)]
SENTENCEPIECE_DECODER = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def bpe(normalizer=None, pre_tokenizer=None, decoder=None, post=None, fallback=False, added=()):
    tokenizer = library.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=fallback, fuse_unk=True))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    # A normalizer writes blanks as ▁, and words end there while the tokenizer is trained.
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.Metaspace(prepend_scheme="never")
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=special + (BYTE_NAMES if fallback else []), show_progress=False,
        initial_alphabet=[] if fallback else alphabet,
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.decoder = decoder
    if post is not None:
        tokenizer.post_processor = post
    tree = json.loads(tokenizer.to_str())
    tree["pre_tokenizer"] = tree["pre_tokenizer"] if pre_tokenizer is not None else None
    tree["added_tokens"] = [token for token in tree["added_tokens"] if token["content"] in special]
    tokenizer = library.Tokenizer.from_str(json.dumps(tree))
    tokenizer.add_tokens(list(added))
    return tokenizer


def byte_level(**parts):
    blank = parts.pop("add_prefix_space", False)
    level = pre_tokenizers.ByteLevel(add_prefix_space=blank)
    return bpe(pre_tokenizer=level, decoder=decoders.ByteLevel(), **parts)


def metaspace(scheme, **parts):
    space = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)])
    return bpe(pre_tokenizer=space, decoder=decoder, fallback=True, **parts)


def wordpiece():
    tokenizer = library.Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["<unk>", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _prepending():
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def _stripping_decoder():
    return decoders.Sequence([*SENTENCEPIECE_DECODER, decoders.Strip(" ", 1, 0)])


def _begin_and_end():
    return processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])


def _with_normalized_special_tokens(tokenizer):
    """As the first conversions of Llama 2 have them; in plain text their names are ordinary characters."""
    tree = json.loads(tokenizer.to_str())
    for token in tree["added_tokens"]:
        token["normalized"] = True
    return library.Tokenizer.from_str(json.dumps(tree))


KINDS = {
    "bytes": Bytes,
    "byte-level": byte_level,
    "byte-level with a blank before": lambda: byte_level(add_prefix_space=True),
    "byte-level, NFC": lambda: byte_level(normalizer=normalizers.NFC()),
    "byte-level, NFKC and lower case": lambda: byte_level(
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "byte-level with ends": lambda: byte_level(post=_begin_and_end()),
    "byte-level with added tokens": lambda: byte_level(
        added=[library.AddedToken("<think>", special=False), library.AddedToken("tool", lstrip=True, special=False)]
    ),
    "Llama 2": lambda: bpe(_prepending(), decoder=_stripping_decoder(), post=_begin_and_end(), fallback=True),
    "Llama 2, normalized": lambda: _with_normalized_special_tokens(
        bpe(_prepending(), decoder=_stripping_decoder(), fallback=True)
    ),
    "Llama 2 with added tokens": lambda: bpe(
        _prepending(), decoder=_stripping_decoder(), fallback=True, added=[library.AddedToken("<think>", special=False)]
    ),
    "Gemma": lambda: bpe(
        normalizers.Replace(" ", "▁"), decoder=decoders.Sequence(SENTENCEPIECE_DECODER), fallback=True
    ),
    "Metaspace always": lambda: metaspace("always"),
    "Metaspace first": lambda: metaspace("first", post=_begin_and_end()),
    "Metaspace never": lambda: metaspace("never"),
    "stripped": lambda: metaspace("always", normalizer=normalizers.Strip()),
    "blanks as one": lambda: metaspace(
        "always",
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(library.Regex(" {2,}"), " ")]),
    ),
    "a blank before by a pattern": lambda: bpe(
        normalizers.Sequence([normalizers.Replace(library.Regex(r"\A(?=.)"), "▁"), normalizers.Replace(" ", "▁")]),
        decoder=_stripping_decoder(), fallback=True,
    ),
    "WordPiece": wordpiece,
}  # fmt: skip

LOSSLESS = [
    "bytes", "byte-level", "byte-level with ends", "Llama 2", "Llama 2, normalized", "Gemma", "Metaspace never",
]  # fmt: skip
"""Kinds of which the ids of a text decode to the text, wherever it is cut."""


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory):
    @cache
    def build(kind):
        made = KINDS[kind]()
        if isinstance(made, Bytes):
            return made
        path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        made.save(str(path))
        return HuggingFace(path)

    return build


WORDS = [
    "2+2=",
    " 4",
    "Fra",
    "nce",
    " ",
    "  ",
    "\n",
    "\n\n",
    "é",
    "e\u0301",
    "漢",
    "ﬁ",
    "<think>",
    " tool",
    "</s>",
    "🙂",
    "Pa",
]
TEXTS = st.lists(st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=5).map("".join), max_size=5).map(
    lambda texts: [text.encode("utf-8", errors="replace").decode() for text in texts]
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(pieces=TEXTS)
@example(pieces=["2+2=", "4"])
@example(pieces=["The capital of France is", " Paris."])
@example(pieces=["", "The capital of Fra", "nce"])
@example(pieces=["e", "\u0301 x"])
@example(pieces=["a ", " b ", "", " c"])
@example(pieces=["é", "漢字", "🙂"])
@example(pieces=["2+2=", " ", " "])
@example(pieces=["\n", " tool"])
@example(pieces=["2+2=", "2+2=", "<think>"])
@example(pieces=["a", " b", "c <s>"])
def test_pieces_decode_to_the_text_of_the_whole(tokenizer_of, kind, pieces):
    tokenizer, text = tokenizer_of(kind), "".join(pieces)
    whole = tokenizer.decode(tokenizer.encode_batch([text])[0])
    (encoded,) = encode_pieces(tokenizer, [[Piece(piece) for piece in pieces]])
    assert tokenizer.decode(np.concatenate([*encoded, []]).astype(int)) == whole
    if kind in LOSSLESS:
        assert whole == text
        # The boundary between two pieces is one between tokens, so that a mask learns neither more nor less.
        ends = [tokenizer.decode(np.concatenate(encoded[: n + 1]).astype(int)) for n in range(len(pieces))]
        assert ends == ["".join(pieces[: n + 1]) for n in range(len(pieces))]
    try:
        stretches = list(encode_stretches(tokenizer, pieces))
    except ConfigError as error:
        assert kind == "Llama 2 with added tokens" and "the added token '<think>' is matched with a space" in str(error)
    else:
        assert tokenizer.decode(np.concatenate([*stretches, []]).astype(int)) == whole


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(pieces=TEXTS, cut=st.integers(0, 40))
@example(pieces=["The capital of France is Paris."], cut=5)
@example(pieces=["漢字" * 99, "🙂 é"], cut=3)
def test_tokens_after_a_context_are_the_rest_of_the_text(tokenizer_of, kind, pieces, cut):
    """Wherever the ids are cut, in the middle of a character as well."""
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode_batch(["".join(pieces)])[0].astype(int)
    context, tokens = ids[: max(0, len(ids) - cut)], ids[max(0, len(ids) - cut) :]
    whole, before = tokenizer.decode(ids), tokenizer.decode(context)
    after = decode_after(tokenizer, context, tokens)
    assert whole.endswith(after)
    if whole.startswith(before):
        assert before + after == whole


def test_tokens_of_bytes_are_those_that_they_always_were():
    """Data that was prepared by earlier versions stays what this version prepares."""
    tokenizer = HuggingFace(CASES / "tokenizer-byte-level" / "tokenizer.json")
    pieces = ["The capital of Fra", "nce", " is", "\n", "\n Paris"]
    (encoded,) = encode_pieces(tokenizer, [[Piece(piece) for piece in pieces]])
    apart = tokenizer.encode_batch(pieces)
    assert [ids.tolist() for ids in encoded] == [ids.tolist() for ids in apart]


def test_only_what_stands_before_a_text_starts_it(tokenizer_of):
    """A tokenizer may put an end behind it, too, which must not start what is generated."""
    assert tokenizer_of("Llama 2").start == [1]
    assert tokenizer_of("byte-level").start == []


# -- where it is used


def records(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def prepared(tmp_path: Path, name: str, *arguments: str) -> list[tuple[str, str]]:
    """Returns the text of each prepared document, and what of it is learnt."""
    output = tmp_path / "out"
    command = ["--input", str(tmp_path / name), "--output", str(output), "--eval-fraction", "0", "--workers", "1"]
    command += ["--tokenizer", str(CASES / "tokenizer-prefixing"), *arguments]
    assert prepare.main(command) == ExitCode.FINISHED
    data = open_prepared(output)
    tokenizer, stream = make_tokenizer(data.tokenizer, output), data.stream("train")
    tokens, learn = np.empty(stream.tokens, np.int64), np.ones(stream.tokens, bool)
    stream.read(0, tokens)
    if "--chat" in arguments:
        learn = np.concatenate([np.load(path) for path in sorted((output / "train").glob("learn-*"))]).astype(bool)
    edges = [*stream.document_starts.tolist(), stream.tokens]
    documents = []
    for start, stop in pairwise(edges):
        ids, begin = tokens[start:stop], start + int(np.argmax(learn[start:stop]))
        documents.append((tokenizer.decode(ids), decode_after(tokenizer, tokens[start:begin], tokens[begin:stop])))
    shutil.rmtree(output)
    return documents


def test_prompts_and_completions_are_the_text(tmp_path):
    pairs = [("2+2=", "4"), ("The capital of France is", " Paris."), ("the capital of Fra", "nce"), ("", "Paris")]
    records(tmp_path / "t.jsonl", *({"prompt": prompt, "completion": rest} for prompt, rest in pairs))
    assert prepared(tmp_path, "t.jsonl", "--chat") == [(prompt + rest, rest) for prompt, rest in pairs]


def test_a_conversation_has_no_blanks_that_nobody_wrote(tmp_path):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]
    records(tmp_path / "t.jsonl", {"messages": messages})
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello there<|im_end|>\n"
    assert prepared(tmp_path, "t.jsonl", "--chat") == [(text, "hello there<|im_end|>\n")]


def test_a_text_file_has_no_blanks_where_it_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "TEXT_PIECE", 100)
    text = "hello world\n" * 40 + "The capital of France is Paris." * 20
    (tmp_path / "t.txt").write_text(text)
    assert prepared(tmp_path, "t.txt") == [(text, text)]


def vocabulary(name: str = "tokenizer-prefixing", start: tuple[int, ...] = (1,)) -> Vocabulary:
    tokenizer = HuggingFace(CASES / name / "tokenizer.json")
    return Vocabulary(tokenizer, tokenizer.vocab_size, list(start), None, frozenset())


def test_generated_text_keeps_its_first_blank_and_stops_there():
    known = vocabulary()
    prompt = "The capital of France is"
    ids = known.with_start(known.encode(prompt))
    answer = known.encode(" Paris. and", begins=False)
    request = Request(ids, prompt, {}, max_tokens=99)
    for number, token in enumerate(answer, 1):
        request.take(token, known)
        assert request.text == known.tokenizer.decode(np.array(ids + answer[:number]))[len(prompt) :]
    assert request.text == " Paris. and"
    stopped = Request(ids, prompt, {}, max_tokens=99, stops=(" Paris",))
    for token in answer:
        stopped.take(token, known)
    assert (stopped.text, stopped.finish) == ("", "stop")


@pytest.mark.parametrize("name", ["tokenizer-prefixing", "tokenizer-byte-level"])
@pytest.mark.parametrize("as_harness", [False, True])
def test_a_continuation_that_the_tokenizer_joins_to_its_context_is_scored(name, as_harness):
    known = vocabulary(name)
    whole, before = known.encode("The capital"), known.encode("The capita")
    assert len(whole) <= len(before), "the tokenizer joins both"
    rest = known.encode("l", begins=False)
    joined = continuation_of(known, "The capita", "l", "here", as_harness=as_harness)
    assert joined == ScoreRequest([1, *before, *rest], 1 + len(before))
    assert continuation_of(vocabulary(name, ()), "capita", "l", "here", as_harness=as_harness).ids[-1:] == rest
    # The harness scores what follows the joined token; all of a continuation is scored elsewhere.
    wanted = continuation_of(known, "The capita", "l of France", "here", as_harness=as_harness)
    text = known.tokenizer.decode(np.array(wanted.ids))
    assert text == "The capital of France"
    scored = decode_after(known.tokenizer, wanted.ids[: wanted.begin], wanted.ids[wanted.begin :])
    assert scored == "l of France" if not as_harness else scored.endswith("France")


def test_a_continuation_begins_with_the_blank_of_its_context():
    known = vocabulary()
    for context, continuation in (("The capital ", "of"), ("The capital", " of")):
        wanted = continuation_of(known, context, continuation, "here")
        assert decode_after(known.tokenizer, wanted.ids[: wanted.begin], wanted.ids[wanted.begin :]) == " of"


@pytest.mark.parametrize(
    ("start", "context", "continuation", "message"),
    [
        ((1,), "a", "", "here: the text to score is empty; give some text"),
        ((1,), "", "", "here: the text to score is empty; give some text"),
        ((), "", "The", "here: the text is one token, and no token can precede it, so it has no score"),
    ],
)
def test_nothing_has_no_score(start, context, continuation, message):
    with pytest.raises(ConfigError, match=message):
        continuation_of(vocabulary("tokenizer-byte-level", start), context, continuation, "here")

"""Chat templates: which tokens of a conversation are targets, hostile templates, and a conversation that is trained,
asked and exported in the same markup."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import metrics
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmnt import convert, generate, prepare
from jaxmnt.data.chat.model_chat import ModelChat
from jaxmnt.data.chat.renderer import Renderer, RenderError
from jaxmnt.data.chat.template import CHATML_TEMPLATE, ChatFormat
from jaxmnt.data.preparation.conversations import Conversation, as_chatml
from jaxmnt.data.sources import open_sources
from jaxmnt.data.store import open_prepared
from jaxmnt.data.tokenizer import HuggingFace, TargetText
from jaxmnt.errors import ConfigError
from jaxmnt.run.sampling import Sampler
from jaxmnt.train import train
from jaxmnt.trained_model import find_model

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi "},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4\n"},
]
ANSWERS = [message["role"] == "assistant" for message in TALK]
LAST = [False] * 4 + [True]

LLAMA = """{{ bos_token }}{% for m in messages %}<|h|>{{ m.role }}<|/h|>

{{ m.content | trim }}<|eot|>{% endfor %}{% if add_generation_prompt %}<|h|>assistant<|/h|>

{% endif %}"""
"""Trims contents, and ends each turn with a token."""

GEMMA = """{% for m in messages %}{% if m.role == "system" %}{% set ns = m.content %}{% endif %}{% endfor %}
{%- set role = namespace(system=messages[0].content if messages[0].role == "system" else "") -%}
{% for m in messages %}{% if m.role != "system" -%}
<turn>{{ "model" if m.role == "assistant" else m.role }}
{% if role.system %}{{ role.system }}

{% set role.system = "" %}{% endif %}{{ m.content | trim }}<end>
{% endif %}{% endfor %}{% if add_generation_prompt %}<turn>model
{% endif %}"""
"""Puts the system prompt into the first turn, and has another name for the assistant."""

THINKING = """{% for m in messages %}<|{{ m.role }}|>
{% if m.role == "assistant" -%}
{% set parts = m.content.split("</think>") -%}
{% if loop.last %}<think>{{ parts[0].split("<think>")[-1] if parts | length > 1 else "" }}</think>{% endif %}
{{- parts[-1] }}<|end|>
{% else %}{{ m.content }}<|end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
"""Writes the thinking of the last answer only."""

PLAIN = """{% for m in messages %}[{{ m.role | upper }}] {{ m.content }}[/]{% endfor %}{% if add_generation_prompt -%}
[ASSISTANT] {% endif %}"""
"""Has no tokens of its own."""

MARKED = """{% for m in messages %}{% if m.role == "assistant" %}>{% generation %}{{ m.content }}!{% endgeneration %}
{%- generation %}?{% endgeneration %}{% else %}<{{ m.content }}{% endif %}{% endfor %}"""
"""Marks what the model generates, in two adjacent blocks for each turn."""

TOOLS = """{% for tool in tools or [] %}({{ tool | tojson }}){% endfor %}{% for m in messages %}<{{ m.role }}>
{%- if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %};
{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def format_of(template: str, *ends: str) -> ChatFormat:
    return ChatFormat("test", template, {"bos_token": "<s>"}, ends)


def targets(template: str, messages=TALK, is_target=None, ends=(), everything=False, variables=None) -> str:
    """The text of a conversation; targets stand in «», and | follows if the end of the document is a target."""
    is_target = [m["role"] == "assistant" for m in messages] if is_target is None else is_target
    with Renderer(format_of(template, *ends)) as renderer:
        found = renderer.find_targets(messages, variables or {}, is_target, everything)
    text = "".join(f"«{text}»" if learn else text for text, learn, _ in found.segments).replace("»«", "")
    assert set(found.end_tokens) <= {*ends, "[/]"}
    return text + "|" * found.end_is_target


@pytest.mark.parametrize(
    ("template", "ends", "expected"),
    [
        (
            LLAMA, ["<|eot|>"],
            "<s><|h|>system<|/h|>\n\nBe brief.<|eot|><|h|>user<|/h|>\n\nHi<|eot|>"
            "<|h|>assistant<|/h|>\n\n«Hello.<|eot|>»"
            "<|h|>user<|/h|>\n\n2+2?<|eot|><|h|>assistant<|/h|>\n\n«4<|eot|>»",
        ),
        (
            GEMMA, ["<end>"],
            "<turn>user\nBe brief.\n\nHi<end>\n<turn>model\n«Hello.<end>»\n"
            "<turn>user\n2+2?<end>\n<turn>model\n«4<end>»\n",
        ),
        (
            PLAIN, [],
            "[SYSTEM] Be brief.[/][USER]  Hi [/][ASSISTANT] «Hello.[/]»[USER] 2+2?[/][ASSISTANT] «4\n[/]»|",
        ),
        (MARKED, ["?"], "<Be brief.< Hi >«Hello.!?»<2+2?>«4\n!?»"),
        (CHATML_TEMPLATE, ["<|im_end|>"], None),
    ],
)  # fmt: skip
def test_targets_are_answers_and_the_ends_of_their_turns(template, ends, expected):
    if expected is None:
        segments = as_chatml(Conversation(TALK, ANSWERS, {}), everything=False)
        pieces = [f"«{s.content}»" if s.learn else s.content for s in segments]
        expected = "<s>" + "".join(pieces).replace("»«", "")
    assert targets(template, ends=ends) == expected
    before, last = expected.rstrip("|\n").rsplit("«", 1)
    tail = expected[len(expected.rstrip("|\n")) :]
    assert targets(template, is_target=LAST, ends=ends) == before.replace("«", "").replace("»", "") + "«" + last + tail
    whole = expected.replace("«", "").replace("»", "").rstrip("|")
    assert targets(template, ends=ends, everything=True).rstrip("|") == f"«{whole}»"


def test_what_the_model_thinks_belongs_to_its_answer():
    """Also where the template drops the beginning of the content, or has it in a field of its own."""
    talk = [TALK[3], {"role": "assistant", "content": "<think>two and two</think>4"}]
    answered = "<|user|>\n2+2?<|end|>\n<|assistant|>\n«<think>two and two</think>4<|end|>»\n"
    assert targets(THINKING, talk, ends=["<|end|>"]) == answered
    earlier = "<|user|>\n2+2?<|end|>\n<|assistant|>\n«4<|end|>»\n"
    assert targets(THINKING, [*talk, *talk], ends=["<|end|>"]) == earlier + answered
    talk[1] = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
    assert targets(TOOLS, talk, ends=[";"]) == "<user>2+2?;<assistant>«[two and two]4;»"


def test_answers_without_contents_are_apart():
    """Calls of tools in a row, with an empty result between them: each is found, whichever are targets."""
    call = lambda name: {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": name, "arguments": {}}}],
    }
    talk = [TALK[3], call("add"), {"role": "tool", "content": ""}, call("sub"), call("mul"), TALK[2]]
    text = "<user>2+2?;<assistant>«add{};»<tool>;<assistant>«sub{};»<assistant>«mul{};»<assistant>«Hello.;»"
    assert targets(TOOLS, talk, ends=[";"]) == text
    chosen = text.replace("«add{};»", "add{};").replace("«mul{};»", "mul{};").replace("«Hello.;»", "Hello.;")
    assert targets(TOOLS, talk, [False, False, False, True, False, False], ends=[";"]) == chosen


def test_the_token_that_ends_a_turn_may_be_unknown_to_the_files():
    """A special token after the content ends the turn. One in the header of the next turn does not."""
    with Renderer(format_of(LLAMA)) as renderer:
        found = renderer.find_targets(TALK, {}, ANSWERS, False, ["<|eot|>", "<|h|>"])
    assert found.end_tokens == ["<|eot|>"] and not found.end_is_target
    assert [text for text, learn, markup in found.segments if learn and markup] == ["<|eot|>", "<|eot|>"]
    headers = "{% for m in messages %}<s>{{ m.role }}</s>{{ m.content }}\n{% endfor %}"
    header_of_answer = "{% if add_generation_prompt %}<s>assistant</s>{% endif %}"
    expected = "<s>user</s>2+2?\n<s>assistant</s>«Hello.\n»<s>user</s>2+2?\n<s>assistant</s>«Hello.\n»|"
    assert targets(headers + header_of_answer, [TALK[3], TALK[2]] * 2, ends=["</s>"]) == expected


def test_a_token_across_the_end_of_a_target_is_a_target(tmp_path):
    """Some tokens take the white space after them; one before a target is counted as well."""
    tokenizer = HuggingFace(llama_folder(tmp_path / "tokenizer", rstrip=True) / "tokenizer.json", "<|endoftext|>")
    ends = tokenizer.ids["<|eot|>"]
    [tokens] = tokenizer.encode_with_targets([TargetText(["<|h|>a", "b<|eot|>", "\n\nc"], [False, True, False])])
    assert tokens.ids[tokens.is_target].tolist()[-1] == ends and tokens.crossing == 1
    [tokens] = tokenizer.encode_with_targets([TargetText(["ä", "ö", "😀"], [True, False, True])])
    assert tokens.is_target.tolist() == [True] * 2 + [False] * 2 + [True] * 4 and tokens.crossing == 0


def test_json_is_written_as_transformers_does():
    template = (
        "{{ messages | tojson(ensure_ascii=False, indent=1) }}{{ messages[0].content | tojson(ensure_ascii=True) }}"
    )
    with Renderer(format_of(template)) as renderer:
        assert renderer.render([{"content": "ä"}], {}) == '[\n {\n  "content": "ä"\n }\n]"\\u00e4"'


def test_long_conversations_take_time_in_proportion():
    talk = [{"role": ("user", "assistant")[n % 2], "content": f"text {n}"} for n in range(6000)]
    assert targets(LLAMA, talk, ends=["<|eot|>"]).count("«") == 3000


def test_calls_of_tools_and_parts_reach_the_template():
    call = {"function": {"name": "add", "arguments": {"a": 2, "b": "ä"}}}
    talk = [TALK[3], {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "4"}]
    expected = '({"name": "add"})<user>2+2?;<assistant>«add{"a": 2, "b": "ä"};»<tool>4;'
    assert targets(TOOLS, talk, ends=[";"], variables={"tools": [{"name": "add"}]}) == expected
    parts = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %};{% endfor %}"
    talk = [{"role": r, "content": [{"type": "text", "text": t} for t in (" a", "b ")]} for r in ("user", "assistant")]
    assert targets(parts, talk, ends=[";"]) == "<user> ab ;«<assistant> ab ;»"
    one = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": ["b"]}]
    text = parts.replace("{{ p.text }}", "{{ p.text if p.text is defined else p }}")
    assert targets(text, one, ends=[";"]) == "<user>a;«<assistant>b;»"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}{{ m.role }};{% endfor %}", "does not render the content of message 1"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }};{% endfor %}", "renders message 1 more than once"),
        ("{% for m in messages[::-1] %}{{ m.content }};{% endfor %}", "renders message 2 before the message that prec"),
        (
            "{% for m in messages %}{{ 'x' if m.content == 'Hi' else 'y' }}{{ m.content }};{% endfor %}",
            "makes other text of it when contents are marked",
        ),
        ("{% for m in messages %}{{ m.content[1:] }};{% endfor %}", "makes other text of it when contents are marked"),
        (
            "{% for m in messages %}{{ m.content }}{{ '.' if loop.last else ',' }}{% endfor %}",
            "no token that ends a turn follows the content of message 2",
        ),
        ("{% for m in messages %}{{ m.content }}{{ m.name and '' }};{% endfor %}", "does not render name, although"),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %},{% endfor %}",
            "marks 4 generated parts, but there are 2 answers",
        ),
    ],
)
def test_targets_that_cannot_be_exact_are_refused(template, words):
    talk = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(("Hi", "a", "b", "c"))]
    talk[0] |= {"name": "Ada"} if "m.name" in template else {}
    with pytest.raises(RenderError, match=words):
        targets(template, talk)
    with pytest.raises(RenderError, match="characters for private use from U\\+F0000 on"):
        targets(template, [{"role": "assistant", "content": "\U000f0001"}])


@pytest.fixture(scope="module")
def llama_renderer():
    """One child for all examples."""
    with Renderer(format_of(LLAMA, "<|eot|>")) as renderer:
        yield renderer


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.sampled_from("ab <|end|>\n[/]"), max_size=6), min_size=2, max_size=6), st.data())
def test_the_text_is_the_templates_and_contents_are_whole(llama_renderer, contents, data):
    """Whatever the contents: the segments join to the text, and each target is its content and the end of its turn."""
    talk = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]
    is_target = [m["role"] == "assistant" and data.draw(st.booleans()) for m in talk]
    text = llama_renderer.render(talk, {}, begins_turn=False)
    found = llama_renderer.find_targets(talk, {}, is_target, False)
    assert "".join(text for text, _, _ in found.segments) == text
    spans = "".join(text if learn else "\0" for text, learn, _ in found.segments).split("\0")
    learned = [span for span in spans if span]
    expected = [f"{m['content'].strip()}<|eot|>" for m, target in zip(talk, is_target, strict=True) if target]
    assert learned == expected


# -- hostile templates


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "may never end"),
        (
            "{% set ns = namespace(x='ab') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "memory",
        ),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages[0].missing.deeper }}", "UndefinedError"),
        ("{{ range(10 ** 9) | list }}", "OverflowError"),
        ("{{ '\\ud800' }}", "UnicodeEncodeError"),
        ("{% for a in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "its text has 99899001 bytes, but at most 16777216"),
        ("{{ raise_exception('only\\nusers') }}", "TemplateError: only users"),
    ],
)
def test_a_template_that_misbehaves_ends_with_words(monkeypatch, template, words):
    monkeypatch.setattr("jaxmnt.data.chat.renderer.TIMEOUT_SECONDS", 2 if words == "may never end" else 60)
    with Renderer(format_of(template)) as renderer:
        for _ in range(2):  # the child is started again
            with pytest.raises(RenderError, match=words):
                renderer.render(TALK, {})


def test_a_template_that_cannot_be_compiled_is_an_error():
    with pytest.raises(ConfigError, match="--chat-template: test cannot be used: TemplateSyntaxError"):
        Renderer(format_of("{% if %}"))


def test_the_environment_of_the_child_has_no_secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    with Renderer(format_of("{{ messages[0].content }}")) as renderer:
        assert renderer._child is not None
        environment = Path(f"/proc/{renderer._child.pid}/environ").read_bytes()
        assert renderer.render(TALK, {}) == "Be brief."
    assert b"secret" not in environment


def test_the_date_is_the_one_that_is_given():
    template = "{{ strftime_now('%d %b %Y') }}"
    with Renderer(format_of(template), "2026-01-31") as renderer:
        assert renderer.render(TALK, {}) == "31 Jan 2026"


def test_a_template_that_always_exhausts_its_process_is_given_up(monkeypatch):
    monkeypatch.setattr("jaxmnt.data.chat.renderer.TIMEOUT_SECONDS", 0.5)
    template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with Renderer(format_of("{% if messages | length > 1 %}" + template + "{% endif %}")) as renderer:
        for _ in range(2):
            with pytest.raises(RenderError, match="may never end"):
                renderer.render(TALK, {})
        assert renderer.render(TALK[:1], {}) == ""
        for _ in range(2):
            with pytest.raises(RenderError, match="may never end"):
                renderer.render(TALK, {})
        with pytest.raises(
            ConfigError, match="for 3 conversations in a row, so it may never end; use another template"
        ):
            renderer.render(TALK, {})


# -- trained, asked and exported in one markup


def llama_folder(folder: Path, *, rstrip: bool = False) -> Path:
    """A tokenizer with special tokens for `LLAMA`, and the files beside it that say how turns end."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<s>", "<|h|>", "<|/h|>", "<|eot|>"],
    )  # fmt: skip
    tokenizer.train_from_iterator([message["content"] for message in TALK], trainer)
    if rstrip:
        tokenizer.add_special_tokens([tokenizers.AddedToken("<|eot|>", special=True, rstrip=True)])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "<|eot|>", "chat_template": LLAMA}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def prepared_chat(tmp_path: Path, *arguments: str) -> Path:
    (tmp_path / "talk.jsonl").write_text((json.dumps({"messages": TALK}) + "\n") * 60)
    output = tmp_path / "data"
    command = ["--input", tmp_path / "talk.jsonl", "--output", output, "--chat", "--eval-fraction", 0, "--workers", 1]
    assert prepare.main([*map(str, command), *arguments]) == 0
    return output


def trained_on(data: Path, tiny, tmp_path: Path, *overrides: str) -> str:
    config = tiny(
        f"data.path={data}", "train.steps=1", "optimizer.warmup_steps=0", "data.global_batch_size=2", *overrides
    )
    assert train(config, devices=jax.devices()[:1]) == 0
    return str(tmp_path / "run")


@pytest.mark.parametrize("markup", ["chatml in bytes", "chatml", "llama"])
def test_what_is_asked_is_what_precedes_the_first_target(markup, tiny, tmp_path):
    """The tokens that `generate --chat` asks with are those of training, and the export renders the same text."""
    arguments = [] if markup == "chatml in bytes" else ["--tokenizer", str(llama_folder(tmp_path / "tokenizer"))]
    data = prepared_chat(tmp_path, *arguments, *(["--chat-template", "chatml"] if markup == "chatml" else []))
    run = trained_on(data, tiny, tmp_path)
    stream = open_prepared(data).stream("train")
    tokens = np.empty(stream.tokens, np.int64)
    stream.read(0, tokens)
    [learn] = [np.load(file) for file in (data / "train").glob("learn-*.npy")]
    before = tokens[: int(np.argmax(learn))].tolist()
    model = find_model(run, None)
    asked = model.chat.ids(TALK[:2], "here")
    end = model.vocabulary.end_of_document
    assert asked == (before if markup == "llama" else [end, *before]), "the end of a document precedes ours"
    assert asked == sampled_prompt(tiny, data, " Hi ")
    ends = [token for token in learn_ends(tokens, learn) if token not in (end, *b">")]
    assert set(ends) <= model.vocabulary.stop_ids or model.chat.stop_texts == ("<|im_end|>",)
    if arguments:
        with pytest.raises(ConfigError, match=r"samples: 'a<s>': it contains '?<s>'?, the name of a special token"):
            sampled_prompt(tiny, data, "a<s>")
        assert convert.main(["to-hf", run, str(tmp_path / "export")]) == 0
        template = (tmp_path / "export" / "chat_template.jinja").read_text()
        tokens_of = json.loads((tmp_path / "export" / "tokenizer_config.json").read_text())
        special = {name: tokens_of[name] for name in ("bos_token", "eos_token") if name in tokens_of}
        with Renderer(ChatFormat("export", template, special, ())) as renderer:
            assert model.vocabulary.encode(renderer.render(TALK[:2], {}), markup=True) == asked
        config = json.loads((tmp_path / "export" / "config.json").read_text())
        assert {*np.atleast_1d(config["eos_token_id"]).tolist()} == model.vocabulary.stop_ids


@pytest.mark.parametrize("markup", ["chatml", "llama"])
def test_the_tokenizer_of_data_or_of_a_run_brings_its_template(markup, tiny, tmp_path, capsys):
    """Its special tokens and end tokens, too, which no file beside it names."""
    arguments = ["--tokenizer", str(llama_folder(tmp_path / "tokenizer"))]
    data = prepared_chat(tmp_path, *arguments, *(["--chat-template", "chatml"] if markup == "chatml" else []))
    run = trained_on(data, tiny, tmp_path)
    for number, folder in enumerate((data, Path(run) / "tokenizer")):
        (tmp_path / str(number)).mkdir()
        again = prepared_chat(tmp_path / str(number), "--tokenizer", str(folder))
        first, second = (open_prepared(path).manifest for path in (data, again))
        assert first["splits"] == second["splits"]
        assert {**first["chat"], "source": ""} == {**second["chat"], "source": ""}
    (tmp_path / "third").mkdir()
    with pytest.raises(ConfigError, match=rf"--tokenizer: {run} is a run; give {run}/tokenizer"):
        prepared_chat(tmp_path / "third", "--tokenizer", run)


def sampled_prompt(tiny, data: Path, prompt: str) -> list[int]:
    """The ids with which `telemetry.samples` asks after the system message of `TALK`."""
    sample = f"{{prompt: '{prompt}', system: '{TALK[0]['content']}', chat: true}}"
    settings = ["data.sequence_length=256", "telemetry.sample_tokens=4", f"telemetry.samples=[{sample}]"]
    config = tiny(f"data.path={data}", *settings)
    (asked,) = Sampler(SimpleNamespace(spec=SimpleNamespace(config=config)), open_sources(config.data))._prompts
    return asked.ids.tolist()


def learn_ends(tokens: np.ndarray, learn: np.ndarray) -> list[int]:
    """The last token of each range of targets."""
    return tokens[np.flatnonzero(np.diff(np.append(learn, 0).astype(int)) < 0)].tolist()


def test_another_template_asks_before_it_continues_a_model(tiny, tmp_path):
    folder = llama_folder(tmp_path / "tokenizer")
    data = prepared_chat(tmp_path, "--tokenizer", str(folder))
    run = trained_on(data, tiny, tmp_path)
    (tmp_path / "other").mkdir()
    other = prepared_chat(tmp_path / "other", "--tokenizer", str(folder), "--chat-template", "chatml")
    continued = [f"data.path={other}", f"run.init_from={run}", f"run.dir={tmp_path / 'next'}", "model.vocab_size=320"]
    with pytest.raises(
        ConfigError, match=r"prepared with another chat template \(chatml\) than the model in .* set run"
    ):
        train(tiny(*continued), devices=jax.devices()[:1])
    config = tiny(*continued, "run.init_from_changes=[chat_template]", "train.steps=1", "optimizer.warmup_steps=0")
    assert train(config, devices=jax.devices()[:1]) == 0
    both = [f"data.sources={{a: {{path: '{data}'}}, b: {{path: '{other}'}}}}", "data.path=null"]
    with pytest.raises(ConfigError, match=r"data.sources: a and b were prepared with different chat templates"):
        train(tiny(*both, f"run.dir={tmp_path / 'both'}"), devices=jax.devices()[:1])


@pytest.mark.slow
def test_packed_answers_count_as_single_ones(tiny, tmp_path):
    """The held-out loss and the first step's loss are means over the answers' tokens, however rows hold them."""
    records = [
        {"messages": [{"role": "user", "content": "a" * n}, {"role": "assistant", "content": "b" * (7 * n % 23)}]}
        for n in range(1, 40)
    ]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    command = ["--input", tmp_path / "talk.jsonl", "--output", tmp_path / "data", "--chat", "--eval-fraction", "0.5"]
    assert prepare.main([*map(str, command), "--workers", "1"]) == 0
    held_out = []
    for name, length, more in (("single", 128, []), ("packed", 512, []), ("split", 512, ["mesh.data=2"])):
        config = tiny(
            f"data.path={tmp_path / 'data'}", f"data.sequence_length={length}", "data.rows=packed",
            "data.global_batch_size=2", "train.steps=1", "optimizer.warmup_steps=0", "optimizer.learning_rate=1e-12",
            "train.eval_tokens=null", f"run.dir={tmp_path / name}", *more,
        )  # fmt: skip
        assert train(config, devices=jax.devices()[: 2 if more else 1]) == 0
        [line] = metrics(tmp_path / name, "eval")
        held_out.append((line["loss"], line["tokens"]))
    manifest = open_prepared(tmp_path / "data").manifest
    rows = [np.load(file) for file in sorted((tmp_path / "data" / "eval").glob("learn-*.npy"))]
    assert {tokens for _, tokens in held_out} == {int(sum(row.sum() for row in rows))} and manifest["learn_mask"]
    assert max(loss for loss, _ in held_out) - min(loss for loss, _ in held_out) < 1e-6


@pytest.mark.slow
def test_a_conversation_at_the_terminal(tiny, tmp_path, monkeypatch, capsys):
    data = prepared_chat(tmp_path)
    run = trained_on(data, tiny, tmp_path, "data.sequence_length=512")
    typed = iter(["Hi", "", "2+2?"])
    asked = []

    def type_line(prompt: str) -> str:
        print(prompt, end="")
        line = next(typed, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", type_line)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    ids = ModelChat.ids
    monkeypatch.setattr(
        ModelChat, "ids", lambda self, messages, *rest: asked.append(list(messages)) or ids(self, messages, *rest)
    )
    assert generate.main(["--run", run, "--chat", "--system", "Be brief.", "--tokens", "2"]) == 0
    roles = [[message["role"] for message in messages] for messages in asked]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"]]
    output = capsys.readouterr().out
    assert output.count("you   > ") == 4 and output.count("model > ") == 2

"""The chat templates of released models, as TRL's wheel has them: the text is that of transformers, and the targets are
those that TRL's variants of the templates mark, or the conversation is refused.

tests/reference/chat_templates.py writes what is expected.
"""

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jaxmnt.data.chat.renderer import Renderer, RenderError
from jaxmnt.data.chat.template import ChatFormat

TESTS = Path(__file__).resolve().parent
_CONTENTS = json.loads((TESTS / "cases" / "chat_templates.json").read_text())
EXPECTED, TALKS, SPECIAL = (_CONTENTS[name] for name in ("templates", "talks", "special_tokens"))
WHEEL = "trl==1.16.0"

MARKUP_OF_PROMPTS = re.compile(r"<｜Assistant｜>|<\|start\|>assistant|<think>|</think>|\s+|<eos>|<\|user\|>")
"""What TRL's variants mark in addition to the answer: the generation prompt, thinking that is empty, white space, and
the end of a text, or the next turn, after the end of the turn."""

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="session")
def templates(tmp_path_factory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("trl")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(command, check=True)
    [path] = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def targets_of(template: str, talk: list, ends: list[str]) -> tuple[str, list[str]]:
    """The text of a conversation, and its targets."""
    chat = ChatFormat("test", template, SPECIAL, tuple(ends))
    with Renderer(chat, "2026-01-31") as renderer:
        found = renderer.find_targets(talk, {}, [message["role"] == "assistant" for message in talk], False)
    pieces = "".join(text if learn else "\0" for text, learn, _ in found.segments).split("\0")
    return "".join(text for text, _, _ in found.segments), [piece for piece in pieces if piece]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_targets_are_those_of_the_marked_template_or_are_refused(name, templates):
    entry = EXPECTED[name]
    plain, marked = (templates.read(f"trl/chat_templates/{name}{end}.jinja") for end in ("", "_training"))
    assert [hashlib.sha256(content).hexdigest() for content in (plain, marked)] == entry["sha256"]
    for number, talk in enumerate(TALKS):
        expected = entry["targets"][number]
        if isinstance(expected, str):
            with pytest.raises(RenderError, match=re.escape(expected)):
                targets_of(plain.decode(), talk, entry["end_tokens"])
            continue
        text, targets = targets_of(plain.decode(), talk, entry["end_tokens"])
        assert hashlib.sha256(text.encode()).hexdigest() == entry["texts"][number], "the text is that of transformers"
        assert targets == expected
        answers = [message["content"] for message in talk if message["role"] == "assistant"]
        for target, oracle, answer in zip(targets, entry["generated"][number], answers, strict=True):
            assert answer in target
            without = lambda text: MARKUP_OF_PROMPTS.sub("", text)
            assert without(target) == without(oracle)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_blocks_that_a_template_marks_are_taken_as_they_are(name, templates):
    entry = EXPECTED[name]
    for talk, generated in zip(TALKS, entry["generated"], strict=True):
        template = templates.read(f"trl/chat_templates/{name}_training.jinja").decode()
        if generated is None or isinstance(entry["targets"][0], str):
            with pytest.raises(RenderError):
                targets_of(template, talk, entry["end_tokens"])
        else:
            assert targets_of(template, talk, entry["end_tokens"])[1] == generated


def test_most_templates_are_accepted():
    accepted = [name for name, entry in EXPECTED.items() if not any(isinstance(t, str) for t in entry["targets"])]
    assert len(accepted) == 28 and len(EXPECTED) == 31

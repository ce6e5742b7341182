"""Writes tests/cases/chat_templates.json: what transformers renders with the chat templates in TRL's wheel, and the
parts that TRL's variants of them for training mark as generated. No template is copied.

    python tests/reference/chat_templates.py trl-1.16.0-py3-none-any.whl

Needs an environment with requirements.txt. The entry `targets` of each template, which says what jaxmnt takes for
targets, is kept.
"""

import datetime
import hashlib
import json
import sys
import zipfile
from pathlib import Path

from transformers.utils import chat_template_utils

FILE = Path(__file__).resolve().parent.parent / "cases" / "chat_templates.json"
TALKS = [
    [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "It is 4."}],
    [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is 4."},
        {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Bye then."},
    ],
]  # fmt: skip
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
ENDS = {
    "cohere": ["<|END_OF_TURN_TOKEN|>"], "cohere2": ["<|END_OF_TURN_TOKEN|>"],
    "deepseek": ["<｜end▁of▁sentence｜>"], "diffusion": ["<turn|>"], "gemma": ["<end_of_turn>"],
    "glm4moe": ["<|endoftext|>", "<|user|>", "<|observation|>"], "gptoss": ["<|return|>", "<|call|>", "<|end|>"],
    "idefics3": ["<end_of_utterance>"], "smolvlm": ["<end_of_utterance>"], "llama3": ["<|eot_id|>"],
    "muse": ["<|eot|>"], "phi3": ["<|end|>"],
}  # fmt: skip
"""End tokens by the beginning of the template's name, from the models' generation configs. Default: <|im_end|>."""


class Fixed(datetime.datetime):
    """The date that templates write as today's."""

    @classmethod
    def now(cls, tz=None):
        return cls(2026, 1, 31)


def main(wheel: str) -> None:
    chat_template_utils.datetime = Fixed
    entries = json.loads(FILE.read_text())["templates"] if FILE.exists() else {}
    with zipfile.ZipFile(wheel) as archive:
        for path in sorted(archive.namelist()):
            name = path.rsplit("/", 1)[-1].removesuffix("_training.jinja")
            if not path.startswith("trl/chat_templates/") or not path.endswith("_training.jinja"):
                continue
            plain, training = (archive.read(f"trl/chat_templates/{name}{end}.jinja") for end in ("", "_training"))
            entries[name] = {
                "sha256": [hashlib.sha256(template).hexdigest() for template in (plain, training)],
                "end_tokens": next((ends for start, ends in ENDS.items() if name.startswith(start)), ["<|im_end|>"]),
                "texts": [rendered(plain.decode(), talk) for talk in TALKS],
                "generated": [generated(training.decode(), talk) for talk in TALKS],
                "targets": entries.get(name, {}).get("targets"),
            }
    contents = {"talks": TALKS, "special_tokens": SPECIAL, "templates": entries}
    FILE.write_text(json.dumps(contents, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def rendered(template: str, talk: list) -> str | None:
    """The digest of the text of a conversation; None if the template cannot render it."""
    try:
        [text], _ = chat_template_utils.render_jinja_template([talk], chat_template=template, **SPECIAL)
    except Exception:
        return None
    return hashlib.sha256(text.encode()).hexdigest()


def generated(template: str, talk: list) -> list[str] | None:
    """The parts that the template marks, with adjacent parts as one."""
    try:
        [text], [ranges] = chat_template_utils.render_jinja_template(
            [talk], chat_template=template, return_assistant_tokens_mask=True, **SPECIAL
        )
    except Exception:
        return None
    merged: list[list[int]] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1][1] = stop
        else:
            merged.append([start, stop])
    return [text[start:stop] for start, stop in merged]


if __name__ == "__main__":
    main(sys.argv[1])

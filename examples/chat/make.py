"""Writes the texts of the example: sentences for the base model, conversations, and questions with their answers.

python examples/chat/make.py FOLDER
"""

import json
import random
import sys
from pathlib import Path

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def main(folder: Path) -> None:
    rng = random.Random(0)  # noqa: S311
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "text.jsonl", ({"text": " ".join(rng.choices(WORDS, k=30)) + "."} for _ in range(400)))

    lists = [[a, b, c] for a in WORDS for b in WORDS for c in WORDS if len({a, b, c}) == 3]
    rng.shuffle(lists)
    questions, conversations = lists[:100], lists[100:]
    write(folder / "conversations.jsonl", map(conversation, conversations))
    write(
        folder / "questions.jsonl",
        ({"prompt": " ".join(words), "completion": " ".join(reversed(words))} for words in questions),
    )


def conversation(words: list[str]) -> dict:
    """A conversation in which the assistant reverses words, and then answers thanks."""
    contents = [" ".join(words), " ".join(reversed(words)), "thanks", "you are welcome"]
    return {
        "messages": [
            {"role": ("user", "assistant")[number % 2], "content": content} for number, content in enumerate(contents)
        ]
    }


def write(path: Path, records) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

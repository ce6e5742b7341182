"""Writes the texts of the example: words to reverse, words to sort, and 200 words of each task to ask for.

python examples/lora/make.py FOLDER
"""

import json
import random
import sys
from pathlib import Path

TASKS = {"reverse": lambda word: word[::-1], "sort": lambda word: "".join(sorted(word))}
LETTERS, LENGTH = "abcdefgh", 5
QUESTIONS, WORDS = 200, 25_000


def main(folder: Path) -> None:
    rng = random.Random(0)  # noqa: S311
    folder.mkdir(parents=True, exist_ok=True)
    words = ["".join(rng.choices(LETTERS, k=LENGTH)) for _ in range(WORDS)]
    asked = list(dict.fromkeys(words))[:QUESTIONS]
    trained = [word for word in words if word not in set(asked)]
    for name, task in TASKS.items():
        write(folder / f"{name}.jsonl", trained, task)
        write(folder / f"{name}_questions.jsonl", asked, task)


def write(path: Path, words, task) -> None:
    records = ({"prompt": f"{word}>", "completion": task(word)} for word in words)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Counts with NumPy how many held-out images a run classifies correctly, and compares that with its last evaluation.

Usage: python count.py RUN
"""

import json
import sys
from pathlib import Path

import numpy as np
from digits_model.data import held_out

from jaxmnt import load_run


def main(run: str) -> int:
    rows = list(held_out())
    logits = np.asarray(load_run(run)(np.stack([row["tokens"] for row in rows])))
    labels = np.array([row["targets"][-1] for row in rows])
    right = int(np.sum(np.argmax(logits[:, -1], axis=-1) == labels))
    lines = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    evaluation = [line for line in lines if line["kind"] == "eval"][-1]
    print(f"{right} of {len(rows)} right; the run's accuracy is {evaluation['reported']['accuracy']:.6f}")
    return 0 if right / len(rows) == evaluation["reported"]["accuracy"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

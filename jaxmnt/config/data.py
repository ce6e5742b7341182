"""The data settings, and the checks that involve several of them."""

import re
from typing import Literal

from jaxmnt.config.section import Section, breaking_key, key, maths_key
from jaxmnt.errors import suggest


class Grain(Section):
    train: str | None = key(
        None, "Instead of path: dotted path of a grain.MapDataset, or of a function without arguments that returns one."
    )
    eval: str | None = key(None, "Dotted path of the held-out dataset, as for train.")
    elements: Literal["documents", "rows"] = key(
        "documents", "What the elements of the dataset are: documents, or complete rows."
    )
    vocab_size: int | None = key(None, "Number of token ids. Default: as in the prepared data of other sources.", ge=2)
    end_of_document: int | None = key(
        None, "Id that ends each document, added if missing. Default: as in the prepared data of other sources, or "
        "none.",
        ge=0,
    )  # fmt: skip


class Source(Section):
    path: str | None = key(None, "Prepared data of this source: a directory written by jaxmnt.prepare.", path=True)
    grain: Grain = Grain()
    weight: float = maths_key(
        1.0, "Share of the rows that come from this source, relative to the weights of the others.", ge=0, lt=1e9
    )
    on_end: Literal["repeat", "stop"] | None = maths_key(
        None, "What happens after an epoch of this source. Default: data.on_end."
    )


class EvalSet(Section):
    path: str = key(
        ..., "Prepared data. Its held-out documents are evaluated, or all documents if none are held out.", path=True
    )


class WeightChange(Section):
    from_step: int = maths_key(
        ..., "Number of steps after which the weights change, counted as if no rows were skipped.", ge=1
    )
    weights: dict[str, float] = maths_key(..., "New weights by source; sources that are left out keep their weights.")


class Skip(Section):
    from_row: int = key(
        ...,
        "Number of the first row to skip. Without earlier skips, step s (from 0) begins at row s · global_batch_size; "
        "a branch continues the numbers of its origin.",
        ge=0,
        lt=2**53,
    )
    rows: int = key(..., "Number of rows to skip.", ge=1, lt=2**53)


class Data(Section):
    path: str | None = key(None, "Prepared data: a directory written by jaxmnt.prepare.", path=True)
    grain: Grain = Grain()
    sources: dict[str, Source] = key({}, "Instead of path: sources by name, each with a path or grain, and a weight.")
    eval_sets: dict[str, EvalSet] = key(
        {}, "Data sets to evaluate in addition to the held-out text of the sources, by name."
    )
    weight_changes: list[WeightChange] = maths_key([], "Changes of the sources' weights during the run.")
    synthetic: int | None = breaking_key(
        None, "Instead of path: random tokens from a vocabulary of this size, for benchmarks.", ge=2
    )
    skip: list[Skip] = maths_key([], "Ranges of rows to skip; later rows take their place.")
    global_batch_size: int = breaking_key(64, "Rows per step, summed over all hosts.", ge=1)
    sequence_length: int = breaking_key(1024, "Tokens per row.", ge=2)
    rows: Literal["windows", "packed"] = breaking_key(
        "windows", "What a row holds. windows: a stretch of the text, of any documents; packed: complete documents, "
        "each of which attends only to itself.",
    )  # fmt: skip
    long_documents: Literal["cut", "skip"] = breaking_key(
        "cut", "What happens to a document that is longer than a packed row. cut: it becomes several pieces; skip: it "
        "is left out, also of evaluations.",
    )  # fmt: skip
    document_mask: bool = maths_key(
        False, "Restrict attention to one document and number its positions from 0, in windows too."
    )
    fields: dict[str, Literal["float32", "int32"]] = maths_key(
        {}, "Additional fields of a row, with a number per token, for train.loss, such as {reference: float32}. Only "
        "Grain datasets of rows provide them.",
    )  # fmt: skip
    shuffle: bool = breaking_key(True, "Read the rows of each epoch in a different random order.")
    on_end: Literal["repeat", "stop"] = maths_key(
        "repeat",
        "What happens after an epoch. repeat: the next epoch begins; stop: a run that needs more rows is refused.",
    )
    verify: bool = key(
        False,
        "At the start, compare every file with its digest, and read every element of Grain datasets.",
    )
    stage_dir: str | None = key(
        None, "Local folder to which each host copies prepared data once, and from which it reads.", path=True
    )
    prefetch: int = key(4, "Number of batches to read ahead of the step.", ge=1)
    read_threads: int = key(2, "Threads that read ahead; 0: each batch is read when it is needed.", ge=0)
    log_digest: bool = key(False, "Add batch_digest, a digest of the global batch's tokens, to train lines.")

    @property
    def named_sources(self) -> dict[str, Source]:
        """The sources, sorted by name; the source of a config without `data.sources` is called data."""
        return dict(sorted(self.sources.items())) or {"data": Source(path=self.path, grain=self.grain)}

    @property
    def keeps_documents_apart(self) -> bool:
        """True if a token attends only to its own document."""
        return self.document_mask or self.rows == "packed"


def check_data(data: Data) -> None:
    """Checks the rules that involve several keys of `data`. Raises `ValueError`."""
    set_keys = [name for name in ("path", "sources", "synthetic") if getattr(data, name) not in (None, {})]
    if len(set_keys) > 1:
        raise ValueError(f"data.{set_keys[1]}: data.{set_keys[0]} is also set; remove one of them")
    _check_grain("data.grain", data.grain, next((f"data.{name}" for name in set_keys), None))
    for name, source in data.sources.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ValueError(f"data.sources: {name!r} is not a name; use letters, digits, - and _")
        where = f"data.sources.{name}"
        _check_grain(f"{where}.grain", source.grain, f"{where}.path" if source.path is not None else None)
    if data.eval_sets and data.synthetic is not None:
        raise ValueError(
            "data.eval_sets: they need the tokenizer of the training data, and data.synthetic has none; remove one of "
            "them"
        )
    for name in data.eval_sets:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name in {"data", *data.sources}:
            raise ValueError(
                f"data.eval_sets: {name!r} is already used, or has characters other than letters, digits, - and _; "
                "rename it"
            )
    if data.long_documents == "skip" and data.rows != "packed":
        raise ValueError("data.long_documents: windows have no long documents; set data.rows=packed, or leave it out")
    if data.weight_changes and not data.sources:
        raise ValueError("data.weight_changes: they require data.sources, which are not set; add them")
    weights = {name: source.weight for name, source in data.sources.items()}
    _check_weights(weights, 0)
    previous_step = 0
    for change in data.weight_changes:
        step = change.from_step
        if step <= previous_step:
            raise ValueError(
                f"data.weight_changes: from_step {step} must be above {previous_step}, the one before it; sort them, "
                "and give each a different step"
            )
        if unknown := sorted(change.weights.keys() - weights):
            raise ValueError(
                f"data.weight_changes: no source is named {unknown[0]}; {suggest(unknown[0], sorted(weights))}"
            )
        if any(not 0 <= weight < float("inf") for weight in change.weights.values()):
            raise ValueError(
                f"data.weight_changes: weights from step {step} on must be finite and at least 0; fix them"
            )
        weights |= change.weights
        _check_weights(weights, step)
        previous_step = step


def _check_weights(weights: dict[str, float], step: int) -> None:
    if weights and not sum(weights.values()) > 0:
        raise ValueError(
            f"data.sources: from step {step} on no source has a weight above 0; give at least one source such a weight"
        )


def _check_grain(where: str, grain: Grain, alternative: str | None) -> None:
    """Checks one `grain` section. `alternative` is the key that sets other data in the same place, if any.

    Raises `ValueError`.
    """
    if grain == Grain():
        return
    if alternative is not None:
        raise ValueError(f"{where}: {alternative} is also set; remove one of them")
    if grain.train is None:
        raise ValueError(f"{where}.train: not set; give the dotted path of a grain.MapDataset: package.module.name")
    for name, path in (("train", grain.train), ("eval", grain.eval)):
        if path is not None and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", path):
            raise ValueError(f"{where}.{name}: {path!r} is not a dotted path such as package.module.name; correct it")
    end = grain.end_of_document
    vocab_size = grain.vocab_size
    if end is not None and vocab_size is not None and end >= vocab_size:
        raise ValueError(
            f"{where}.end_of_document: {end} must be below {where}.vocab_size ({vocab_size}); correct one of them"
        )

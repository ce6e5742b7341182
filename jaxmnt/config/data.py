"""The data settings, and the checks that involve several of them."""

import re
from typing import Literal

from jaxmnt.config.section import Section, breaking_key, key, maths_key
from jaxmnt.errors import suggest


class Grain(Section):
    train: str | None = key(
        None, "Instead of path: dotted path of a grain.MapDataset, or of a function without arguments that makes it."
    )
    eval: str | None = key(None, "The same, for held-out data.")
    elements: Literal["documents", "rows"] = key("documents", "What each element of the dataset is.")
    vocab_size: int | None = key(None, "Number of token ids; default as in the prepared data of other sources.", ge=2)
    end_of_document: int | None = key(
        None, "Id that ends each document, added where it is missing; default as in the prepared data, else none.",
        ge=0,
    )  # fmt: skip


class Source(Section):
    path: str | None = key(None, "Prepared data of this source: a directory written by jaxmnt.prepare.", path=True)
    grain: Grain = Grain()
    weight: float = maths_key(1.0, "Its share of the rows, relative to the others' weights.", ge=0, lt=1e9)
    on_end: Literal["repeat", "stop"] | None = maths_key(None, "As data.on_end, for this source.")


class EvalSet(Section):
    path: str = key(
        ..., "Prepared data: its held-out documents are evaluated, or all of it if none are held out.", path=True
    )


class WeightChange(Section):
    from_step: int = maths_key(..., "Steps after which the weights change, counted as if no rows were skipped.", ge=1)
    weights: dict[str, float] = maths_key(..., "New weights by source; sources left out keep theirs.")


class Skip(Section):
    from_row: int = key(
        ...,
        "First row to skip, by its number: steps before it times global_batch_size; a branch continues the count.",
        ge=0,
        lt=2**53,
    )
    rows: int = key(..., "Number of rows.", ge=1, lt=2**53)


class Data(Section):
    path: str | None = key(None, "Prepared data: a directory written by jaxmnt.prepare.", path=True)
    grain: Grain = Grain()
    sources: dict[str, Source] = key({}, "Instead of path: sources by name, each with path or grain, and weight.")
    eval_sets: dict[str, EvalSet] = key({}, "What to evaluate besides the sources' own held-out text, by name.")
    weight_changes: list[WeightChange] = maths_key([], "Changes of the weights at given steps.")
    synthetic: int | None = breaking_key(
        None, "Instead of path: random tokens of a vocabulary of this size, for benchmarks.", ge=2
    )
    skip: list[Skip] = maths_key([], "Rows of the run to skip; later rows move up.")
    global_batch_size: int = breaking_key(64, "Rows per step, over all hosts.", ge=1)
    sequence_length: int = breaking_key(1024, "Tokens per row.", ge=2)
    rows: Literal["windows", "packed"] = breaking_key(
        "windows", "A row is a window of the text, or holds whole documents that do not see each other.",
    )  # fmt: skip
    document_mask: bool = maths_key(False, "Keep attention and positions inside a document, also in windows.")
    fields: dict[str, Literal["float32", "int32"]] = maths_key(
        {}, "More fields of a row for train.loss, such as {reference: float32}: a number for each token, which Grain "
        "datasets of rows give.",
    )  # fmt: skip
    shuffle: bool = breaking_key(True, "Read the rows of an epoch in a random order, another each epoch.")
    on_end: Literal["repeat", "stop"] = maths_key(
        "repeat", "After an epoch, begin the next one, or refuse a run that would need more."
    )
    verify: bool = key(
        False,
        "At the start, compare every file with its digest, and read all of Grain datasets.",
    )
    stage_dir: str | None = key(
        None, "Copy prepared data to this local folder once per host, and read it there.", path=True
    )
    prefetch: int = key(4, "Batches read ahead of the step.", ge=1)
    read_threads: int = key(2, "Threads that read ahead; 0 reads each batch when it is needed.", ge=0)
    log_digest: bool = key(False, "Add batch_digest, a digest of the global batch's tokens, to train lines.")

    @property
    def named_sources(self) -> dict[str, Source]:
        """The sources, sorted by name; a source without a name is called data."""
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
        raise ValueError("data.eval_sets: data.synthetic has no tokenizer that they could share; remove one of them")
    for name in data.eval_sets:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name in {"data", *data.sources}:
            raise ValueError(
                f"data.eval_sets: {name!r} is already used, or has characters other than letters, digits, - and _; "
                "rename it"
            )
    if data.weight_changes and not data.sources:
        raise ValueError("data.weight_changes: this requires data.sources, and none are set; add them")
    weights = {name: source.weight for name, source in data.sources.items()}
    _check_weights(weights, 0)
    before = 0
    for change in data.weight_changes:
        step = change.from_step
        if step <= before:
            raise ValueError(
                f"data.weight_changes: from_step {step} must be above {before}, the one before it; sort them, and give "
                "each a step of its own"
            )
        if unknown := sorted(change.weights.keys() - weights):
            raise ValueError(
                f"data.weight_changes: no source is named {unknown[0]}; {suggest(unknown[0], sorted(weights))}"
            )
        if any(not 0 <= weight < float("inf") for weight in change.weights.values()):
            raise ValueError(f"data.weight_changes: weights from step {step} on must be 0 or more; fix them")
        weights |= change.weights
        _check_weights(weights, step)
        before = step


def _check_weights(weights: dict[str, float], step: int) -> None:
    if weights and not sum(weights.values()) > 0:
        raise ValueError(f"data.sources: from step {step} on no source has a weight above 0; give one")


def _check_grain(where: str, grain: Grain, beside: str | None) -> None:
    """Checks one `grain` section. `beside` names the other data source that is set in the same place, if any.

    Raises `ValueError`.
    """
    if grain == Grain():
        return
    if beside is not None:
        raise ValueError(f"{where}: {beside} is also set; remove one of them")
    if grain.train is None:
        raise ValueError(f"{where}.train: not set; give the dotted path of a grain.MapDataset, as package.module.name")
    for name, path in (("train", grain.train), ("eval", grain.eval)):
        if path is not None and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", path):
            raise ValueError(f"{where}.{name}: {path!r} is not a dotted path such as package.module.name; correct it")
    end, ids = grain.end_of_document, grain.vocab_size
    if end is not None and ids is not None and end >= ids:
        raise ValueError(
            f"{where}.end_of_document: {end} must be below {where}.vocab_size ({ids}); correct one of them"
        )

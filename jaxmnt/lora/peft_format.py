"""Adapters in the format of PEFT: adapter_config.json, and adapter_model.safetensors.

PEFT stores an adapter of a module as lora_A [rank, inputs] and lora_B [outputs, rank], and whole modules that train
beside adapters (`modules_to_save`) under their own names.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.numpy import save_file

from jaxmnt.checkpoint.manifest import first_problem
from jaxmnt.checkpoint.names import parameter_of, stored_name
from jaxmnt.config.lora import PEFT_PREFIX, Lora
from jaxmnt.errors import ConfigError, listed, printable
from jaxmnt.huggingface.folder import json_bytes, map_tensor, read_header, read_json
from jaxmnt.huggingface.tensors import Part, Parts, parts_of
from jaxmnt.models.adapters import triples
from jaxmnt.models.contract import Definition
from jaxmnt.parallel.sharding import named_leaves

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."

_MEANINGLESS = frozenset(
    {
        "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "target_modules", "exclude_modules",
        "fan_in_fan_out", "modules_to_save", "layers_to_transform", "layers_pattern", "megatron_core",
        "qalora_group_size", "runtime_config", "ensure_weight_tying",
    }
)  # fmt: skip
"""Keys of an adapter_config.json that do not change what the adapters compute."""


class _Settings(BaseModel):
    """The keys of an adapter_config.json that are read."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    peft_type: str
    r: Annotated[int, Field(ge=1)]
    lora_alpha: Annotated[float, Field(gt=0, le=1e9)]
    lora_dropout: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    use_rslora: bool | None = False
    bias: str | None = "none"
    init_lora_weights: bool | str | None = True
    base_model_name_or_path: str | None = None


@dataclass(frozen=True)
class PeftAdapters:
    """The adapters in a folder of PEFT."""

    path: Path
    rank: int
    alpha: float
    scaling: Literal["standard", "rslora"]
    base: str | None
    """The name or path of the base, as the folder has it."""
    dropout: float
    tensors: Mapping[str, np.ndarray]
    """The tensors by their names in transformers, such as model.layers.0.self_attn.q_proj.lora_A.weight."""

    @property
    def modules(self) -> set[str]:
        """The names of the modules with adapters."""
        return {name.removesuffix(".lora_A.weight") for name in self.tensors if name.endswith(".lora_A.weight")}

    @property
    def whole_tensors(self) -> set[str]:
        """The names of the tensors that were trained as a whole."""
        return {name for name in self.tensors if ".lora_" not in name}


def read_folder(path: Path, key: str) -> PeftAdapters:
    """Returns the adapters in a folder. `key` names the setting or the command that gave the folder.

    Raises `ConfigError` for a folder without adapters, and for settings that would change what they compute.
    """
    if not path.is_dir():
        raise ConfigError(f"{key}: {path} is not a folder; name one with {CONFIG} and {TENSORS}")
    where = f"{key}: {path / CONFIG}"
    try:
        settings = _Settings.model_validate(read_json(path / CONFIG, key))
    except ValidationError as error:
        raise ConfigError(f"{where} is not valid: {first_problem(error)}; copy it again") from None
    if settings.peft_type != "LORA":
        raise ConfigError(f"{where} has the peft_type {printable(settings.peft_type)}; only LORA is supported")
    if settings.init_lora_weights not in (True, False, None, "gaussian", "orthogonal", "eva"):
        raise ConfigError(
            f"{where} sets init_lora_weights={printable(str(settings.init_lora_weights))}, which may change the base "
            "as well; convert the adapters in PEFT (path_initial_model_for_weight_conversion)"
        )
    if settings.bias not in ("none", None):
        raise ConfigError(f"{where} sets bias={printable(settings.bias)}, but biases cannot train here; set none")
    unsupported = sorted(
        name for name, setting in (settings.model_extra or {}).items() if name not in _MEANINGLESS and setting
    )
    if unsupported and unsupported != ["eva_config"]:
        raise ConfigError(
            f"{where} sets {printable(unsupported[0])}, which changes what the adapters compute and is not supported"
        )
    tensors = {}
    for name, entry in sorted(read_header(path / TENSORS, key).items()):
        if not name.startswith(_PREFIX):
            raise ConfigError(f"{key}: {path / TENSORS} has the tensor {printable(name)}, which is not one of PEFT's")
        tensors[name.removeprefix(_PREFIX)] = map_tensor(path / TENSORS, entry, key)
    return PeftAdapters(
        path, settings.r, settings.lora_alpha, "rslora" if settings.use_rslora else "standard",
        settings.base_model_name_or_path, settings.lora_dropout or 0.0, tensors,
    )  # fmt: skip


def settings_of(adapters: PeftAdapters, definition: Definition, key: str) -> Lora:
    """Returns the section `lora` that fits the adapters in a folder. `definition` is that of the model without
    adapters. Raises `ConfigError` for tensors that the model does not have."""
    parts = parts_of(definition)
    module_names = {name: {_module(part) for part in own_parts} for name, own_parts in parts.items()}
    shared = {part.name for own_parts in parts.values() for part in own_parts if part.tensor.parts > 1}
    targets = sorted(name for name, modules in module_names.items() if modules and modules <= adapters.modules)
    also_train = sorted(
        name for name, own_parts in parts.items() if {part.name for part in own_parts} <= adapters.whole_tensors
    )
    if split := sorted(adapters.modules & {name.removesuffix(".weight") for name in shared}):
        raise ConfigError(
            f"{key}: {adapters.path / TENSORS} has an adapter of {printable(split[0])}, which is several parameters "
            "here; merge the adapters in PEFT, and convert the merged model"
        )
    used = {part.name for name in also_train for part in parts[name]}
    for name in targets:
        used |= {f"{module}.lora_{matrix}.weight" for module in module_names[name] for matrix in "AB"}
    if unused := sorted(adapters.tensors.keys() - used):
        names = listed([printable(name) for name in unused], 2)
        raise ConfigError(
            f"{key}: {adapters.path / TENSORS} has {names}, which cannot be used here: adapters are supported for all "
            "layers of a matrix that is not an expert or a router, without biases and magnitudes"
        )
    if not targets:
        raise ConfigError(f"{key}: {adapters.path / TENSORS} has no adapters of this model; name another folder")
    if definition.family.config.tie_embeddings and "embedding.table" in also_train:
        raise ConfigError(
            f"{key}: {adapters.path / CONFIG} saves the embedding, which this model ties to its head and PEFT does "
            "not; merge the adapters in PEFT, and convert the merged model"
        )
    return Lora(
        rank=adapters.rank, alpha=adapters.alpha, scaling=adapters.scaling, targets=targets, also_train=also_train
    )


def arrays_from(adapters: PeftAdapters, definition: Definition, key: str) -> dict[str, np.ndarray]:
    """Returns the float32 arrays of the adapters, and of parameters that were trained as a whole, by their names in a
    checkpoint. `definition` has the adapters. Raises `ConfigError` for a tensor that is missing or of another shape."""
    parts, arrays = parts_of(definition.base), {}
    shapes = {name: leaf.shape for name, leaf in _leaves(definition).items()}

    def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
        stored = adapters.tensors.get(name)
        if stored is None or stored.shape != shape:
            has = "lacks it" if stored is None else f"has {list(stored.shape)}"
            raise ConfigError(
                f"{key}: {adapters.path / TENSORS} must have {name} with the shape {list(shape)}, but {has}"
            )
        return np.asarray(stored, np.float32)

    assert definition.adapters is not None
    for triple in triples(definition.adapters):
        own_parts = parts[triple.weight]
        a_shape, b_shape = shapes[triple.a], shapes[triple.b]
        rank, inputs, outputs = a_shape[-1], math.prod(a_shape[1:-1]), math.prod(b_shape[2:])
        modules = [_module(part) for part in own_parts]
        a = [tensor(f"{module}.lora_A.weight", (rank, inputs)).T for module in modules]
        b = [tensor(f"{module}.lora_B.weight", (outputs, rank)).T for module in modules]
        arrays[stored_name(triple.a)] = np.stack(a).reshape(a_shape)
        arrays[stored_name(triple.b)] = np.stack(b).reshape(b_shape)
    for name, own_parts in parts.items():
        if {part.name for part in own_parts} <= adapters.whole_tensors:
            layers = [
                part.to_parameter(tensor(part.name, part.tensor_shape).reshape(part.matrix_shape)) for part in own_parts
            ]
            arrays[stored_name(name)] = np.stack(layers).reshape(shapes[name])
    return arrays


def write_folder(
    out: Path, lora: Lora, definition: Definition, arrays: Mapping[str, np.ndarray], base: str | None
) -> None:
    """Writes adapters into the new folder `out`. `definition` has the adapters, and `arrays` are the parameters that
    train, by their names in a checkpoint. `base` is the path of a base that PEFT can read.

    Raises `ConfigError` for adapters that PEFT does not have.
    """
    parts = parts_of(definition.base)
    tensors: dict[str, np.ndarray] = {}
    modules: set[str] = set()
    assert definition.adapters is not None
    has_transposed = False
    for triple in triples(definition.adapters):
        own_parts = parts[triple.weight]
        if own_parts[0].tensor.parts > 1:
            raise ConfigError(
                f"to-peft: {triple.weight} is a part of {own_parts[0].name}, of which PEFT can only adapt the whole; "
                "export the merged model with to-hf"
            )
        a, b = arrays[stored_name(triple.a)], arrays[stored_name(triple.b)]
        for layer, part in enumerate(own_parts):
            module = _module(part)
            modules.add(module)
            has_transposed |= not part.tensor.transposed
            rank = a.shape[-1]
            tensors[f"{_PREFIX}{module}.lora_A.weight"] = a[layer].reshape(-1, rank).T
            tensors[f"{_PREFIX}{module}.lora_B.weight"] = b[layer].reshape(rank, -1).T
    whole = _whole_tensors(parts, arrays, tied=definition.family.config.tie_embeddings)
    tensors |= {f"{_PREFIX}{name}": tensor for name, tensor in whole.items()}
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0,
        "use_rslora": lora.scaling == "rslora", "bias": "none", "fan_in_fan_out": has_transposed,
        "target_modules": _short_names(modules, parts), "inference_mode": True, "base_model_name_or_path": base,
        "modules_to_save": sorted({name.rpartition(".")[0] for name in whole}) or None,
    }  # fmt: skip
    (out / CONFIG).write_bytes(json_bytes(settings))
    contiguous = {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in sorted(tensors.items())}
    save_file(contiguous, out / TENSORS, {"format": "pt"})


def _whole_tensors(parts: Parts, arrays: Mapping[str, np.ndarray], *, tied: bool) -> dict[str, np.ndarray]:
    """Returns the tensors of the parameters that trained as a whole. Raises `ConfigError` if PEFT, which only knows
    whole modules, cannot represent them."""
    own_names = set(map(parameter_of, arrays))
    whole = {}
    for name in sorted(own_names & parts.keys()):
        array = arrays[stored_name(name)]
        own_parts = parts[name]
        if own_parts[0].tensor.parts > 1 or own_parts[0].experts > 1:
            raise ConfigError(f"to-peft: {name} is not a module of its own in PEFT; export the merged model with to-hf")
        layers = array.reshape(len(own_parts), *own_parts[0].shape)
        for layer, part in zip(layers, own_parts, strict=True):
            rows, _ = part.matrix_shape
            matrix = layer.reshape(-1, rows).T if part.tensor.transposed and part.tensor.inputs else layer
            whole[part.name] = np.asarray(matrix, np.float32).reshape(part.tensor_shape)
    if tied and "embedding.table" in own_names:
        raise ConfigError(
            "to-peft: lora.also_train has the embedding, which is tied to the head, and PEFT would train a copy of it; "
            "export the merged model with to-hf"
        )
    modules = {name.rpartition(".")[0] for name in whole}
    for name, own_parts in parts.items():
        if name not in own_names and any(part.name.rpartition(".")[0] in modules for part in own_parts):
            raise ConfigError(
                f"to-peft: {name} belongs to a module of which lora.also_train has another part, and PEFT saves whole "
                "modules; export the merged model with to-hf"
            )
    return whole


def _short_names(modules: set[str], parts: Parts) -> list[str]:
    """Returns the names of modules for `target_modules`: the last part of a name, such as q_proj, if all modules with
    it have adapters, and else full names."""
    everywhere = {_module(part) for own_parts in parts.values() for part in own_parts}
    names = set()
    for module in modules:
        last = module.rpartition(".")[2]
        same = {candidate for candidate in everywhere if candidate.rpartition(".")[2] == last}
        names.add(last if same <= modules else module)
    return sorted(names)


def _module(part: Part) -> str:
    """Returns the name of the module whose weight is a part of a parameter."""
    return part.name.removesuffix(".weight")


def _leaves(definition: Definition) -> dict[str, Any]:
    return {name: leaf for name, leaf, _ in named_leaves(definition.abstract, definition.axes)}


def fingerprint(path: Path, key: str) -> str:
    """Returns a digest of the files of a folder with adapters. Raises `ConfigError` if one is missing."""
    digest = hashlib.sha256()
    for name in (CONFIG, TENSORS):
        try:
            with (path / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ConfigError(
                f"{key}: {path / name} cannot be read: {error.strerror}; copy the folder again"
            ) from error
    return digest.hexdigest()


def folder_of(init_from: str) -> Path | None:
    """Returns the folder that `lora.init_from` names, or None if it names a run."""
    return Path(init_from.removeprefix(PEFT_PREFIX)) if init_from.startswith(PEFT_PREFIX) else None

"""The settings of LoRA: low-rank adapters that train beside frozen weights."""

from typing import Literal, Self

from pydantic import model_validator

from jaxmnt.config.section import Section, breaking_key, key, maths_key

PEFT_PREFIX = "peft:"
"""Begins the path of a folder with adapters in the format of PEFT."""


class Lora(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685)."""

    rank: int = breaking_key(16, "Rank of each adapter.", ge=1)
    alpha: float = maths_key(32.0, "Scale of the adapters: their output is multiplied by alpha / rank.", gt=0)
    scaling: Literal["standard", "rslora"] = maths_key(
        "standard", "Factor of an adapter's output. standard: alpha / rank; rslora: alpha / sqrt(rank)."
    )
    targets: list[str] = breaking_key(
        ["all-linear"], "Weights that get an adapter: patterns of parameter names, such as layers.attention.*, or "
        "names of PEFT, such as q_proj. all-linear: all matrices of layers, except routers and experts.",
    )  # fmt: skip
    also_train: list[str] = breaking_key(
        [], "Patterns of parameters that train as a whole and are stored with the adapters, such as head.*."
    )
    base_dtype: Literal["auto", "float32", "bfloat16"] = maths_key(
        "auto", "Dtype of the frozen parameters on the devices. auto: the compute dtype."
    )
    init_from: str | None = key(
        None, "Start with the adapters of peft:FOLDER, or of RUN or RUN@STEP with the same settings.", path=True
    )

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        if not self.targets:
            raise ValueError("lora.targets: the list is empty; name weights, or remove the section lora")
        return self

    @property
    def scale(self) -> float:
        """The factor of an adapter's output. rslora: Kalajdzievski 2023 (arXiv:2312.03732)."""
        return self.alpha / (self.rank if self.scaling == "standard" else self.rank**0.5)

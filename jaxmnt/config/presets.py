"""Published models by name: their settings of the section `model`."""

from typing import Any

from jaxmnt.errors import nearest, printable

Settings = dict[str, Any]


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int | None = None) -> Settings:
    return {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_layers": layers, "num_heads": heads,
        "num_kv_heads": kv_heads or heads,
    }  # fmt: skip


_LLAMA2 = {"family": "llama", "vocab_size": 32000}
_LLAMA3 = {"family": "llama", "vocab_size": 128256, "rope_theta": 500000.0}
_LLAMA31 = _LLAMA3 | {"rope_scaling": {"type": "llama3", "factor": 8.0, "original_max_positions": 8192}}
_LLAMA32 = _LLAMA3 | {
    "rope_scaling": {"type": "llama3", "factor": 32.0, "original_max_positions": 8192}, "tie_embeddings": True,
}  # fmt: skip
_MISTRAL = {"family": "mistral", "head_dim": 128, "rope_theta": 1000000.0}
_QWEN25 = {"family": "qwen2", "vocab_size": 152064, "rope_theta": 1000000.0, "norm_epsilon": 1e-6}
_SMALL_QWEN25 = _QWEN25 | {"vocab_size": 151936, "tie_embeddings": True}
_QWEN3 = {
    "family": "qwen3", "vocab_size": 151936, "head_dim": 128, "rope_theta": 1000000.0, "norm_epsilon": 1e-6,
}  # fmt: skip
_SMALL_QWEN3 = _QWEN3 | {"tie_embeddings": True}
_GEMMA = {"head_dim": 256, "attention_scale": 256**-0.5, "tie_embeddings": True, "norm_epsilon": 1e-6}
_GEMMA2 = _GEMMA | {
    "family": "gemma2", "vocab_size": 256000, "sliding_window": 4096, "sliding_window_pattern": 2,
    "attention_soft_cap": 50.0, "logit_soft_cap": 30.0,
}  # fmt: skip
_GEMMA3 = _GEMMA | {
    "family": "gemma3", "vocab_size": 262144, "sliding_window": 512, "sliding_window_pattern": 6,
    "rope_theta": 1000000.0, "local_rope_theta": 10000.0,
}  # fmt: skip
_LARGE_GEMMA3 = _GEMMA3 | {
    "vocab_size": 262208, "sliding_window": 1024, "rope_scaling": {"type": "linear", "factor": 8.0},
}  # fmt: skip
_OLMO2 = {"family": "olmo2", "vocab_size": 100352, "rope_theta": 500000.0, "norm_epsilon": 1e-6}
_OLMO3 = {
    "family": "olmo3", "vocab_size": 100278, "sliding_window": 4096, "sliding_window_pattern": 4,
    "rope_theta": 500000.0, "local_rope_theta": 500000.0, "norm_epsilon": 1e-6,
    "rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_positions": 8192},
}  # fmt: skip
_GPT2 = {"family": "gpt2", "vocab_size": 50257, "max_positions": 1024, "tie_embeddings": True}

PRESETS: dict[str, Settings] = {
    "llama2-7b": _LLAMA2 | _sizes(4096, 11008, 32, 32),
    "llama2-13b": _LLAMA2 | _sizes(5120, 13824, 40, 40),
    "llama2-70b": _LLAMA2 | _sizes(8192, 28672, 80, 64, 8),
    "llama3-8b": _LLAMA3 | _sizes(4096, 14336, 32, 32, 8),
    "llama3-70b": _LLAMA3 | _sizes(8192, 28672, 80, 64, 8),
    "llama3.1-8b": _LLAMA31 | _sizes(4096, 14336, 32, 32, 8),
    "llama3.1-70b": _LLAMA31 | _sizes(8192, 28672, 80, 64, 8),
    "llama3.1-405b": _LLAMA31 | _sizes(16384, 53248, 126, 128, 8),
    "llama3.2-1b": _LLAMA32 | _sizes(2048, 8192, 16, 32, 8),
    "llama3.2-3b": _LLAMA32 | _sizes(3072, 8192, 28, 24, 8),
    "llama3.3-70b": _LLAMA31 | _sizes(8192, 28672, 80, 64, 8),
    "mistral-7b-v0.1": _MISTRAL
    | _sizes(4096, 14336, 32, 32, 8)
    | {"vocab_size": 32000, "sliding_window": 4096, "rope_theta": 10000.0},
    "mistral-7b-v0.3": _MISTRAL | _sizes(4096, 14336, 32, 32, 8) | {"vocab_size": 32768},
    "mistral-nemo-12b": _MISTRAL | _sizes(5120, 14336, 40, 32, 8) | {"vocab_size": 131072},
    "mistral-small-24b": _MISTRAL | _sizes(5120, 32768, 40, 32, 8) | {"vocab_size": 131072, "rope_theta": 100000000.0},
    "qwen2.5-0.5b": _SMALL_QWEN25 | _sizes(896, 4864, 24, 14, 2),
    "qwen2.5-1.5b": _SMALL_QWEN25 | _sizes(1536, 8960, 28, 12, 2),
    "qwen2.5-3b": _SMALL_QWEN25 | _sizes(2048, 11008, 36, 16, 2),
    "qwen2.5-7b": _QWEN25 | _sizes(3584, 18944, 28, 28, 4),
    "qwen2.5-14b": _QWEN25 | _sizes(5120, 13824, 48, 40, 8) | {"norm_epsilon": 1e-5},
    "qwen2.5-32b": _QWEN25 | _sizes(5120, 27648, 64, 40, 8) | {"norm_epsilon": 1e-5},
    "qwen2.5-72b": _QWEN25 | _sizes(8192, 29568, 80, 64, 8) | {"norm_epsilon": 1e-5},
    "qwen3-0.6b": _SMALL_QWEN3 | _sizes(1024, 3072, 28, 16, 8),
    "qwen3-1.7b": _SMALL_QWEN3 | _sizes(2048, 6144, 28, 16, 8),
    "qwen3-4b": _SMALL_QWEN3 | _sizes(2560, 9728, 36, 32, 8),
    "qwen3-8b": _QWEN3 | _sizes(4096, 12288, 36, 32, 8),
    "qwen3-14b": _QWEN3 | _sizes(5120, 17408, 40, 40, 8),
    "qwen3-32b": _QWEN3 | _sizes(5120, 25600, 64, 64, 8),
    "gemma2-2b": _GEMMA2 | _sizes(2304, 9216, 26, 8, 4),
    "gemma2-9b": _GEMMA2 | _sizes(3584, 14336, 42, 16, 8),
    "gemma2-27b": _GEMMA2 | _sizes(4608, 36864, 46, 32, 16) | {"head_dim": 128, "attention_scale": 144**-0.5},
    "gemma3-270m": _GEMMA3 | _sizes(640, 2048, 18, 4, 1),
    "gemma3-1b": _GEMMA3 | _sizes(1152, 6912, 26, 4, 1),
    "gemma3-4b": _LARGE_GEMMA3 | _sizes(2560, 10240, 34, 8, 4),
    "gemma3-12b": _LARGE_GEMMA3 | _sizes(3840, 15360, 48, 16, 8),
    "gemma3-27b": _LARGE_GEMMA3 | _sizes(5376, 21504, 62, 32, 16) | {"head_dim": 128, "attention_scale": 168**-0.5},
    "olmo2-1b": _OLMO2 | _sizes(2048, 8192, 16, 16),
    "olmo2-7b": _OLMO2 | _sizes(4096, 11008, 32, 32),
    "olmo2-13b": _OLMO2 | _sizes(5120, 13824, 40, 40),
    "olmo2-32b": _OLMO2 | _sizes(5120, 27648, 64, 40, 8),
    "olmo3-7b": _OLMO3 | _sizes(4096, 11008, 32, 32),
    "olmo3-32b": _OLMO3 | _sizes(5120, 27648, 64, 40, 8),
    "gpt2": _GPT2 | _sizes(768, 3072, 12, 12),
    "gpt2-medium": _GPT2 | _sizes(1024, 4096, 24, 16),
    "gpt2-large": _GPT2 | _sizes(1280, 5120, 36, 20),
    "gpt2-xl": _GPT2 | _sizes(1600, 6400, 48, 25),
}
"""From the config.json that was published with each. `gemma3` is the text model alone."""


def preset(name: str) -> Settings:
    """The settings of a published model. Raises `ValueError` for a name that is not known."""
    if name not in PRESETS:
        raise ValueError(f"model.preset: {printable(name)} is not known; {nearest(name, sorted(PRESETS))}")
    return PRESETS[name]

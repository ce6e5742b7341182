"""What a token costs, held to published figures and to sums by hand."""

import io
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmnt.config.load import parse_config
from jaxmnt.models.contract import Definition, define
from jaxmnt.models.registry import build_family
from jaxmnt.telemetry.events import read_lines
from jaxmnt.telemetry.flops import CONVENTIONS, peak_flops, token_flops
from jaxmnt.telemetry.metrics import Rates, TrainLog
from jaxmnt.telemetry.phases import StepTimer
from jaxmnt.telemetry.progress import StatusLine

SIZES = {  # layers, hidden, heads, key/value heads, MLP, vocabulary
    "Llama 2 7B": (32, 4096, 32, 32, 11008, 32000),
    "Llama 2 13B": (40, 5120, 40, 40, 13824, 32000),
    "Llama 2 70B": (80, 8192, 64, 8, 28672, 32000),
    "Llama 3 8B": (32, 4096, 32, 8, 14336, 128256),
    "Llama 3 70B": (80, 8192, 64, 8, 28672, 128256),
    "Llama 3.1 405B": (126, 16384, 128, 8, 53248, 128256),
}

PUBLISHED = [  # model FLOP/s a GPU and tokens/s a GPU, as the source prints them
    # NeMo 24.12, performance summary of its documentation: H100, FP8.
    ("Llama 2 7B", 4096, "square", 780e12, 16934),
    ("Llama 2 13B", 4096, "square", 760e12, 8715),
    ("Llama 2 70B", 4096, "square", 768e12, 1728),
    ("Llama 3 8B", 8192, "square", 711e12, 12273),
    ("Llama 3 70B", 8192, "square", 734e12, 1524),
    # Megatron-Bridge, performance summary of its documentation: GB300 and GB200, FP8.
    ("Llama 3 8B", 8192, "causal", 1933e12, 37556),
    ("Llama 3 70B", 8192, "causal", 2030e12, 4520),
    ("Llama 3.1 405B", 8192, "causal", 2522e12, 999),
    # torchtitan, docs/performance.md at 3faaa1a0d: MFU of an A100 (312 TFLOP/s).
    ("Llama 3 8B", 8192, "parameters", 0.568 * 312e12, 2904),
    ("Llama 3 70B", 8192, "parameters", 0.517 * 312e12, 331),
    ("Llama 2 13B", 4096, "parameters", 0.611 * 312e12, 2162),
    ("Llama 2 70B", 4096, "parameters", 0.508 * 312e12, 355),
]

METRICS = {
    "loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1, "tokens": 48, "stop": 0, "save": 0, "bad_steps": 0,
    "profile": 0, "model": {},
}  # fmt: skip


def definition(**model) -> Definition:
    config = parse_config({"model": {"vocab_size": 512, **model}, "data": {"synthetic": 512}}).model
    return define(build_family(config, config.vocab_size))


def sized(name: str) -> Definition:
    names = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "intermediate_size", "vocab_size")
    return definition(**dict(zip(names, SIZES[name], strict=True)))


@pytest.mark.parametrize(("name", "length", "convention", "flops", "tokens"), PUBLISHED)
def test_flops_of_published_runs(name, length, convention, flops, tokens):
    count = CONVENTIONS[convention](token_flops(sized(name), length))
    assert count == pytest.approx(flops / tokens, rel=0.005)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("length", [2048, 8192])
def test_each_convention_by_hand(name, length):
    """The closed forms that the conventions' projects publish."""
    layers, hidden, heads, kv_heads, mlp, vocab = SIZES[name]
    weights = layers * (2 * hidden**2 + 2 * hidden**2 * kv_heads // heads + 3 * hidden * mlp)
    embedding, square = hidden * vocab, 12 * layers * hidden * length
    norms = (2 * layers + 1) * hidden
    by_hand = {
        "causal": 6 * (weights + embedding) + square / 2,
        "square": 6 * (weights + embedding) + square,
        "parameters": 6 * (weights + 2 * embedding + norms) + square,
        # Levanter's flop_utils.py, three times its forward count.
        "levanter": 6 * (weights + embedding) + square + 9 * layers * heads * length,
    }
    flops = token_flops(sized(name), length)
    assert {convention: count(flops) for convention, count in CONVENTIONS.items()} == pytest.approx(by_hand, rel=1e-12)


def test_what_families_vary_is_counted():
    shape = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128}
    length = 256
    plain = token_flops(definition(**shape), length)
    biased = token_flops(definition(family="qwen2", **shape), length)
    assert (biased.layers, biased.head) == (plain.layers, plain.head), "biases multiply nothing"
    assert biased.all_parameters > plain.all_parameters
    tied = token_flops(definition(tie_embeddings=True, **shape), length)
    assert tied.head == plain.head == 6 * 64 * 512, "a tied head multiplies as well"
    assert plain.all_parameters - tied.all_parameters == 6 * 64 * 512
    wide = token_flops(definition(family="qwen3", head_dim=32, **shape), length)
    assert wide.attention == 2 * plain.attention, "heads of another width"
    gemma = token_flops(definition(family="gemma2", sliding_window=64, tie_embeddings=True, **shape), length)
    keys = np.minimum(np.arange(length) + 0.5, 64).mean()  # a token counts half of itself
    assert gemma.attention == pytest.approx(12 * 2 * 64 * (length / 2 + keys), rel=1e-12), "two layers have a window"
    assert gemma.square == plain.square


def test_what_is_computed_again():
    flops = token_flops(sized("Llama 3 8B"), 8192)
    assert flops.recomputed("none") == flops.recomputed("attention") == flops.recomputed("dots") == 0
    assert flops.recomputed("full") == (flops.layers + flops.attention) / 3
    assert flops.recomputed("names") is None


@pytest.mark.parametrize(
    ("kind", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", jnp.bfloat16, 312e12),
        ("NVIDIA H100 80GB HBM3", jnp.bfloat16, 989e12),
        ("NVIDIA H100 80GB HBM3", jnp.float32, 67e12),
        ("NVIDIA H100 PCIe", jnp.bfloat16, 756e12),
        ("NVIDIA H200", jnp.bfloat16, 989e12),
        ("NVIDIA H20", jnp.bfloat16, 148e12),
        ("NVIDIA GH200 480GB", jnp.bfloat16, 989e12),
        ("NVIDIA B200", jnp.bfloat16, 2250e12),
        ("NVIDIA GB200", jnp.bfloat16, 2500e12),
        ("NVIDIA B300 SXM6 AC", jnp.bfloat16, 2250e12),
        ("NVIDIA GB300", jnp.bfloat16, 2500e12),
        ("NVIDIA GeForce RTX 3060", jnp.bfloat16, None),
        ("cpu", jnp.float32, None),
    ],
)
def test_peaks_by_kind_and_precision(kind, dtype, peak):
    assert peak_flops(kind, dtype) == peak


def test_more_than_the_peak_is_refused(tmp_path):
    """An MFU above 1 is a bug: it is not written, and said once."""
    out = io.StringIO()
    found = []
    for peak in (1e30, 1e-3):
        log = TrainLog(
            tmp_path / str(peak), writer=True, status=StatusLine(out), steps=9, tokens=0,
            rates=Rates(1000.0, 1300.0, peak, 64), epochs=lambda step: {}, timer=StepTimer(),
        )  # fmt: skip
        for step in (1, 2):
            log.push(step, METRICS, wait_seconds=0.0, digest=None)
        log.flush()
        log.close()
        found.append(SimpleNamespace(**read_lines(tmp_path / str(peak) / "metrics.jsonl")[-1]))
    believed, refused = found
    assert believed.mfu == pytest.approx(believed.tokens_per_second * 1000 / 1e30)
    assert believed.padded_tokens_per_second == pytest.approx(believed.tokens_per_second * 64 / 48)
    assert believed.hfu == pytest.approx(believed.padded_tokens_per_second * 1300 / 1e30)
    assert refused.mfu is None and refused.hfu is None
    assert out.getvalue().count("please report this as a bug") == 1

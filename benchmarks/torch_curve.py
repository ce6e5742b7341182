"""The losses of a mixture of experts in jaxmnt and in transformers, from the same weights and batches, on the CPU.

    python benchmarks/torch_curve.py --torch-python ENV/bin/python [--family qwen3_moe]

`ENV` has torch and transformers (tests/reference/requirements.txt). transformers makes the weights, and trains them by
torch's AdamW in float32 without a balance loss, whose definition differs; jaxmnt reads the same weights. Prints the
largest relative difference of a loss in the first 100 steps, and of means over 20 steps, as one JSON line.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROWS, LENGTH, VOCAB = 8, 32, 64
RATE, BETAS, EPSILON = 1e-3, (0.9, 0.95), 1e-8
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "router_aux_loss_coef": 0.0,
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False, "router_aux_loss_coef": 0.0},
}  # fmt: skip


def tokens_of(steps: int, rows: int = ROWS, seed: int = 2) -> np.ndarray:
    """Returns int32 [steps, rows, length + 1] of a random Markov chain, which is the same for every seed."""
    chain = np.random.default_rng(1).dirichlet(np.full(VOCAB, 0.05), VOCAB).cumsum(axis=1)
    rng = np.random.default_rng(seed)
    tokens = np.zeros((steps * rows, LENGTH + 1), np.int32)
    tokens[:, 0] = rng.integers(0, VOCAB, len(tokens))
    for place in range(LENGTH):
        below = chain[tokens[:, place]] < rng.random((len(tokens), 1))
        tokens[:, place + 1] = np.minimum(below.sum(axis=1), VOCAB - 1)
    return tokens.reshape(steps, rows, LENGTH + 1)


def fields_of(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the fields of a batch of whole rows."""
    shape = tokens[:, 1:].shape
    return {
        "tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones(shape, np.float32),
        "segments": np.ones(shape, np.int32), "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (len(tokens), 1)),
    }  # fmt: skip


def by_torch(folder: Path, family: str, steps: int) -> list[float]:
    """Makes the weights in `folder` and trains them. Returns the losses."""
    import torch
    import transformers

    torch.manual_seed(0)
    kind = {"qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral", "olmoe": "Olmoe"}[family]
    config = getattr(transformers, f"{kind}Config")(**SIZES, **FAMILIES[family])
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float()
    model.save_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, BETAS, EPSILON, weight_decay=0.0)
    losses = []
    for tokens in torch.from_numpy(tokens_of(steps)).long():
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def by_jaxmnt(folder: Path, steps: int) -> list[float]:
    """Trains the weights in `folder`. Returns the losses."""
    import jax

    from jaxmnt.config.load import parse_config
    from jaxmnt.data.feed import to_devices
    from jaxmnt.distributed.identity import Identity
    from jaxmnt.huggingface.config import read_config
    from jaxmnt.huggingface.folder import Folder
    from jaxmnt.huggingface.load import load_parameters
    from jaxmnt.training.compile import compile_program
    from jaxmnt.training.spec import ControlFlags
    from jaxmnt.training.state import canonical_abstract

    model = read_config(Folder(folder, "folder").config, "config.json")
    tree = {
        "model": model | {"balance_loss": 0.0},
        "data": {"global_batch_size": ROWS, "sequence_length": LENGTH},
        "optimizer": {
            "learning_rate": RATE, "warmup_steps": 0, "schedule": "constant", "weight_decay": 0.0, "beta1": BETAS[0],
            "beta2": BETAS[1], "epsilon": EPSILON, "clip_norm": None,
        },
        "train": {"precision": "float32", "steps": steps},
    }  # fmt: skip
    program = compile_program(parse_config(tree), VOCAB, jax.devices()[:1])
    state = program.init()
    stored = canonical_abstract(program.spec, program.abstract_state)["params"]
    state["params"] = load_parameters(folder, program.spec.definition, stored, Identity()).params
    control = {"control": ControlFlags(program.control_sharding).array()}
    losses = []
    for tokens in tokens_of(steps):
        batch = to_devices(fields_of(tokens), list(range(ROWS)), ROWS, program.batch_sharding)
        state, values = program.step(state, batch | control)
        losses.append(values["loss"])
    return [float(loss) for loss in losses]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", metavar="PYTHON", help="a Python that has torch and transformers")
    parser.add_argument("--family", choices=sorted(FAMILIES), default="qwen3_moe")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--torch-folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.torch_folder is not None:
        print(json.dumps(by_torch(options.torch_folder, options.family, options.steps)))
        return
    if options.torch_python is None:
        parser.error("give --torch-python")
    with tempfile.TemporaryDirectory() as folder:
        command = [options.torch_python, __file__, "--torch-folder", folder, "--family", options.family]
        output = subprocess.run(
            [*command, "--steps", str(options.steps)], stdout=subprocess.PIPE, text=True, check=True
        )
        wanted = np.array(json.loads(output.stdout.splitlines()[-1]))
        losses = np.array(by_jaxmnt(Path(folder), options.steps))
    mean = lambda curve: np.convolve(curve, np.full(20, 1 / 20), "valid")
    result = {
        "family": options.family, "date": time.strftime("%Y-%m-%d"), "steps": options.steps,
        "first_and_last": [round(float(losses[0]), 4), round(float(mean(losses)[-1]), 4)],
        "apart_in_100_steps": float(np.max(np.abs(losses / wanted - 1)[:100])),
        "means_apart": float(np.max(np.abs(mean(losses) / mean(wanted) - 1))),
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())

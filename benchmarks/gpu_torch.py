"""A Llama in PyTorch for `gpu.py`: torch.compile, flash attention, fused AdamW, bfloat16 autocast. Prints a JSON line.

    python benchmarks/gpu_torch.py '{"layers": 6, "width": 4096, …}' [--cpu]

Needs nothing of jaxmnt. Shapes: B rows, H heads, L tokens, K head width.
"""

import json
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional

shape = json.loads(sys.argv[1])
device = "cpu" if "--cpu" in sys.argv else "cuda"
WIDTH, HEADS, KV_HEADS, MLP = shape["width"], shape["heads"], shape["kv_heads"], shape["mlp"]
VOCAB, LENGTH, ROWS, HEAD = shape["vocab"], shape["length"], shape["rows"], shape["width"] // shape["heads"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        linear = lambda inputs, outputs: nn.Linear(inputs, outputs, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, eps=1e-5) for _ in range(2))
        self.q, self.out = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.k, self.v = linear(WIDTH, KV_HEADS * HEAD), linear(WIDTH, KV_HEADS * HEAD)
        self.gate, self.up, self.down = linear(WIDTH, MLP), linear(WIDTH, MLP), linear(MLP, WIDTH)

    def forward(self, x, cos, sin):
        h = self.norms[0](x)
        by_head = lambda y, heads: y.view(*y.shape[:2], heads, HEAD).transpose(1, 2)
        q, k, v = by_head(self.q(h), HEADS), by_head(self.k(h), KV_HEADS), by_head(self.v(h), KV_HEADS)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(a.transpose(1, 2).reshape(x.shape))
        h = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


def rotated(x_BHLK, cos, sin):
    one, two = x_BHLK.chunk(2, dim=-1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1).to(x_BHLK.dtype)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(shape["layers"])), nn.RMSNorm(WIDTH, eps=1e-5)
        angles = torch.arange(LENGTH)[:, None] * 500000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.view(-1, VOCAB).float(), targets.reshape(-1))


def main():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with torch.device(device):
        decoder = Decoder()
    step = torch.compile(decoder) if device == "cuda" else decoder
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    seconds, loss = [], None
    for _ in range(shape["steps"]):
        tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), device=device)
        synchronize()
        started = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            loss = step(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        synchronize()
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds[3:])
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    print(json.dumps({
        "tokens_per_second": ROWS * LENGTH / median, "step_seconds": median, "first_step_seconds": seconds[0],
        "peak_gib": peak, "loss": loss.item(), "torch": torch.__version__,
    }))  # fmt: skip


def synchronize():
    if device == "cuda":
        torch.cuda.synchronize()


main()

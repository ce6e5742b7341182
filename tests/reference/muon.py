"""Makes what Muon is compared with, by torch.optim.Muon, whose iteration is in float32 here instead of bfloat16.

muon.safetensors has, for each shape of `SHAPES` (inputs × outputs) and each scale:

SHAPE.gradients   float32 [3, inputs, outputs], of three steps
SHAPE.start       float32 [inputs, outputs]
SHAPE.rms         float32 [inputs, outputs], after the steps with adjust_lr_fn match_rms_adamw; `spectral`: original
"""

from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file

SHAPES = ((24, 40), (40, 24), (32, 32))
STEPS, RATE, DECAY, MOMENTUM = 3, 0.02, 0.1, 0.95
SCALES = {"rms": "match_rms_adamw", "spectral": "original"}


def make(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    arrays = {}
    for shape in SHAPES:
        name = "x".join(map(str, shape))
        start, *gradients = torch.randn((STEPS + 1, *shape), generator=generator)
        arrays |= {f"{name}.start": start.clone(), f"{name}.gradients": torch.stack(gradients)}
        for scale, adjustment in SCALES.items():
            weight = torch.nn.Parameter(start.T.clone())  # torch has outputs first
            optimizer = torch.optim.Muon(
                [weight], lr=RATE, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn=adjustment
            )
            with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
                for gradient in gradients:
                    weight.grad = gradient.T.clone()
                    optimizer.step()
            arrays[f"{name}.{scale}"] = weight.detach().T.contiguous()
    save_file(arrays, folder / "muon.safetensors")

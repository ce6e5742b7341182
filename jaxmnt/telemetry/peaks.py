"""What a device can do at most, by its data sheet. No JAX."""

import re

PEAKS: dict[str, dict[str, float]] = {
    "V100": {"float32": 15.7e12},
    "A100": {"bfloat16": 312e12, "tf32": 156e12, "float32": 19.5e12},
    "L4": {"float8": 242e12, "bfloat16": 121e12, "tf32": 60e12, "float32": 30.3e12},
    "L40S": {"float8": 733e12, "bfloat16": 362e12, "tf32": 183e12, "float32": 91.6e12},
    "H100 PCIe": {"float8": 1513e12, "bfloat16": 756e12, "tf32": 378e12, "float32": 51e12},
    "H100 NVL": {"float8": 1671e12, "bfloat16": 835e12, "tf32": 418e12, "float32": 60e12},
    "H100": {"float8": 1979e12, "bfloat16": 989e12, "tf32": 495e12, "float32": 67e12},
    "H200": {"float8": 1979e12, "bfloat16": 989e12, "tf32": 495e12, "float32": 67e12},
    "H20": {"float8": 296e12, "bfloat16": 148e12, "tf32": 74e12, "float32": 44e12},
    "GH200": {"float8": 1979e12, "bfloat16": 989e12, "tf32": 495e12, "float32": 67e12},
    "B200": {"float4": 9000e12, "float8": 4500e12, "bfloat16": 2250e12, "tf32": 1125e12, "float32": 75e12},
    "GB200": {"float4": 10000e12, "float8": 5000e12, "bfloat16": 2500e12, "tf32": 1250e12, "float32": 80e12},
    "B300": {"float4": 13500e12, "float8": 4500e12, "bfloat16": 2250e12, "tf32": 1125e12, "float32": 75e12},
    "GB300": {"float4": 15000e12, "float8": 5000e12, "bfloat16": 2500e12, "tf32": 1250e12, "float32": 80e12},
}
"""Dense peak FLOP/s by a part of the device kind, after NVIDIA's data sheets (those of racks and boards divided by
their GPUs; figures with sparsity halved). float32 is without TF32, as jaxmnt computes."""


def peaks_of(device_kind: str) -> dict[str, float]:
    """Peak FLOP/s of one device by dtype; empty where they are not known. The most specific name wins."""
    names = [name for name in PEAKS if re.search(rf"\b{name}\b", device_kind)]
    return PEAKS[max(names, key=len)] if names else {}

"""Runs with adapters: their frozen parameters, and adapters in other formats (docs/lora.md)."""

"""The model's definition: decoder-only transformers, by family."""

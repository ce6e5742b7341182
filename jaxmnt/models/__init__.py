"""The model's definition: a decoder-only transformer of the Llama shape."""

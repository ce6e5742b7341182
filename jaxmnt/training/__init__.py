"""The training step as a pure function, the optimizer, and the memory that the compiled step needs."""

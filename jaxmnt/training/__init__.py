"""The training step as a pure function, the optimizer, and what compiling them costs in memory."""

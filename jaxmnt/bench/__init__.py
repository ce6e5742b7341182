"""Benchmarks that compare runs with each other."""

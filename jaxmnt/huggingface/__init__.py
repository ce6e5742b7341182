"""Reads and writes models in files of Hugging Face, without torch."""

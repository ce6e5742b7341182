"""Checkpoints: saved in the background through Orbax, committed by our own manifest, restored on any mesh."""

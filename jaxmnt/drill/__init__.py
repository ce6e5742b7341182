"""The drill: the failures of a long run, forced beforehand on the same config made small."""

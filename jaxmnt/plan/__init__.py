"""The program of a cluster that is not there: compiled, measured, and read."""

"""Plans for a cluster that need not exist: compiles its program, predicts its time and memory, and explains both."""

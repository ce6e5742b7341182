"""Which process am I, are all of us here, and how do we agree."""

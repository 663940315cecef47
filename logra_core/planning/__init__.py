"""Before a run: shapes of known models, memory of a step, whether it fits, and starting it on a node."""

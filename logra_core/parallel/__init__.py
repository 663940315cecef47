"""Several processes as one: ranks, FSDP2, sketches and weights by rows."""

"""Rollouts: the policy's files, the engine protocol, transformers, and vLLM in this process or by HTTP (the only imports of vLLM)."""

from .. import variants  # noqa: F401  (an engine knows whatever a trainer may send)

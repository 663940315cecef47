"""What vLLM calls in each of its processes when this package is installed (entry point group `vllm.general_plugins`).

Only names are registered; `backend` is imported when a vLLM is started with `WeightTransferConfig(backend="logra")`, so that an
unknown vLLM version is an error for those who use the backend and for nobody else.
"""

from __future__ import annotations

import os

BACKEND = "logra"
# On a CPU vLLM keeps one core for its scheduler and, when there are two, computes on half the machine. Trainer and engine take turns here.
DEFAULTS = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}


def environment() -> dict[str, str]:
    """`DEFAULTS` for a process that runs vLLM, as far as this process's environment does not say otherwise."""
    return {name: os.environ.get(name, value) for name, value in DEFAULTS.items()}


def register() -> None:
    """Make `backend="logra"` known to vLLM's worker and trainer factories; calling it again changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    sides = (WeightTransferEngineFactory, "backend", "LoGRAEngine"), (WeightTransferTrainerFactory, "sender", "LoGRASender")
    for factory, module, name in sides:
        if BACKEND not in factory._registry:
            factory.register_engine(BACKEND, f"logra_core.engines.{module}", name)

"""What vLLM calls in each of its processes when this package is installed (entry point group `vllm.general_plugins`).

Only names are registered; `vllm_backend` is imported when a vLLM is started with `WeightTransferConfig(backend="logra")`, so that an
unknown vLLM version is an error for those who use the backend and for nobody else.
"""

from __future__ import annotations

BACKEND = "logra"


def register() -> None:
    """Make `backend="logra"` known to vLLM's worker and trainer factories; calling it again changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    sides = (WeightTransferEngineFactory, "vllm_backend", "LoGRAEngine"), (WeightTransferTrainerFactory, "vllm_sender", "LoGRASender")
    for factory, module, name in sides:
        if BACKEND not in factory._registry:
            factory.register_engine(BACKEND, f"logra_core.{module}", name)

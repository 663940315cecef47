"""Which rollout engine, or engines, a run's settings name."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from ..engines.group import EngineGroup
from ..engines.policy import at_home, load_policy
from ..engines.rollout import LARGEST, RolloutEngine, TransformersRollout
from ..engines.vllm_local import VLLMRollout
from ..engines.vllm_server import ServerRollout
from ..settings import ConfigError
from .settings import TrainConfig


def on_this_machine(url: str) -> bool:
    """Whether a server's address says that it shares this machine's files."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


def refuse_large_state(cfg: TrainConfig, size: int) -> None:
    """Raises ConfigError if a server of `cfg.engine_urls` could not be sent a full state of `size` bytes: elsewhere it must fit in one call."""
    if size >= LARGEST and (far := [u for u in cfg.engine_urls if not on_this_machine(u)]):
        raise ConfigError(
            f"TrainConfig.engine_urls: {', '.join(far)} cannot be sent the {size:,} bytes of all trained weights: a call holds less than {LARGEST:,}. "
            "Allowed are servers on this machine, named by 127.0.0.1 or localhost, which read them as a file; elsewhere a smaller model, fewer "
            "sketch.targets, or half the bytes with optim.stochastic_rounding"
        )


def make_engine(cfg: TrainConfig, run_id: str | None = None) -> RolloutEngine:
    """The engine or engines named by `cfg`, each with its own copy of `cfg.model` ("" is the embedded policy) at version 0.

    Raises ImportError where the engine's library is missing, RolloutError where a server of `cfg.engine_urls` does not answer.
    """
    if cfg.engine == "transformers":

        def own() -> RolloutEngine:
            policy = load_policy(cfg.model or None, cfg.weight_dtype)
            return TransformersRollout(*policy, cfg.sketch.targets, run_id, rounding=cfg.optim.make_rounding())

        make = [own] * cfg.engines
    elif cfg.engine_urls:
        def server(url: str) -> RolloutEngine:
            spool = str(Path(cfg.out).resolve()) if on_this_machine(url) else None
            return ServerRollout(url, at_home(cfg.model) or None, timeout=cfg.peer_timeout, spool=spool)

        Path(cfg.out).mkdir(parents=True, exist_ok=True)
        make = [lambda url=url: server(url) for url in cfg.engine_urls]
    else:
        Path(cfg.out).mkdir(parents=True, exist_ok=True)
        logs = [Path(cfg.out) / f"engine{i}.log" for i in range(cfg.engines)]
        make = [lambda log=log: VLLMRollout(at_home(cfg.model) or None, log=log) for log in logs]
    return make[0]() if len(make) == 1 else EngineGroup.start(make)

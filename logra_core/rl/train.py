"""The command line of a run: `python -m logra_core.rl.train config.yaml [dotted.key=value ...]`, also under torchrun."""

from __future__ import annotations

import os
import sys

from ..engines.rollout import RolloutError
from ..parallel.ranks import PeerError
from ..settings import ConfigError
from ..sync import SyncError
from . import checkpoint
from .configfile import load_config
from .distributed import DistributedTrainer
from .trainer import Trainer

# What may end a run without a mistake in the program; all else keeps its traceback.
ENDS = (ConfigError, FileNotFoundError, ImportError, checkpoint.CheckpointError, PeerError, RolloutError, SyncError)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m logra_core.rl.train config.yaml|json [dotted.key=value ...]")
        return 0 if arguments else 2
    try:
        cfg = load_config(arguments[0], arguments[1:])
        if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun
            kind = DistributedTrainer
        else:
            kind = Trainer
        end = kind(cfg).run()
    except ENDS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if os.environ.get("RANK", "0") != "0":
        return 0
    before, after = (", ".join(f"Pass@{k} {v:.3f}" for k, v in end[f"pass_at_{w}"].items()) for w in ("before", "after"))
    print(f"{cfg.out}: {before} before, {after} after {end['update']} updates, {end['elapsed']:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

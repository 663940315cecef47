"""What a GPU keeps in a run: the layouts that planner.py counts, and the switches that lead from the paper's to our best.

Belongs here: layouts, and which one a run of this package has. What they cost is planner.py's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from ..rl.settings import PPOConfig, TrainConfig
from ..settings import Checked, ConfigError
from ..variants.inputs import STORAGES
from ..variants.settings import SketchConfig


@dataclass(frozen=True)
class Layout(Checked):
    """What a GPU keeps. The defaults are those of the rule that was fitted to the paper's averages.

    compute_copy: weights a second time in bf16, sharded like the fp32 masters. FSDP2 casts its fp32 shard as it gathers and needs none.
    frozen_masters: fp32 also of the weights that LoGRA and LoRA never train (embeddings, norms, head); else those are kept in bf16 alone.
    sketch_rows: S by rows while it accumulates, else whole on every GPU. projection: as `SketchConfig.projection_storage`.
    shared_inputs: q, k, v and gate, up keep one A. logit_chunk: as `PPOConfig.logit_chunk`. dense_all: dense trains all weights.
    bf16_alone: all weights in bf16 and no masters, LoGRA with `OptimConfig.stochastic_rounding`; not for float32 passes. momentum: LoGRA
    with `OptimConfig.beta1`, a mean of the sketches by rows.
    """

    compute_copy: bool = True
    frozen_masters: bool = True
    sketch_rows: bool = True
    projection: str = "fp32"
    shared_inputs: bool = False
    logit_chunk: int = 0
    dense_all: bool = True
    bf16_alone: bool = False
    momentum: bool = False

    def _check(self) -> None:
        self._choice("projection", STORAGES)
        self._need("logit_chunk", self.logit_chunk >= 0, ">= 0")


PAPER = Layout()
BEST = Layout(False, False, True, "bits", True, 256, False)


def program_layout(cfg: TrainConfig) -> Layout:
    """What this package keeps in a run of `cfg`: fp32 (or bf16) shards of all weights, S whole until the update. Any sketch counts as one-sided."""
    return Layout(
        compute_copy=False, frozen_masters=True, sketch_rows=False, projection=cfg.sketch.projection_storage, shared_inputs=cfg.sketch.share_inputs,
        logit_chunk=cfg.ppo.logit_chunk, dense_all=False, bf16_alone=cfg.optim.stochastic_rounding, momentum=cfg.optim.beta1 > 0,
    )  # fmt: skip


def layout_of(cfg: TrainConfig) -> Layout:
    """`program_layout` where it is exact. Raises ConfigError for a two-sided sketch, which the planner does not count."""
    if cfg.sketch.kind != "one_sided":
        raise ConfigError(f"SketchConfig.kind = {cfg.sketch.kind!r}: the planner counts one_sided only")
    return program_layout(cfg)


@dataclass(frozen=True)
class Switch:
    """One step towards `BEST`: title, change of the layout, and the setting of this package that turns it on ("" while it is planned).

    before: what it replaces, where `PAPER` has it already.
    """

    title: str
    change: dict
    setting: str = ""
    before: dict = field(default_factory=dict)

    @property
    def exists(self) -> bool:
        """Whether this package has the setting."""
        holder, _, name = self.setting.rpartition(".")
        return bool(holder) and name in {f.name for f in fields({"sketch": SketchConfig, "train": TrainConfig, "ppo": PPOConfig}[holder])}


SWITCHES = (
    Switch("no second bf16 copy of the weights", {"compute_copy": False}, "train.compute_dtype"),
    Switch("frozen weights in bf16 alone", {"frozen_masters": False}),
    Switch("A as bits", {"projection": "bits"}, "sketch.projection_storage"),
    Switch("one A for q, k, v and for gate, up", {"shared_inputs": True}, "sketch.share_inputs"),
    Switch("logits in chunks of 256 tokens", {"logit_chunk": 256}, "ppo.logit_chunk"),
    Switch("S by rows while it accumulates", {"sketch_rows": True}, before={"sketch_rows": False}),
)

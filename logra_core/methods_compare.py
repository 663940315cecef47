"""What LoGRA is compared with beside dense AdamW, on the same targets: LoRA (peft) and GaLore (galore-torch).

Belongs here: how each fits the loop: what trains, what a version's weights are, what a checkpoint holds. The libraries do the rest; both
come with `pip install -e '.[compare]'` and `pip install --no-deps galore-torch==1.0`. The message is the full weights.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

import torch

from .config import ConfigError, GaLoreConfig, TrainConfig
from .methods_dense import DenseMethod
from .sync import Weights

ADAPTER = "default"
ALIAS = "_galore_torch"


class MergedWeights(Weights):
    """Masters W + s B A [D, K] of layers with LoRA factors, made anew whenever one is asked for: no copy of W is held."""

    def __init__(self, modules: dict[str, torch.nn.Linear], factors: dict[str, tuple[torch.Tensor, torch.Tensor]], scale: float) -> None:
        super().__init__(modules)
        self.factors, self.scale = factors, scale  # A [R, K], B [D, R] of each layer; s

    def master(self, name: str) -> torch.Tensor:
        A_RK, B_DR = (t.detach() for t in self.factors[name])
        return torch.addmm(super().master(name), B_DR, A_RK, alpha=self.scale)

    def set_(self, name: str, W_DK: torch.Tensor) -> None:
        """Nothing: A and B come back with the method's state; the fingerprint that is compared afterwards tells whether they give W."""

    def merge_(self, name: str, U_DR: torch.Tensor, V_RK: torch.Tensor) -> None:
        raise RuntimeError("weights with LoRA factors change through the factors")


class LoRAMethod(DenseMethod):
    """AdamW on factors A, B of W + (alpha / rank) B A; W stays as it is. The policy of a version is the merged weight.

    The trainer computes W x + s B (A x), the engine holds W + s B A: equal but for rounding, which the importance weights correct.
    A is drawn from the run's seed; B = 0. Raises ConfigError where peft is missing.
    """

    section = "lora"

    def _choose(self, layers: dict[str, torch.nn.Linear], cfg: TrainConfig) -> dict[str, torch.nn.Parameter]:
        if importlib.util.find_spec("peft") is None:
            raise ConfigError("method = 'lora' needs peft: pip install -e '.[compare]'")
        from peft import LoraConfig, inject_adapter_in_model

        settings = LoraConfig(r=self.cfg.rank, lora_alpha=self.cfg.alpha, lora_dropout=0.0, target_modules=list(layers))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(cfg.seed)
            inject_adapter_in_model(settings, self.model, ADAPTER)
        adapted = {n: m for n, m in self.model.named_modules() if n in layers}
        factors = {n: (m.lora_A[ADAPTER].weight, m.lora_B[ADAPTER].weight) for n, m in adapted.items()}
        self.weights = MergedWeights(layers, factors, self.cfg.alpha / self.cfg.rank)
        return {f"{n}.lora_{kind}": p for n, pair in factors.items() for kind, p in zip("AB", pair, strict=True)}

    def state_dict(self) -> dict:
        return super().state_dict() | {"factors": {n: p.detach() for n, p in self.parameters.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        for name, p in self.parameters.items():
            p.copy_(state["factors"][name])


def galore_classes() -> tuple[type, type]:
    """(AdamW, GaLoreProjector) of galore-torch.

    Its package imports bitsandbytes, for an 8-bit variant that is not used here; so the two files are imported under another name.
    Raises ConfigError where it is missing.
    """
    found = importlib.util.find_spec("galore_torch")
    if found is None:
        raise ConfigError("method = 'galore' needs galore-torch: pip install --no-deps galore-torch==1.0")
    if ALIAS not in sys.modules:
        package = types.ModuleType(ALIAS)
        package.__path__ = list(found.submodule_search_locations)
        sys.modules[ALIAS] = package
    return importlib.import_module(ALIAS + ".adamw").AdamW, importlib.import_module(ALIAS + ".galore_projector").GaLoreProjector


def galore_adamw(weights: list[torch.Tensor], c: GaLoreConfig) -> torch.optim.Optimizer:
    """The library's AdamW on weights [D, K], each gradient projected on its shorter side ("std")."""
    group = {"params": weights, "rank": c.rank, "update_proj_gap": c.update_proj_gap, "scale": c.scale, "proj_type": "std"}
    return galore_classes()[0]([group], c.lr, (c.beta1, c.beta2), c.eps, c.weight_decay, no_deprecation_warning=True)


class GaLoreMethod(DenseMethod):
    """GaLore's AdamW: full gradients, moments in the subspace of their leading singular directions.

    A decomposition that fails does so within the update, when some layers have changed: the run ends there, unsaved and unsent, and goes on
    from its last checkpoint when started again.
    """

    section = "galore"

    def _make_optimizer(self) -> torch.optim.Optimizer:
        return galore_adamw(self.trained(), self.cfg)

    def _step(self, update: Any, alpha: float) -> None:
        super()._step(update, alpha)
        compact(self.optimizer)

    def state_dict(self) -> dict:
        """The projector, an object, as the matrix it holds: the rest of it follows from the settings."""
        made = super().state_dict()
        state = {i: s | {"projector": s["projector"].ortho_matrix} for i, s in made["optimizer"]["state"].items()}
        return made | {"optimizer": made["optimizer"] | {"state": state}}

    def load_state_dict(self, state: dict) -> None:
        restored = {i: s | {"projector": self._restored(s["projector"], i)} for i, s in state["optimizer"]["state"].items()}
        super().load_state_dict(state | {"optimizer": state["optimizer"] | {"state": restored}})

    def _restored(self, matrix: torch.Tensor, index: int) -> Any:
        made = galore_classes()[1](self.cfg.rank, update_proj_gap=self.cfg.update_proj_gap, scale=self.cfg.scale)
        made.ortho_matrix = matrix.to(self.trained()[index].device)
        return made


def compact(optimizer: torch.optim.Optimizer) -> None:
    """Let GaLore's projectors hold their rank rows alone.

    The library keeps a view into the whole matrix of singular vectors: as many values again as a square weight has. And a product's last
    bits depend on how its operands lie in memory, which a checkpoint would not bring back.
    """
    for state in optimizer.state.values():
        matrix = state["projector"].ortho_matrix
        if not matrix.is_contiguous() or matrix.untyped_storage().nbytes() > matrix.nbytes:
            state["projector"].ortho_matrix = matrix.clone(memory_format=torch.contiguous_format)

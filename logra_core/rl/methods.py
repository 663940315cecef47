"""The training methods behind one small interface: what the loop does between a finished backward pass and the next rollout.

Belongs here: the interface, and LoGRA behind it; dense AdamW is in py, LoRA and GaLore in py. Each turns gradients into a message for the rollout
engine. The loop knows only `Method`; a new method is a new class and an entry in `make_method`.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import types
import uuid
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..engines.rollout import Rollouts
from ..kl import ProbeBatch, StepController, exact_kl
from ..optim import LARGEST, LoGRA, MissingSketchError
from ..settings import ConfigError, NonFiniteError
from ..sketch import select_targets
from ..sync import full_state_bytes
from ..variants.activation import observe
from ..weights import Weights
from .ppo import sequence_logprobs
from .settings import AdamConfig, DenseConfig, GaLoreConfig, TrainConfig


@dataclass(frozen=True)
class Message:
    """What the engine gets after an update: bytes, and whether they are the full weights (`resync`) or an update (`sync`)."""

    data: bytes
    full: bool


class Method(Protocol):
    """observe -> (backward) -> propose -> scale -> apply, once per update; only `apply` changes weights, so an error before leaves them.

    observe: look at the batch before its gradient is taken, for a method whose projection depends on it.
    """

    weights: Weights
    version: int  # applied updates
    run_id: str

    def trained(self) -> list[torch.Tensor]: ...  # the tensors of the model that updates change
    def zero_grad(self) -> None: ...
    def observe(self, rollouts: Rollouts, pad_id: int) -> None: ...
    def grad_norm(self) -> float: ...
    def propose(self) -> Any: ...
    def scale(self, update: Any, probe: ProbeBatch, mismatch: float) -> float: ...
    def exact_kl(self, update: Any, probe: ProbeBatch, alpha: float) -> float | None: ...
    def apply(self, update: Any, alpha: float) -> Message: ...
    def metrics(self) -> dict[str, Any]: ...
    def state_dict(self) -> dict: ...
    def load_state_dict(self, state: dict) -> None: ...


def make_method(model: torch.nn.Module, cfg: TrainConfig) -> Method:
    """The method named by `cfg.method`, attached to `model`: all weights frozen but what it trains."""
    if cfg.method == "logra":
        return LograMethod(model, cfg)
    dense = ControlledDenseMethod if cfg.dense.kl_control else DenseMethod
    return {"dense": dense, "lora": LoRAMethod, "galore": GaLoreMethod}[cfg.method](model, cfg)


def checkpoint_activations(model: torch.nn.Module) -> None:
    """Recompute activations in backward. transformers does so in training mode only, where dropout would change the policy."""
    dropout = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Dropout) and m.p > 0]
    if dropout or getattr(model.config, "attention_dropout", 0):
        raise ConfigError(f"gradient_checkpointing: the model has dropout ({', '.join(dropout[:3]) or 'attention_dropout'}); set it to 0")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()


class LograMethod:
    """Sketches, RowAdam or SGD on them, predicted-KL control; the message is the rounded factors and a seed."""

    def __init__(self, model: torch.nn.Module, cfg: TrainConfig) -> None:
        self.model, self.cfg = model, cfg
        self.optimizer = LoGRA(model, cfg.sketch, cfg.optim)
        self.weights = self.optimizer.weights
        self.controller = StepController(cfg.kl)

    @property
    def version(self) -> int:
        return self.optimizer.version

    @property
    def run_id(self) -> str:
        return self.optimizer.run_id

    def trained(self) -> list[torch.Tensor]:
        return [m.weight for m in self.weights.modules.values()]

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def observe(self, rollouts: Rollouts, pad_id: int) -> None:
        """Activation-aware projection: score the first `sketch.scored_responses` responses without gradients, a microbatch at a time.

        TIS takes its old log-probs from the training forward, so this pass is extra: about a third of a training pass over those responses.
        """
        if self.cfg.sketch.projection != "activation":
            return
        count = min(self.cfg.sketch.scored_responses or len(rollouts), len(rollouts))
        for rows in torch.arange(count).split(self.cfg.ppo.microbatch):
            part = rollouts.select(rows.tolist())
            shared = 0 if self.cfg.gradient_checkpointing else part.shared(self.model)
            padded = part.padded(pad_id, skip=shared)
            with observe(self.optimizer.targets.values(), padded["attention_mask"], shared):
                sequence_logprobs(self.model, padded, self.cfg.sampling.temperature, part.prompt_ids[0][:shared], self.cfg.ppo.logit_chunk)

    def grad_norm(self) -> float:
        """Frobenius norm over all sketches."""
        return self.optimizer.grad_norm()

    def propose(self):
        return self.optimizer.propose()

    def scale(self, update, probe: ProbeBatch, mismatch: float) -> float:
        return self.controller.observe_and_scale(self.model, update, probe, mismatch)

    def exact_kl(self, update, probe: ProbeBatch, alpha: float) -> float:
        return exact_kl(self.model, update, probe, alpha, self.cfg.kl.temperature)

    def apply(self, update, alpha: float) -> Message:
        wire = self.optimizer.apply(update, alpha)
        return Message(wire.to_bytes(self.weights.fingerprint()), full=False)

    def metrics(self) -> dict[str, Any]:
        """q, alpha, budgets and predicted KL of the last update."""
        return self.controller.metrics() | {"lr": self.optimizer.param_groups[0]["lr"]}

    def state_dict(self) -> dict:
        return {"optimizer": self.optimizer.state_dict(), "controller": self.controller.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.controller.load_state_dict(state["controller"])


def dense_lr(cfg: AdamConfig, update: int) -> float:
    """Learning rate of an update (counted from 1): linear warm-up, then cosine to final_fraction * lr at `horizon`, then flat."""
    if update <= cfg.warmup:
        return cfg.lr * update / cfg.warmup
    progress = min((update - cfg.warmup) / max(cfg.horizon - cfg.warmup, 1), 1.0)
    return cfg.lr * (cfg.final_fraction + (1 - cfg.final_fraction) * 0.5 * (1 + math.cos(math.pi * progress)))


class DenseMethod:
    """AdamW on the same target weights (METHOD section 6): no sketch, no KL control; the message is the full weights."""

    section = "dense"  # of the configuration

    def __init__(self, model: torch.nn.Module, cfg: TrainConfig) -> None:
        self.model, self.cfg = model, getattr(cfg, self.section)
        self.version, self.run_id = 0, uuid.uuid4().hex
        layers = select_targets(model, cfg.sketch.targets)
        self.weights = Weights(layers)
        if self.weights.masters:
            raise ConfigError(f"method {cfg.method} trains fp32 weights; {next(iter(self.weights.masters))!r} is not fp32")
        model.requires_grad_(False)
        self.parameters = {n: p.requires_grad_(True) for n, p in self._choose(layers, cfg).items()}
        self.optimizer = self._make_optimizer()
        self._last: dict[str, Any] = {}

    def _choose(self, layers: dict[str, torch.nn.Linear], cfg: TrainConfig) -> dict[str, torch.nn.Parameter]:
        """What trains, by name."""
        return {n: m.weight for n, m in layers.items()}

    def _make_optimizer(self) -> torch.optim.Optimizer:
        c = self.cfg
        return torch.optim.AdamW(self.parameters.values(), c.lr, (c.beta1, c.beta2), c.eps, c.weight_decay)

    def trained(self) -> list[torch.Tensor]:
        return list(self.parameters.values())

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def observe(self, rollouts: Rollouts, pad_id: int) -> None:
        """Nothing to find."""

    def grad_norm(self) -> float:
        """Frobenius norm over the gradients of all that trains."""
        norms = [p.grad.norm() for p in self.parameters.values() if p.grad is not None]
        return float(torch.stack(norms).norm()) if norms else 0.0

    def propose(self) -> Any:
        """Checks only: AdamW computes its step when it takes it."""
        if missing := [n for n, p in self.parameters.items() if p.grad is None]:
            raise MissingSketchError(f"no gradient for {len(missing)} of {len(self.parameters)} targets ({', '.join(missing[:3])})")
        self._refuse({n: p.grad for n, p in self.parameters.items()}, "gradient")

    @torch.no_grad()
    def _refuse(self, tensors: dict[str, torch.Tensor], what: str) -> None:
        if bad := [n for n, t in tensors.items() if not float(torch.linalg.vector_norm(t, math.inf)) <= LARGEST]:  # NaN reaches the norm
            raise NonFiniteError(f"{what} of {', '.join(bad[:5])} holds NaN, infinity or a value above {LARGEST:g}: nothing was changed")

    def scale(self, update: Any, probe: ProbeBatch, mismatch: float) -> float:
        return 1.0

    def exact_kl(self, update: Any, probe: ProbeBatch, alpha: float) -> float | None:
        return None

    def apply(self, update: Any, alpha: float) -> Message:
        self._step(update, alpha)
        self.zero_grad()
        self.version += 1
        return self._message()

    def _step(self, update: Any, alpha: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr()
        self._last = {"lr": self._lr()}
        self.optimizer.step()

    def _lr(self) -> float:
        """Of the next update."""
        return dense_lr(self.cfg, self.version + 1)

    def _message(self) -> Message:
        return Message(full_state_bytes(self.weights, self.run_id, self.version), full=True)

    def metrics(self) -> dict[str, Any]:
        return {"q": None, "alpha": 1.0, "budget": None, "effective_budget": None, "predicted_kl": None} | self._last

    def state_dict(self) -> dict:
        return {"optimizer": self.optimizer.state_dict(), "version": self.version, "run_id": self.run_id}

    def load_state_dict(self, state: dict) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.version, self.run_id = state["version"], state["run_id"]


@dataclass(frozen=True, eq=False)
class DenseUpdate:
    """A proposed W ← W − α · factor of every target, factor [D, K] fp32. version: number of updates after it is applied."""

    version: int
    factors: dict[str, torch.Tensor]

    def basis(self, name: str, device: torch.device) -> None:
        """None: the factor is the whole change."""


def moments(g_DK: torch.Tensor, m_DK: torch.Tensor, v_DK: torch.Tensor, cfg: DenseConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Adam's first and second moment after gradient g; the inputs are unchanged. torch.optim.AdamW's operations, so its bits."""
    return torch.lerp(m_DK, g_DK, 1 - cfg.beta1), (v_DK * cfg.beta2).addcmul_(g_DK, g_DK, value=1 - cfg.beta2)


def adamw(m_DK: torch.Tensor, v_DK: torch.Tensor, W_DK: torch.Tensor, step: int, lr: float, cfg: DenseConfig) -> torch.Tensor:
    """What AdamW subtracts from W [D, K] at step t (from 1) with the new moments: lr (m̂ / (√v̂ + ε) + weight_decay W)."""
    root_DK = (v_DK.sqrt() / math.sqrt(1 - cfg.beta2**step)).add_(cfg.eps)
    change_DK = torch.div(m_DK, root_DK, out=root_DK).mul_(lr / (1 - cfg.beta1**step))
    return change_DK.add_(W_DK, alpha=lr * cfg.weight_decay) if cfg.weight_decay else change_DK


class ControlledDenseMethod(DenseMethod):
    """AdamW whose step, of the size that its learning rate gives, is scaled by α to the KL budget of `cfg.kl`, as LoGRA's is.

    α ≤ kl.alpha_max (3): with a learning rate far above a plain run's (1e-4, say) the budget decides the size of every step, and the
    learning rate's schedule nothing. Moments advance at `apply` and do not depend on α. The proposal is one more value a weight.
    """

    def __init__(self, model: torch.nn.Module, cfg: TrainConfig) -> None:
        super().__init__(model, cfg)
        self.controller, self.temperature = StepController(cfg.kl), cfg.kl.temperature
        self._pending: DenseUpdate | None = None
        for p in self.parameters.values():  # as torch.optim.AdamW keeps them
            self.optimizer.state[p] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    @torch.no_grad()
    def propose(self) -> DenseUpdate:
        """AdamW's step as a function of gradients, moments and weights. Changes nothing.

        Raises: MissingSketchError: a target saw no backward. NonFiniteError: a gradient or a change is not finite, or above 1e18.
        """
        super().propose()
        changes = {}
        for name, p in self.parameters.items():
            made = moments(p.grad, *self._moments(p), self.cfg)
            changes[name] = adamw(*made, p, self.version + 1, self._lr(), self.cfg)
        self._refuse(changes, "change")
        self._pending = DenseUpdate(self.version + 1, changes)
        return self._pending

    def _moments(self, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.optimizer.state[p]["exp_avg"], self.optimizer.state[p]["exp_avg_sq"]

    def scale(self, update: DenseUpdate, probe: ProbeBatch, mismatch: float) -> float:
        return self.controller.observe_and_scale(self.model, update, probe, mismatch)

    def exact_kl(self, update: DenseUpdate, probe: ProbeBatch, alpha: float) -> float:
        return exact_kl(self.model, update, probe, alpha, self.temperature)

    @torch.no_grad()
    def _step(self, update: DenseUpdate, alpha: float) -> None:
        if update is not self._pending:
            raise RuntimeError(f"not the update last proposed at version {self.version}; propose again")
        if not 0 <= alpha <= LARGEST:
            raise NonFiniteError(f"alpha = {alpha:g} is not finite or too large: nothing was changed")
        self._last = {"lr": self._lr()}
        for name, p in self.parameters.items():
            state = self.optimizer.state[p]
            state["exp_avg"], state["exp_avg_sq"] = moments(p.grad, *self._moments(p), self.cfg)
            state["step"] += 1
            p.sub_(update.factors[name], alpha=alpha)
        self._pending = None

    def metrics(self) -> dict[str, Any]:
        """q, alpha, budgets and predicted KL of the last update, and AdamW's own learning rate."""
        return self.controller.metrics() | self._last

    def state_dict(self) -> dict:
        return super().state_dict() | {"controller": self.controller.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.controller.load_state_dict(state["controller"])
        self._pending = None


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

    def stored(self, name: str) -> torch.Tensor:
        return self.master(name)

    def set_(self, name: str, W_DK: torch.Tensor) -> None:
        """Nothing: A and B come back with the method's state; the fingerprint that is compared afterwards tells whether they give W."""

    def merge_(self, name: str, U_DR: torch.Tensor, V_RK: torch.Tensor, update=None) -> None:
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

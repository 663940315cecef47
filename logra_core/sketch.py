"""Which weights train, and how their sketches S = G Aᵀ accumulate in backward without G (METHOD section 2).

Each target linear layer keeps its own forward. A forward hook passes its output through `_Tap`, the identity whose backward
adds gᵀ(x Aᵀ) to the gradient of a parameter `logra_sketch` of the module. Being an ordinary parameter's gradient, S follows
torch's own rules: microbatches add up, checkpointing counts once, `zero_grad` clears, `clip_grad_norm_` sees it.
The parameter's value is a zero without storage, and it stays out of `state_dict`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext

import torch
from torch import nn

from .config import ConfigError, SketchConfig
from .projection import PackedProjection, ProjectionSpec, canonical_name, make_projection

SKETCH = "logra_sketch"


class Target:
    """One selected layer: y = x Wᵀ with W [D, K], its current projection A [R, K] and its sketch S [D, R]."""

    def __init__(self, name: str, module: nn.Linear, spec: ProjectionSpec, storage: str = "fp32") -> None:
        self.name, self.module, self.spec, self.storage = name, module, spec, storage
        self._packed: PackedProjection | None = None
        self._drawn: dict[tuple, torch.Tensor] = {}
        self._handles: list = []

    @property
    def weight(self) -> nn.Parameter:
        return self.module.weight

    @property
    def width(self) -> int:
        return self.module.in_features

    @property
    def sketch(self) -> nn.Parameter:
        """Zero-stride parameter [D, R] fp32 whose `.grad` is S."""
        return getattr(self.module, SKETCH)

    def projection(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A [R, K] of the current draw on the weight's device; drawn on first use, or made anew at each as `storage` says."""
        device = self.weight.device
        if self.storage == "bits":
            return self.packed().unpack(dtype)
        if self.storage == "regenerate":
            return make_projection(self.spec, self.name, self.width, dtype=dtype, device=device)
        key = (dtype, device)
        if key not in self._drawn:
            self._drawn[key] = make_projection(self.spec, self.name, self.width, dtype=dtype, device=device)
        return self._drawn[key]

    def packed(self) -> PackedProjection:
        """The bits of A of the current draw on the weight's device; drawn on first use."""
        if self._packed is None or self._packed.bits.device != self.weight.device:
            self._packed = PackedProjection(self.spec, self.name, self.width, self.weight.device)
        return self._packed

    def redraw(self, spec: ProjectionSpec) -> None:
        """Use another draw from now on. Forwards made before it can no longer be differentiated (backward raises)."""
        if spec != self.spec:
            self.spec = spec
            self._drawn.clear()
            self._packed = None

    @torch.compiler.disable  # a graph break at each target: right under torch.compile, at the cost of some fusion
    def _on_forward(self, module: nn.Module, args: tuple, kwargs: dict, output: torch.Tensor) -> torch.Tensor | None:
        if not torch.is_grad_enabled():  # scoring, generation, probes: nothing to accumulate, nothing to pay
            return None
        x = args[0] if args else kwargs["input"]
        # Under autocast the layer computed in the output's dtype, so its gradient is of the input in that dtype.
        x_NK = x.detach().to(output.dtype).reshape(-1, self.width)
        return _Tap.apply(output, x_NK, self.projection(output.dtype), self.sketch, self)


class _Tap(torch.autograd.Function):
    """Identity on y; the gradient of `sketch` is gᵀ P with P = x Aᵀ [N, R] saved instead of x [N, K]."""

    @staticmethod
    def forward(y, x_NK, A_RK, sketch_DR, target):
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx, inputs, output):
        y, x_NK, A_RK, sketch_DR, target = inputs
        ctx.save_for_backward(x_NK @ A_RK.T)
        ctx.target, ctx.spec = target, target.spec

    @staticmethod
    def backward(ctx, g):
        if ctx.spec != ctx.target.spec:
            raise RuntimeError(
                f"backward of {ctx.target.name!r} through a forward made with projection draw {ctx.spec.draw}, but the current "
                f"draw is {ctx.target.spec.draw}: run the backward before the update is applied"
            )
        S_DR = None
        if ctx.needs_input_grad[3]:
            (P_NR,) = ctx.saved_tensors
            with torch.autocast(g.device.type, enabled=False) if torch.is_autocast_enabled(g.device.type) else nullcontext():
                S_DR = _product_fp32(g.reshape(-1, g.shape[-1]).T, P_NR)
        return g, None, None, S_DR, None

    @staticmethod
    def jvp(ctx, y_tangent, *_):
        return y_tangent.view_as(y_tangent)


def _product_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b accumulated and returned in fp32 whatever the inputs' dtype."""
    if a.dtype == torch.float32 == b.dtype:
        return a @ b
    if a.is_cuda and a.dtype == b.dtype:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def select_targets(model: nn.Module, targets: Iterable[str]) -> dict[str, nn.Linear]:
    """Canonical name -> layer for every module whose dotted name ends in one of `targets`, in model order.

    Raises:
        ConfigError: an entry matches nothing, a match is no `nn.Linear` with a floating-point weight, or a matched weight is
            shared with another module (a tied head).
    """
    targets = tuple(targets)
    modules = [(canonical_name(n), m) for n, m in model.named_modules(remove_duplicate=False)]
    owners = Counter(id(p) for m in dict.fromkeys(m for _, m in modules) for p in m._parameters.values() if p is not None)
    linear = sorted({n.rpartition(".")[2] for n, m in modules if isinstance(m, nn.Linear)})
    chosen: dict[str, nn.Linear] = {}
    problems = []
    for entry in targets:
        matches = [(n, m) for n, m in modules if n == entry or n.endswith("." + entry)]
        if not matches:
            problems.append(f"{entry!r} matches no module (linear layers here end in: {', '.join(linear) or 'none'})")
        for name, module in matches:
            if not isinstance(module, nn.Linear) or not module.weight.is_floating_point():
                problems.append(f"{name!r} is {type(module).__name__}, not a linear layer with a floating-point weight")
            elif owners[id(module.weight)] > 1:
                problems.append(f"the weight of {name!r} is tied to another module; an update would change both")
            else:
                chosen[name] = module
    if problems:
        raise ConfigError("SketchConfig.targets: " + "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if problems[5:] else ""))
    order = {n: i for i, (n, _) in enumerate(modules)}
    return dict(sorted(chosen.items(), key=lambda item: order[item[0]]))


def attach(model: nn.Module, config: SketchConfig) -> dict[str, Target]:
    """Freeze the model, select the targets and start accumulating their sketches. Undo with `detach`.

    Returns:
        canonical name -> Target, in model order.
    Raises:
        ConfigError: see `select_targets`; or the rank exceeds a layer's inputs for orthonormal rows.
        RuntimeError: the model is attached already or compiled already (compile after attaching).
    """
    for name, module in model.named_modules():
        if hasattr(module, SKETCH):
            raise RuntimeError(f"{canonical_name(name)!r} has a sketch already: detach the model first")
        if isinstance(module, torch._dynamo.OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None:
            raise RuntimeError(f"{name or 'the model'!r} is compiled: a compiled graph ignores later hooks; attach first, then compile")
    spec = ProjectionSpec(config.seed, 0, config.rank, config.distribution)
    targets = {n: Target(n, m, spec, config.projection_storage) for n, m in select_targets(model, config.targets).items()}
    if config.distribution == "orthonormal" and (small := [n for n, t in targets.items() if t.width < config.rank]):
        raise ConfigError(f"SketchConfig.rank = {config.rank}: orthonormal rows need rank <= inputs, but {small[0]!r} has {targets[small[0]].width}")
    model._logra_requires_grad = {n: p.requires_grad for n, p in model.named_parameters()}
    model.requires_grad_(False)
    for target in targets.values():
        _add_sketch(target, config.rank)
    model._logra_targets = targets
    model._logra_embedding_hook = _require_grad_of_embeddings(model)
    return targets


def detach(model: nn.Module) -> None:
    """Remove hooks and sketches; parameters require grad as they did before `attach`. Weights stay as they are."""
    for target in getattr(model, "_logra_targets", {}).values():
        for handle in target._handles:
            handle.remove()
        delattr(target.module, SKETCH)
    if (hook := getattr(model, "_logra_embedding_hook", None)) is not None:
        hook.remove()
    before = getattr(model, "_logra_requires_grad", {})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(before.get(name, parameter.requires_grad))
    for attribute in ("_logra_targets", "_logra_embedding_hook", "_logra_requires_grad"):
        if hasattr(model, attribute):
            delattr(model, attribute)


class AtHand(Mapping):
    """name -> A [R, K] fp32 of the targets' current draw as they keep it: stored, or unpacked at each look-up; regenerated ones are left out.

    Holds what was drawn, so that it stays the same after the targets are redrawn.
    """

    def __init__(self, targets: dict[str, Target]) -> None:
        kept = {"fp32": Target.projection, "bits": Target.packed}
        self._kept = {n: kept[t.storage](t) for n, t in targets.items() if t.storage in kept}

    def __getitem__(self, name: str) -> torch.Tensor:
        A_RK = self._kept[name]
        return A_RK.unpack() if isinstance(A_RK, PackedProjection) else A_RK

    def __iter__(self):
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


def target_table(targets: dict[str, Target]) -> str:
    """What was chosen, a line a kind of layer: name, how many, D x K, weight and sketch parameters."""
    kinds: dict[tuple, list[Target]] = {}
    for target in targets.values():
        key = (target.name.rpartition(".")[2], target.module.out_features, target.width)
        kinds.setdefault(key, []).append(target)
    rows = [f"{'layer':<12}{'count':>6}{'D x K':>16}{'weights':>15}{'sketch':>13}"]
    for (kind, d, k), members in kinds.items():
        count, rank = len(members), members[0].spec.rank
        rows.append(f"{kind:<12}{count:>6}{f'{d} x {k}':>16}{count * d * k:>15,}{count * d * rank:>13,}")
    weights = sum(t.module.out_features * t.width for t in targets.values())
    sketch = sum(t.module.out_features * t.spec.rank for t in targets.values())
    rows.append(f"{'all':<12}{len(targets):>6}{'':>16}{weights:>15,}{sketch:>13,}")
    return "\n".join(rows)


def _add_sketch(target: Target, rank: int) -> None:
    module = target.module
    value = torch.zeros((), dtype=torch.float32, device=module.weight.device).expand(module.out_features, rank)
    module.register_parameter(SKETCH, nn.Parameter(value))
    target._handles = [
        module.register_forward_hook(target._on_forward, with_kwargs=True),
        module.register_state_dict_post_hook(_drop_key),
        module.register_load_state_dict_post_hook(_not_missing),
    ]


def _drop_key(module, state_dict, prefix, local_metadata) -> None:
    state_dict.pop(prefix + SKETCH, None)


def _not_missing(module, incompatible_keys) -> None:
    missing = incompatible_keys.missing_keys
    missing[:] = [k for k in missing if k.rpartition(".")[2] != SKETCH]


def _require_grad_of_embeddings(model: nn.Module):
    """Reentrant checkpointing runs no backward unless an input requires grad, and every weight is frozen."""
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    if embeddings is None:
        return None

    def require_grad(module, args, output):
        if torch.is_grad_enabled() and not output.requires_grad:
            output.requires_grad_(True)

    return embeddings.register_forward_hook(require_grad)

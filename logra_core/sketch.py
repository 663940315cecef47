"""Which weights train, and how their sketches S = G Aᵀ accumulate in backward without G (METHOD section 2).

Each target linear layer keeps its own forward. A forward hook passes its output through `_Tap`, the identity whose backward
adds gᵀ(x Aᵀ) to the gradient of a parameter `logra_sketch` of the module. Being an ordinary parameter's gradient, S follows
torch's own rules: microbatches add up, checkpointing counts once, `zero_grad` clears, `clip_grad_norm_` sees it.
The parameter's value is a zero without storage, and it stays out of `state_dict`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from .projection import NEEDS_WIDTH, PackedProjection, ProjectionSpec, canonical_name, input_name, make_projection
from .settings import ConfigError, SketchConfig
from .variants.allocation import layer_ranks

SKETCH = "logra_sketch"
PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # dtypes of weights that a layer multiplies with as they are
BITS = "bits"  # marks the packed A among what is drawn


class Target:
    """One selected layer: y = x Wᵀ with W [D, K], its current projection A [R, K] and its sketch S [D, R].

    finder: takes A from what the layer's input was seen to be (activation.py), else None. products: P = x Aᵀ of the inputs x that are
    alive now, shared by the layers that read them with the same A, else None.
    """

    def __init__(self, name: str, module: nn.Linear, spec: ProjectionSpec, storage: str = "fp32") -> None:
        self.name, self.module, self.spec, self.storage = name, module, spec, storage
        self.forgotten = 0  # draws of `spec` that were thrown away before an update
        self.finder = None
        self.products: WeakTensorKeyDictionary | None = None
        self.paused = False
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
            if self.finder is not None and self.finder.tokens:
                self._drawn[key] = self.finder.rows().to(device=device, dtype=dtype)
            else:
                self._drawn[key] = make_projection(self.spec, self.name, self.width, dtype=dtype, device=device)
        return self._drawn[key]

    def packed(self) -> PackedProjection:
        """The bits of A of the current draw on the weight's device; drawn on first use."""
        key = (BITS, self.weight.device)
        if key not in self._drawn:
            self._drawn[key] = PackedProjection(self.spec, self.name, self.width, self.weight.device)
        return self._drawn[key]

    def draw(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
        """All random matrices of the current draw; held until the next one where `storage` is fp32."""
        return (self.projection(dtype),)

    def draw_shapes(self, dtype: torch.dtype = torch.float32) -> dict[tuple, tuple[int, int]]:
        """Key in `_drawn` -> shape of each of them."""
        return {(dtype, self.weight.device): (self.spec.rank, self.width)}

    @property
    def by_value(self) -> bool:
        """Whether the right factor of the next update is no function of a seed, so that it must be sent."""
        return self.finder is not None and self.finder.tokens > 0

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """S [D, R] and V [R, K], fp32, of what has accumulated: the gradient is seen as S V."""
        return self.sketch.grad, self.projection()

    def sketch_shape(self) -> tuple[int, ...]:
        """Of `sketch` and its gradient."""
        return self.module.out_features, self.spec.rank

    def redraw(self, spec: ProjectionSpec) -> None:
        """Use another draw from now on, at the rank of this layer. Forwards made before it can no longer be differentiated (backward raises)."""
        spec = dataclasses.replace(spec, rank=self.spec.rank)
        if spec != self.spec:
            self.spec = spec
            self._drawn.clear()
            if self.finder is not None:
                self.finder.restart(spec)

    @property
    def found(self) -> bool:
        """Whether an A was asked of what this layer's input was seen to be."""
        return self.finder is not None and (bool(self._drawn) or self.finder.used)

    def forget(self) -> None:
        """Throw away what was seen, and the A of it, so that the next batch can be scored."""
        self._drawn.clear()
        self.finder.restart(self.spec, anew=True)
        self.forgotten += 1

    @torch.compiler.disable  # a graph break at each target: right under torch.compile, at the cost of some fusion
    def _on_forward(self, module: nn.Module, args: tuple, kwargs: dict, output: torch.Tensor) -> torch.Tensor | None:
        if self.paused or not torch.is_grad_enabled():  # scoring, generation, probes: nothing to accumulate, nothing to pay
            return None
        return self._tap(output, args[0] if args else kwargs["input"])

    def _tap(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return _Tap.apply(output, self._product(x, output.dtype), self.sketch, self)

    @torch.no_grad()
    def _product(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """P = x Aᵀ [N, R]. Under autocast the layer computed in the output's dtype, so its gradient is of the input in that dtype."""
        shared = self.products is not None
        if shared and (known := self.products.get(x)) is not None and known[0] == (x._version, dtype, self.spec):
            return known[1]
        P_NR = x.detach().to(dtype).reshape(-1, self.width) @ self.projection(dtype).T
        if shared:
            self.products[x] = (x._version, dtype, self.spec), P_NR
        return P_NR


class _Tap(torch.autograd.Function):
    """Identity on y; the gradient of `sketch` is gᵀ P with P = x Aᵀ [N, R] saved instead of x [N, K]."""

    @staticmethod
    def forward(y, P_NR, sketch_DR, target):
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx, inputs, output):
        y, P_NR, sketch_DR, target = inputs
        ctx.save_for_backward(P_NR)
        ctx.target, ctx.spec, ctx.forgotten = target, target.spec, target.forgotten

    @staticmethod
    def backward(ctx, g):
        refuse_old_draw(ctx)
        S_DR = None
        if ctx.needs_input_grad[2]:
            (P_NR,) = ctx.saved_tensors
            with plain_dtypes(g.device):
                S_DR = product_fp32(g.reshape(-1, g.shape[-1]).T, P_NR)
        return g, None, S_DR, None

    @staticmethod
    def jvp(ctx, y_tangent, *_):
        return y_tangent.view_as(y_tangent)


def refuse_old_draw(ctx) -> None:
    """RuntimeError in a backward whose forward used another projection than the current one."""
    if (ctx.spec, ctx.forgotten) != (ctx.target.spec, ctx.target.forgotten):
        raise RuntimeError(
            f"backward of {ctx.target.name!r} through a forward made with projection draw {ctx.spec.draw}, but the current "
            f"draw is {ctx.target.spec.draw}, or another by zero_grad: run the backward before the update is applied"
        )


def plain_dtypes(device: torch.device):
    """Autocast off."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def product_fp32(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b accumulated and returned in fp32 whatever the inputs' dtype; into `out` if given."""
    if a.is_cuda and a.dtype == b.dtype != torch.float32:
        made = torch.mm(a, b, out_dtype=torch.float32)
        return made if out is None else out.copy_(made)
    return torch.mm(a.float(), b.float(), out=out)


def select_targets(model: nn.Module, targets: Iterable[str]) -> dict[str, nn.Linear]:
    """Canonical name -> layer for every module whose dotted name ends in one of `targets`, in model order. A layer with several names has its first.

    Raises:
        ConfigError: an entry matches nothing, a match is no `nn.Linear` with a plain floating-point weight (quantised and parametrised ones
            compute with something else), two layers have one name, or a matched weight is shared with another module (a tied head).
    """
    targets = tuple(targets)
    modules = [(canonical_name(n), m) for n, m in model.named_modules(remove_duplicate=False)]
    first = {id(m): n for n, m in reversed(modules)}
    owners = Counter(id(p) for m in dict.fromkeys(m for _, m in modules) for p in m._parameters.values() if p is not None)
    linear = sorted({n.rpartition(".")[2] for n, m in modules if isinstance(m, nn.Linear)})
    chosen: dict[str, nn.Linear] = {}
    problems = []
    for entry in targets:
        matches = [(n, m) for n, m in modules if n == entry or n.endswith("." + entry)]
        if not matches:
            problems.append(f"{entry!r} matches no module (linear layers here end in: {', '.join(linear) or 'none'})")
        for name, module in matches:
            if not isinstance(module, nn.Linear) or module._parameters.get("weight") is None or module.weight.dtype not in PLAIN:
                problems.append(f"{name!r} is {type(module).__name__}, not a linear layer with a plain floating-point weight")
            elif chosen.get(first[id(module)], module) is not module:
                problems.append(f"two layers are called {name!r}")
            elif owners[id(module.weight)] > 1:
                problems.append(f"the weight of {name!r} is tied to another module; an update would change both")
            else:
                chosen[first[id(module)]] = module
    if problems:
        raise ConfigError("SketchConfig.targets: " + "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if problems[5:] else ""))
    order = {n: i for i, (n, _) in enumerate(modules)}
    return dict(sorted(chosen.items(), key=lambda item: order[item[0]]))


def attach(model: nn.Module, config: SketchConfig, wire_dtype: torch.dtype = torch.bfloat16) -> dict[str, Target]:
    """Freeze the model, select the targets and start accumulating their sketches. Undo with `detach`.

    wire_dtype: to which an A that must be sent is rounded as soon as it is found.
    Returns:
        canonical name -> Target, in model order.
    Raises:
        ConfigError: see `select_targets`; the rank exceeds a layer's inputs where the rows of A are orthonormal; or the model is wrapped in
            DDP or DataParallel, which know no sketches.
        RuntimeError: the model is attached already or compiled already (compile after attaching).
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise ConfigError(f"{type(module).__name__} would not add up sketches: several processes train with ShardedLoGRA")
        if hasattr(module, SKETCH):
            raise RuntimeError(f"{canonical_name(name)!r} has a sketch already: detach the model first")
        if isinstance(module, torch._dynamo.OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None:
            raise RuntimeError(f"{name or 'the model'!r} is compiled: a compiled graph ignores later hooks; attach first, then compile")
    layers = select_targets(model, config.targets)
    ranks = layer_ranks(config, layers)
    specs = {n: ProjectionSpec(config.seed, 0, rank, config.distribution, config.share_inputs) for n, rank in ranks.items()}
    if config.kind == "two_sided":
        from .variants.two_sided import TwoSidedTarget  # it builds on this file

        targets = {n: TwoSidedTarget(n, m, specs[n], dataclasses.replace(config, rank=ranks[n])) for n, m in layers.items()}
    else:
        if config.distribution in NEEDS_WIDTH or config.projection == "activation":
            if small := [n for n, m in layers.items() if m.in_features < ranks[n] + config.drop_leading]:
                width, more = layers[small[0]].in_features, f" (and drop_leading {config.drop_leading} more)" if config.drop_leading else ""
                raise ConfigError(f"SketchConfig.rank = {ranks[small[0]]}{more}: orthonormal rows need rank <= inputs, but {small[0]!r} has {width}")
        targets = {n: Target(n, m, specs[n], config.projection_storage) for n, m in layers.items()}
    for members in _readers(targets, config.share_inputs):
        if len({t.spec.rank for t in members}) > 1:
            raise ConfigError(f"SketchConfig.ranks: {' and '.join(t.name for t in members)} share one input, so they need the same rank")
        if config.share_inputs:
            members[0].products = WeakTensorKeyDictionary()
        if config.projection == "activation":
            from .variants.activation import RangeFinder

            members[0].finder = RangeFinder(members[0].spec, members[0].name, members[0].width, config.complement, wire_dtype, config.drop_leading)
        for target in members:
            target.products, target.finder, target._drawn = members[0].products, members[0].finder, members[0]._drawn
    model._logra_requires_grad = {n: p.requires_grad for n, p in model.named_parameters()}
    model.requires_grad_(False)
    for target in targets.values():
        _add_sketch(target)
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


@contextmanager
def paused(model: nn.Module) -> Iterator[None]:
    """Forward passes inside are not sketched, though they have gradients."""
    targets = [t for m in model.modules() for t in getattr(m, "_logra_targets", {}).values()]
    try:
        for target in targets:
            target.paused = True
        yield
    finally:
        for target in targets:
            target.paused = False


def _readers(targets: dict[str, Target], share: bool) -> list[list[Target]]:
    """Targets in groups that read the same input (q, k, v; gate, up); each by itself without sharing."""
    groups: dict[tuple, list[Target]] = {}
    for target in targets.values():
        groups.setdefault((input_name(target.name) if share else target.name, target.width), []).append(target)
    return list(groups.values())


def _add_sketch(target: Target) -> None:
    module = target.module
    value = torch.zeros((), dtype=torch.float32, device=module.weight.device).expand(target.sketch_shape())
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


def target_table(targets: dict[str, Target]) -> str:
    """What was chosen, a line a kind of layer: name, how many, D x K, weight and sketch parameters."""
    kinds: dict[tuple, list[Target]] = {}
    for target in targets.values():
        key = (target.name.rpartition(".")[2], target.module.out_features, target.width)
        kinds.setdefault(key, []).append(target)
    rows = [f"{'layer':<12}{'count':>6}{'D x K':>16}{'weights':>15}{'sketch':>13}"]
    for (kind, d, k), members in kinds.items():
        count = len(members)
        rows.append(f"{kind:<12}{count:>6}{f'{d} x {k}':>16}{count * d * k:>15,}{sum(t.sketch.numel() for t in members):>13,}")
    weights = sum(t.module.out_features * t.width for t in targets.values())
    sketch = sum(t.sketch.numel() for t in targets.values())
    rows.append(f"{'all':<12}{len(targets):>6}{'':>16}{weights:>15,}{sketch:>13,}")
    return "\n".join(rows)

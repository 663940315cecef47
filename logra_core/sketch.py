"""Which weights train, and how their sketches S = G Aᵀ accumulate in backward without G (METHOD section 2).

Each target linear layer keeps its own forward. A forward hook passes its output through `_Tap`, an identity whose backward gives what the layer's
`LayerSketch` makes of g and of what it kept of x to the parameter `logra_sketch` of the module. Being an ordinary parameter's gradient, it follows torch's
own rules: microbatches add up, checkpointing counts once, `zero_grad` clears, `clip_grad_norm_` sees it. The parameter's value is a zero without storage,
and it stays out of `state_dict`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from .projection import Projection, ProjectionSpec, canonical_name
from .settings import ConfigError, SketchConfig

SKETCH = "logra_sketch"
PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # dtypes of weights that a layer multiplies with as they are


class LayerSketch:
    """What one layer W [D, K] accumulates, and the factors that its gradient is seen through: the paper's S = G Aᵀ [D, R] and A.

    A layer keeps P = x Aᵀ [N, R] instead of x [N, K] and adds gᵀ P; the gradient is then seen as S V with V = A. Another sketch is a subclass, given to
    `attach` by a sketcher: it says what is kept, what is added, of which shape, and what S and V are.

    name: canonical name of the layer. spec: of the first draw. drawn_for: the layer whose A it is, by default its own.
    """

    by_value = False  # whether V of the next update must be sent, being no function of a seed
    keeps = True  # whether `matrix` keeps what it makes until the next draw

    def __init__(self, name: str, module: nn.Linear, spec: ProjectionSpec, drawn_for: str | None = None) -> None:
        self.name, self.module = name, module
        self.projection = Projection(spec, drawn_for or name, module.in_features)
        self._made: dict[tuple, torch.Tensor] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what accumulates, fp32."""
        return self.module.out_features, self.projection.spec.rank

    @property
    def draw(self) -> object:
        """What tells this draw from every other: backward of a forward that was made with another one is refused."""
        return self.projection

    def matrix(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A [R, K] on the weight's device; made on first use and kept until the next draw."""
        key = dtype, self.module.weight.device
        if key not in self._made:
            self._made[key] = self.projection.matrix(*key)
        return self._made[key]

    @torch.no_grad()
    def keep(self, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """What forward keeps of the layer's input x [..., K] for `add`. dtype: of the layer's output (under autocast not that of x)."""
        x_NK = x.detach().to(dtype).reshape(-1, x.shape[-1])
        return (x_NK @ self.matrix(dtype).T,)

    def add(self, g_ND: torch.Tensor, *kept: torch.Tensor) -> torch.Tensor:
        """What one backward adds, fp32 of `shape`. g_ND: gradient of the layer's output."""
        (P_NR,) = kept
        return product_fp32(g_ND.T, P_NR)

    def factors(self, accumulated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """S [D, R] and V [R, K], fp32, of what has accumulated: the gradient is seen as S V."""
        return accumulated, self.matrix()

    def redraw(self, number: int) -> None:
        """Use draw `number` from now on; the matrices of the old one are let go."""
        if number != self.projection.spec.draw:
            spec = dataclasses.replace(self.projection.spec, draw=number)
            self.projection = Projection(spec, self.projection.name, self.projection.width)
            self._made.clear()

    def clear(self) -> None:
        """What has accumulated was dropped (`zero_grad`)."""

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_made": {}}  # made again where it is needed


Sketcher = Callable[[dict[str, nn.Linear], SketchConfig, torch.dtype], dict[str, LayerSketch]]


def one_sided(layers: dict[str, nn.Linear], config: SketchConfig, wire_dtype: torch.dtype = torch.bfloat16) -> dict[str, LayerSketch]:
    """The paper's sketch for every layer, by canonical name; a sketcher is a function like this one."""
    spec = ProjectionSpec(config.seed, config.draw(0)[0], config.rank, config.distribution)
    return {name: LayerSketch(name, module, spec) for name, module in layers.items()}


class Target:
    """One selected layer: y = x Wᵀ with W [D, K], and how it is sketched."""

    def __init__(self, name: str, module: nn.Linear, how: LayerSketch) -> None:
        self.name, self.module, self.how = name, module, how
        self._handle = None

    @property
    def weight(self) -> nn.Parameter:
        return self.module.weight

    @property
    def width(self) -> int:
        """K."""
        return self.module.in_features

    @property
    def sketch(self) -> nn.Parameter:
        """Parameter without storage whose `.grad` accumulates: S [D, R] fp32, or what another sketch has."""
        return getattr(self.module, SKETCH)

    @property
    def spec(self) -> ProjectionSpec:
        return self.how.projection.spec

    def projection(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A [R, K] of the current draw on the weight's device."""
        return self.how.matrix(dtype)

    def start(self) -> None:
        """Sketch forwards from now on."""
        self._handle = self.module.register_forward_hook(self._on_forward, with_kwargs=True)

    def stop(self) -> None:
        """Leave forwards alone."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None

    @torch.compiler.disable  # a graph break at each target: right under torch.compile, at the cost of some fusion
    def _on_forward(self, module: nn.Module, args: tuple, kwargs: dict, output: torch.Tensor) -> None:
        if not torch.is_grad_enabled():  # generation, probes: nothing to accumulate, nothing to pay
            return
        if self.sketch.dtype != torch.float32:
            raise RuntimeError(f"{self.name!r} was cast to {self.sketch.dtype} after its sketch was attached: cast the model first, then attach")
        kept = self.how.keep(args[0] if args else kwargs["input"], output.dtype)
        # Tapped in place, since a view made by a Function could not be changed in place later, as F.relu_ does. A linear layer with a bias
        # returns a view of its product; of that, so that backward need not copy the gradient for the view.
        base = output._base if output._base is not None and output._base.numel() == output.numel() else output
        _Tap.apply(base, self.sketch, self, *kept)


class _Tap(torch.autograd.Function):
    """Identity on y, in place; the gradient of `sketch` is what `LayerSketch.add` makes of g and of what was kept."""

    @staticmethod
    def forward(y, sketch, target, *kept):
        return y

    @staticmethod
    def setup_context(ctx, inputs, output):
        y, sketch, target, *kept = inputs
        ctx.mark_dirty(y)
        ctx.save_for_backward(*kept)
        ctx.target, ctx.draw, ctx.kept = target, target.how.draw, len(kept)

    @staticmethod
    def backward(ctx, g):
        if ctx.draw is not ctx.target.how.draw:
            raise RuntimeError(
                f"backward of {ctx.target.name!r} through a forward made with another projection draw than the current one "
                f"({ctx.target.spec.draw}): run the backward before the update is applied, or dropped by zero_grad"
            )
        added = None
        if ctx.needs_input_grad[1]:
            with torch.no_grad(), autocast_off(g.device):
                added = ctx.target.how.add(g.reshape(-1, g.shape[-1]), *ctx.saved_tensors)
        return g, added, None, *[None] * ctx.kept

    @staticmethod
    def jvp(ctx, y_tangent, *_):
        return y_tangent


class _SketchParameter(nn.Parameter):
    """fp32 zero of a shape, without storage for it; copies and pickles stay so."""

    def __new__(cls, shape: tuple[int, ...], device: torch.device | str, requires_grad: bool = True) -> _SketchParameter:
        value = torch.zeros((), dtype=torch.float32, device=device).expand(shape)
        return torch.Tensor._make_subclass(cls, value, requires_grad)

    def __deepcopy__(self, memo: dict) -> _SketchParameter:
        return memo.setdefault(id(self), type(self)(tuple(self.shape), self.device, self.requires_grad))

    def __reduce_ex__(self, protocol: int):
        return type(self), (tuple(self.shape), self.device, self.requires_grad)


def autocast_off(device: torch.device) -> AbstractContextManager:
    """Products inside are in the dtypes of their operands."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def product_fp32(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b accumulated and returned in fp32 whatever the inputs' dtype; into `out` if given."""
    if a.is_cuda and a.dtype == b.dtype != torch.float32:
        made = torch.mm(a, b, out_dtype=torch.float32)
        return made if out is None else out.copy_(made)
    return torch.mm(a.float(), b.float(), out=out)


def select_targets(model: nn.Module, targets: Iterable[str]) -> dict[str, nn.Linear]:
    """Canonical name -> layer for every module whose dotted name ends in one of `targets`, in model order. A layer with several names has its first.

    Raises ConfigError: an entry matches nothing, a match is no `nn.Linear` with a plain floating-point weight (quantised and parametrised ones compute with
    something else), two layers have one name, or a matched weight shares its memory with another parameter (a tied head).
    """
    targets = tuple(targets)
    modules = [(canonical_name(n), m) for n, m in model.named_modules(remove_duplicate=False)]
    first = {id(m): n for n, m in reversed(modules)}
    tied = _tied(model)
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
            elif id(module) in tied:
                problems.append(f"the weight of {name!r} is tied to another module; an update would change both")
            else:
                chosen[first[id(module)]] = module
    if problems:
        raise ConfigError("SketchConfig.targets: " + "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if problems[5:] else ""))
    order = {n: i for i, (n, _) in enumerate(modules)}
    return dict(sorted(chosen.items(), key=lambda item: order[item[0]]))


def _tied(model: nn.Module) -> set[int]:
    """ids of the modules whose `weight` is another module's parameter too, or overlaps one in memory."""
    held = [(m, k, p) for m in model.modules() for k, p in m._parameters.items() if p is not None and k != SKETCH]
    places: dict[object, list[tuple]] = {}
    for module, key, p in held:
        local = getattr(p, "_local_tensor", p)  # a DTensor's own rows
        storage = local.untyped_storage()._cdata if local.numel() and local.device.type != "meta" else id(p)
        start = local.storage_offset() * local.element_size()
        places.setdefault(storage, []).append((start, start + local.numel() * local.element_size(), id(module), key))
    return {m for spans in places.values() for i, (a, b, m, key) in enumerate(spans) if key == "weight"
            for j, (c, d, _, _) in enumerate(spans) if i != j and c < b and a < d}  # fmt: skip


def attach(model: nn.Module, config: SketchConfig, wire_dtype: torch.dtype = torch.bfloat16, sketcher: Sketcher | None = None) -> dict[str, Target]:
    """Freeze the model, select the targets and start accumulating their sketches. Undo with `detach`.

    wire_dtype: to which a V that must be sent by value is rounded. sketcher: makes the sketches; by default `config.sketcher`, if it has one, else
    `one_sided`. Returns canonical name -> Target, in model order. Raises ConfigError: see `select_targets` and `Projection`; or the model is wrapped in DDP
    or DataParallel, which know no sketches. RuntimeError: the model is attached already or compiled already (compile after attaching).
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise ConfigError(f"{type(module).__name__} would not add up sketches: several processes train with ShardedLoGRA")
        if hasattr(module, SKETCH):
            raise RuntimeError(f"{canonical_name(name)!r} has a sketch already: detach the model first")
        if isinstance(module, torch._dynamo.OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None:
            raise RuntimeError(f"{name or 'the model'!r} is compiled: a compiled graph ignores later hooks; attach first, then compile")
    layers = select_targets(model, config.targets)
    made = (sketcher or getattr(config, "sketcher", None) or one_sided)(layers, config, wire_dtype)
    targets = {n: Target(n, layer, made[n]) for n, layer in layers.items()}
    model._logra_requires_grad = {n: p.requires_grad for n, p in model.named_parameters()}
    model.requires_grad_(False)
    for target in targets.values():
        target.module.register_parameter(SKETCH, _SketchParameter(target.how.shape, target.weight.device))
        target.start()
    model._logra_targets = targets
    model._logra_handles = [t.module.register_state_dict_post_hook(_drop_key) for t in targets.values()]
    model._logra_handles += [t.module.register_load_state_dict_post_hook(_not_missing) for t in targets.values()]
    model._logra_handles += _require_grad_of_embeddings(model)
    return targets


def detach(model: nn.Module) -> None:
    """Remove hooks and sketches; parameters require grad as they did before `attach`. Weights stay as they are."""
    for target in getattr(model, "_logra_targets", {}).values():
        target.stop()
        delattr(target.module, SKETCH)
    for handle in getattr(model, "_logra_handles", ()):
        handle.remove()
    before = getattr(model, "_logra_requires_grad", {})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(before.get(name, parameter.requires_grad))
    for attribute in ("_logra_targets", "_logra_handles", "_logra_requires_grad"):
        if hasattr(model, attribute):
            delattr(model, attribute)


def _drop_key(module, state_dict, prefix, local_metadata) -> None:
    state_dict.pop(prefix + SKETCH, None)


def _not_missing(module, incompatible_keys) -> None:
    missing = incompatible_keys.missing_keys
    missing[:] = [k for k in missing if k.rpartition(".")[2] != SKETCH]


def _require_grad_of_embeddings(model: nn.Module) -> list:
    """Reentrant checkpointing runs no backward unless an input requires grad, and every weight is frozen."""
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    return [] if embeddings is None else [embeddings.register_forward_hook(_require_grad)]


def _require_grad(module, args, output) -> None:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)

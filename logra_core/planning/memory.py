"""Where the bytes of a training step are: every live tensor storage, counted by category, on any device, without an allocator.

A dispatch mode sees each new storage and drops it when it is freed; categories come from who holds it at the time of the report.
`measure_step` counts one step of a method on real tensors, `simulate_step` the same step of a model of any size on fake ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from ..optim import LoGRA
from ..rl.methods import compact, galore_adamw
from ..rl.ppo import token_logprobs
from ..rl.settings import GaLoreConfig
from ..settings import ConfigError
from ..sketch import select_targets
from ..variants.inputs import SourcedSketch
from ..variants.settings import OptimConfig, SketchConfig
from ..variants.two_sided import LEFT, TwoSidedSketch
from .shapes import build, model_config


@dataclass
class Peak:
    """Bytes of live tensors above what was alive at the start: the largest value, and what is left now."""

    peak: int = 0
    live: int = 0
    shapes: set[tuple[int, ...]] = field(default_factory=set)  # of every tensor that got a new storage


class TrackMemory(TorchDispatchMode):
    """`with TrackMemory() as peak:` counts storages that are made inside, PyTorch operations only.

    Scratch space inside one kernel is not seen. peak.shapes holds the shape of each newly allocated tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.result = Peak()
        self._seen: set[int] = set()

    def __enter__(self) -> Peak:
        super().__enter__()
        return self.result

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)}
        for tensor in tree_flatten(out)[0]:
            if not isinstance(tensor, torch.Tensor) or tensor.untyped_storage()._cdata in given | self._seen:
                continue
            storage = tensor.untyped_storage()
            self._seen.add(storage._cdata)
            self.result.shapes.add(tuple(tensor.shape))
            self.result.live += storage.nbytes()
            self.result.peak = max(self.result.peak, self.result.live)
            weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return out

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.result.live -= size


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None and t.numel()}
    return sum(storages.values())


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state tensors."""
    return storage_bytes(t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor))


class SavedActivations:
    """`with SavedActivations(model) as saved:` around a forward; `saved.bytes` is what autograd keeps for backward, weights left out."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._storages: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)

    @property
    def bytes(self) -> int:
        return sum(self._storages.values())

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    def __enter__(self) -> SavedActivations:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._hooks.__exit__(*error)


METHODS = ("dense", "lora", "logra")  # those of notebook 06
SKETCHES = {"logra": {}, "two_sided": {"kind": "two_sided"}}  # methods that sketch, and their switches of SketchConfig
COUNTED = tuple(dict.fromkeys((*METHODS, *SKETCHES, "galore")))


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one training step by category.

    weights: all parameters in the compute dtype, and nothing else. masters: fp32 copies of the trained weights, where those are not
    fp32 themselves. gradients: of what trains (G, S, or those of LoRA's factors). projections: A, LoRA's factors, or GaLore's
    singular vectors. optimizer: its state. layers: what the decoder layers keep for backward; head: what the logits and the loss keep.
    peak_head, peak_layers: the largest total, all categories included, until the head's backward is done and afterwards;
    peak_forward: before backward. scratch: largest temporary of the optimizer's step. None: not measured.
    """

    weights: int
    masters: int
    gradients: int
    projections: int
    optimizer: int
    layers: int
    head: int
    peak_head: int | None = None
    peak_layers: int | None = None
    scratch: int | None = None
    peak_forward: int | None = None

    @property
    def activations(self) -> int:
        return self.layers + self.head

    @property
    def peak(self) -> int | None:
        """Largest total of forward and backward."""
        return None if self.peak_head is None else max(self.peak_head, self.peak_layers)

    @property
    def state(self) -> int:
        """What stays between steps, and the gradients."""
        return self.weights + self.masters + self.gradients + self.projections + self.optimizer

    def gib(self) -> dict[str, float]:
        return {k: v / 2**30 for k, v in dataclasses.asdict(self).items() if v is not None}


def measure_step(
    model: nn.Module, method: str, rank: int, ids: torch.Tensor, checkpointing: bool = False, storage: str = "fp32", chunk: int = 0,
    stochastic: bool = False,
) -> StepMemory:  # fmt: skip
    """Memory of one step of `method` on `ids` [B, T] int64, counted storage by storage; hooks and adapters are taken off again.

    The loss is that of a policy gradient over all positions: the tokens' log-probs from fp32 logits. The optimizer's step is taken, so
    the trained weights change. checkpointing: recompute each decoder layer in backward. storage, chunk, stochastic: as
    `SketchConfig.projection_storage`, `PPOConfig.logit_chunk` and `OptimConfig.stochastic_rounding`.
    Raises ConfigError for an unknown method.
    """
    before, weights = {n: p.requires_grad for n, p in model.named_parameters()}, storage_bytes(model.parameters())
    net, optimizer, undo = _prepare(model, method, rank, checkpointing, storage, stochastic)
    extra = _projections(net, method, rank, storage)
    layers, head, gradients, forward, peaks = _pass(net, ids, chunk=chunk)
    with TrackMemory() as update:
        optimizer.step()
        if method == "galore":
            compact(optimizer)
    kept = 0 if method in SKETCHES else update.live  # what stays of AdamW's step is its state; LoGRA's own was there before
    masters, state = _state(net, method, optimizer)
    optimizer.zero_grad(set_to_none=True)
    undo()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(before[name])
    fixed = weights + masters + extra + state
    return StepMemory(weights, masters, gradients, extra, state, layers, head, *(fixed + p for p in peaks), update.peak - kept, fixed + forward)


def simulate_step(
    name: str, method: str, rank: int, tokens: int, rows: int = 1, dtype: torch.dtype = torch.bfloat16, checkpointing: bool = True,
    backward: bool = True, storage: str = "fp32", chunk: int = 0, attention: str | None = None, stochastic: bool = False,
) -> StepMemory:  # fmt: skip
    """`measure_step` for a model of `shapes.SHAPES` of any size: the same forward and backward on fake tensors, nothing allocated.

    Every decoder layer (every fourth, where the kinds of attention alternate) costs the same, so two shallow copies give the whole by a
    straight line. One device, no sharding. The optimizer's state follows from shapes; `scratch` is not simulated. backward: False skips
    it (linear attention without its fused kernel is slow, and keeps more than the kernel would); gradients then follow from shapes
    and the peaks are None. attention: all layers of that kind, see `shapes.model_config`.
    """
    depth, kinds = model_config(name).num_hidden_layers, getattr(model_config(name), "layer_types", None) or ()
    shallow = (4, 8) if len(set(kinds)) > 1 and attention is None else (2, 4)
    how = (dtype, checkpointing, backward, storage, chunk, attention, stochastic)
    low, high = (dataclasses.asdict(_simulate(name, method, rank, (rows, tokens), n, *how)) for n in shallow)
    slope = (depth - shallow[0]) / (shallow[1] - shallow[0])
    return StepMemory(**{k: None if v is None else round(v + (high[k] - v) * slope) for k, v in low.items()})


def _simulate(name, method, rank, shape, layers, dtype, checkpointing, backward, storage, chunk, attention, stochastic) -> StepMemory:
    with fake_model(name, method, rank, layers, dtype, checkpointing, storage, attention, stochastic) as (net, optimizer, weights, extra):
        kept, head, gradients, forward, peaks = _pass(net, torch.zeros(shape, dtype=torch.int64), backward, chunk)
        masters, state = _state(net, method, optimizer)
    fixed = weights + masters + extra + state
    return StepMemory(weights, masters, gradients, extra, state, kept, head, *(fixed + p for p in peaks), peak_forward=fixed + forward)


@contextlib.contextmanager
def fake_model(name, method, rank, layers, dtype, checkpointing, storage="fp32", attention=None, stochastic=False):
    """Inside, fake tensors rule; yields (model to call, optimizer, bytes of weights, bytes of projections) of a shallow copy."""
    with torch.device("meta"):
        model = build(model_config(name, layers, attention), dtype).eval()
        weights = storage_bytes(model.parameters())
        net, optimizer, _ = _prepare(model, method, rank, checkpointing, storage, stochastic)
    with FakeTensorMode():
        for module in model.modules():  # meta tensors become fake ones of a CPU, whose kernels are then imitated
            for held in (module._parameters, module._buffers):
                for key, t in held.items():
                    if t is not None:
                        made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
                        held[key] = nn.Parameter(made, t.requires_grad) if isinstance(t, nn.Parameter) else made
        yield net, optimizer, weights, _projections(net, method, rank, storage)


def _prepare(model: nn.Module, method: str, rank: int, checkpointing: bool, storage: str, stochastic: bool):
    """(the model to call, optimizer, undo) of a method; what trains, and nothing else, requires grad."""
    if method not in COUNTED:
        raise ConfigError(f"method = {method!r}: allowed is one of {', '.join(COUNTED)}")
    if stochastic and method not in SKETCHES:
        raise ConfigError(f"method = {method!r}: allowed with stochastic rounding is one of {', '.join(SKETCHES)}")
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # transformers recomputes in training mode only; these models have no dropout
    undo = [model.gradient_checkpointing_disable, model.eval] if checkpointing else []
    layers, net = select_targets(model, SketchConfig().targets), model
    if method in SKETCHES:

        sketch = SketchConfig(rank=rank, projection_storage=storage, **SKETCHES[method])
        optimizer = LoGRA(model, sketch, OptimConfig(stochastic_rounding=stochastic))
        return net, optimizer, lambda: [f() for f in (optimizer.detach, *undo)]
    model.requires_grad_(False)
    if method == "lora":
        from peft import LoraConfig, get_peft_model

        adapted = get_peft_model(model, LoraConfig(r=rank, lora_alpha=rank, lora_dropout=0.0, target_modules=list(layers)))
        net, undo = adapted.base_model.model, [adapted.unload, *undo]
    else:
        for layer in layers.values():
            layer.weight.requires_grad_(True)
    trained = [p for p in net.parameters() if p.requires_grad]
    if method == "galore":
        optimizer = galore_adamw(trained, GaLoreConfig(lr=1e-8, rank=rank))
    else:
        optimizer = torch.optim.AdamW(trained, lr=1e-8, weight_decay=0.0, foreach=False)
    return net, optimizer, lambda: [f() for f in undo]


def _projections(net: nn.Module, method: str, rank: int, storage: str) -> int:
    """Bytes kept of A, or Ω and Ψ (fp32, and again in the compute dtype where that differs; or the bits), drawn here, of LoRA's factors,
    or of GaLore's singular vectors, which its first step will find."""
    if method == "lora":
        return storage_bytes(p for p in net.parameters() if p.requires_grad)
    if method == "galore":
        return sum(4 * min(rank, *p.shape) * min(p.shape) for p in net.parameters() if p.requires_grad)
    total = 0
    for target in net._logra_targets.values() if method in SKETCHES else ():
        dtypes = {torch.float32, target.weight.dtype}
        total += storage_bytes(_drawn(target.how, dtypes, storage, isinstance(target.weight, FakeTensor)))
    return total


def _drawn(how, dtypes: Iterable[torch.dtype], storage: str, fake: bool) -> list[torch.Tensor]:
    """What a layer's sketch keeps of its random matrices; drawn, or if `fake` put in their place: their bits do not matter, their bytes do."""
    made, device = how.source.made if isinstance(how, SourcedSketch) else how._made, how.module.weight.device
    rank, width = how.projection.spec.rank, how.projection.width
    for dtype in dtypes if fake and storage == "fp32" else ():
        made[dtype, device] = torch.empty(rank, width, dtype=dtype)
        if isinstance(how, TwoSidedSketch):
            made[LEFT, dtype, device] = torch.empty(how.p, how.module.out_features, dtype=dtype)
    if storage == "bits":
        if fake:
            made["bits", device] = torch.empty(rank, 8 * -(-width // 64), dtype=torch.uint8)
        return [how.source.bits(device)]
    left = [how.left(dtype) for dtype in dtypes] if isinstance(how, TwoSidedSketch) else []
    return [how.matrix(dtype) for dtype in dtypes] + left


def _pass(net: nn.Module, ids: torch.Tensor, backward: bool = True, chunk: int = 0) -> tuple[int, int, int, int, list[int]]:
    """Bytes kept by the decoder layers, by head and loss, of gradients; and the tracked peaks before backward, until its head's is done, after."""
    peaks: list[int] = []

    def at_the_head(gradient):
        peaks.append(tracked.peak)
        tracked.peak = tracked.live

    with TrackMemory() as tracked:
        hidden = net.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        layers = tracked.live
        hidden.register_hook(at_the_head)
        if chunk:
            loss = -token_logprobs(net.get_output_embeddings(), hidden[:, :-1], ids[:, 1:], chunk=chunk).mean()
        else:
            logits = net.get_output_embeddings()(hidden).float()
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            del logits
        del hidden
        head, forward = tracked.live - layers, tracked.peak
        trained = [p for p in net.parameters() if p.requires_grad]
        if not backward:
            return layers, head, sum(p.numel() * p.element_size() for p in trained), forward, []
        loss.backward()
    return layers, head, storage_bytes(p.grad for p in trained), forward, [*peaks, tracked.peak]


def _state(net: nn.Module, method: str, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Bytes of (fp32 masters, optimizer state): AdamW keeps two fp32 values a weight and a step count a tensor, RowAdam one a row."""
    if method in SKETCHES:
        masters = storage_bytes(optimizer.weights.masters.values())
        return masters, optimizer_bytes(optimizer) - masters
    trained = [p for p in net.parameters() if p.requires_grad]
    masters = sum(4 * p.numel() for p in trained if p.dtype != torch.float32)
    if method == "galore":  # two values an entry of the projected gradient
        ranks = [min(optimizer.param_groups[0]["rank"], *p.shape) for p in trained]
        return masters, optimizer_bytes(optimizer) or sum(8 * r * max(p.shape) for r, p in zip(ranks, trained, strict=True))
    return masters, optimizer_bytes(optimizer) or sum(8 * p.numel() + 4 for p in trained)

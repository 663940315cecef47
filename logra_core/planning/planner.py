"""Will a training step fit, and what is largest: the memory of one GPU by category and phase, before any GPU is there.

State follows from shapes and from a `Layout` (what is kept, in which dtype, sharded or whole); activations, logits and the probe from the
real program on fake tensors (`memory.simulate_step`). `average` is put together otherwise: by a rule, fitted by hand to the averages that the
paper printed. Belongs here: the accounting of a step over GPUs. `PhaseMeter` measures the same phases of a real one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.autograd.forward_ad as fw

from ..kl import CHUNK, LOGITS, _branch, forward_mode, kl_divergence, logit_variance
from ..settings import ESTIMATORS, ConfigError
from ..sync import SketchUpdate
from ..variants.inputs import input_name
from .layout import PAPER, Layout, Switch
from .memory import METHODS, StepMemory, TrackMemory, fake_model, simulate_step
from .shapes import linear_shapes, model_config, parameters, skeleton

H100 = 79.6 * 2**30  # bytes of an H100 80GB that a program can have
PHASES = ("sync", "forward", "backward", "probe", "update", "checkpoint")
CATEGORIES = ("weights", "masters", "optimizer", "projections", "gradients", "update", "gathered", "activations", "logits", "probe")


@dataclass(frozen=True)
class Plan:
    """Bytes of one GPU. phases: phase -> category -> bytes at the phase's largest moment. average: category -> bytes, by the paper's rule.

    The rule, an inference from the five averages that the paper printed, not a statement of it: weights, masters, gradients and optimizer
    sharded, S by rows, A whole, and the logits of one sequence (bf16 and fp32; for LoGRA their bf16 gradient too). `rule_peak` adds what the
    JVP probe of two responses holds: logits and their tangent in bf16, U whole in fp32, embedding and head gathered.
    """

    name: str
    method: str
    gpus: int
    layout: Layout
    phases: dict[str, dict[str, int]]
    average_by_category: dict[str, int]
    rule_peak: int

    @property
    def average(self) -> int:
        return sum(self.average_by_category.values())

    def total(self, phase: str) -> int:
        """Largest total of a phase; 0 for one that the method lacks."""
        return sum(self.phases.get(phase, {}).values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> int:
        """Largest total of the whole step, as this package's program runs it."""
        return self.total(self.peak_phase)

    def fits(self, capacity: float = H100) -> bool:
        return self.peak <= capacity

    def answer(self, capacity: float = H100) -> str:
        """One line: fits or not, where the peak is, and the largest term of it."""
        at = self.phases[self.peak_phase]
        largest = max(at, key=at.get)
        verdict = "fits" if self.fits(capacity) else "does not fit"
        return (
            f"{self.name}, {self.method}, {self.gpus} GPU{'s' * (self.gpus != 1)}: {verdict}, {self.peak / 2**30:.1f} of {capacity / 2**30:.1f} GiB "
            f"in the {self.peak_phase} phase; largest term: {largest}, {at[largest] / 2**30:.1f} GiB"
        )


def plan(
    name: str, method: str, rank: int = 256, gpus: int = 4, layout: Layout = PAPER, tokens: int = 4096, rows: int = 1,
    dtype: torch.dtype = torch.bfloat16, checkpointing: bool = True, probe_rows: int = 2, estimator: str = "jvp", accumulate: bool = True,
) -> Plan:  # fmt: skip
    """Memory of one of `gpus` GPUs in a step of `method` on a model of `shapes.SHAPES`; needs no GPU and no weights.

    tokens, rows: of one microbatch on this GPU. dtype: of the passes; float32 has neither masters nor a copy. probe_rows: responses of
    the KL probe on this GPU, of `tokens` each. accumulate: several microbatches, so that gradients are there in the forward already.
    Rollout engines are taken to live elsewhere, messages and checkpoints to leave through main memory.
    Raises:
        ConfigError: unknown model, method or estimator, or a number below 1.
    """
    for what, value in (("rank", rank), ("gpus", gpus), ("tokens", tokens), ("rows", rows), ("probe_rows", probe_rows)):
        if value < 1:
            raise ConfigError(f"{what} = {value!r}: allowed is >= 1")
    if method not in METHODS:
        raise ConfigError(f"method = {method!r}: allowed is one of {', '.join(METHODS)}")
    shape = _shape(name)
    state, gradients = _state(shape, method, rank, gpus, layout, dtype)
    step = _passes(name, method, rank, tokens, rows, dtype, checkpointing, layout.projection, layout.logit_chunk)
    loss, head = (peak - (step.state - step.gradients) - step.layers for peak in (step.peak_forward, step.peak_head))
    rest = max(step.peak_layers - step.state, 0)
    size = dtype.itemsize
    gathered = (shape.root + 2 * shape.layer) * size if gpus > 1 else 0
    grads = {"gradients": gradients}
    whole_layer = 4 * shape.largest if gpus > 1 else 0  # one weight put together in fp32
    passing = state | {"gathered": gathered}
    before = grads if accumulate else {}
    mean = 4 * rank * shape.d // gpus if method == "logra" and layout.momentum else 0  # the next one, until the update is applied
    phases = {
        "forward": passing | before | {"activations": step.layers, "logits": loss},
        "backward": max(
            passing | before | {"activations": step.layers, "logits": head}, passing | grads | {"activations": rest}, key=lambda p: sum(p.values())
        ),
        "update": state | grads | {"gathered": whole_layer, "update": _update(shape, method, rank) + mean},
        "checkpoint": state | {"gathered": whole_layer},
        "sync": state | {"gathered": whole_layer, "update": 2 * rank * shape.d if method == "logra" else 0},
    }
    if method == "logra":
        probe = _probe(name, rank, tokens, probe_rows, dtype, estimator, layout.projection, checkpointing)
        phases["probe"] = passing | grads | {"update": 4 * rank * shape.d + mean, "probe": probe}
    ordered = {p: {c: phases[p].get(c, 0) for c in CATEGORIES} for p in PHASES if p in phases}
    average, peak = _rule(shape, method, rank, gpus, layout, tokens)
    return Plan(name, method, gpus, layout, ordered, average, peak)


def saving(switch: Switch, name: str, **settings) -> tuple[int, int]:
    """Bytes that a switch saves by itself, from `PAPER`: of the average, and of the peak of the passes (forward and backward)."""
    base = replace(PAPER, **switch.before)
    made = [plan(name, layout=layout, **settings) for layout in (base, replace(base, **switch.change))]
    passes = [max(p.total("forward"), p.total("backward")) for p in made]
    return made[0].average - made[1].average, passes[0] - passes[1]


@dataclass(frozen=True)
class _Shape:
    """Sums of a model: all parameters, those of the targets, Σd, Σk, Σk over distinct inputs, bytes of packed rows alike, the rest's sizes."""

    all: int
    trained: int
    d: int
    k: int
    k_shared: int
    words: int
    words_shared: int
    layers: int
    largest: int
    layer: int
    root: int
    vocabulary: int


@functools.cache
def _shape(name: str) -> _Shape:
    layers, model = linear_shapes(name), skeleton(name)
    block = max(sum(p.numel() for p in b.parameters()) for b in model.get_decoder().layers)
    distinct = {input_name(n): k for n, (_, k) in layers.items()}
    words = [sum(8 * -(-k // 64) for k in ks) for ks in ((k for _, k in layers.values()), distinct.values())]
    root = parameters(name) - sum(p.numel() for p in model.get_decoder().layers.parameters())
    return _Shape(
        parameters(name), sum(d * k for d, k in layers.values()), sum(d for d, _ in layers.values()), sum(k for _, k in layers.values()),
        sum(distinct.values()), *words, len(layers), max(d * k for d, k in layers.values()), block, root, model_config(name).vocab_size,
    )  # fmt: skip


def _projection(shape: _Shape, rank: int, layout: Layout, copies: int) -> int:
    k, words = (shape.k_shared, shape.words_shared) if layout.shared_inputs else (shape.k, shape.words)
    return {"fp32": copies * k, "bits": words, "regenerate": 0}[layout.projection] * rank


def _state(shape: _Shape, method: str, rank: int, gpus: int, layout: Layout, dtype: torch.dtype) -> tuple[dict[str, int], int]:
    """Bytes by category that stay between steps, and of the gradients (or S)."""
    full, factors = dtype == torch.float32, rank * (shape.d + shape.k)
    trained = {"dense": shape.all if layout.dense_all else shape.trained, "logra": shape.trained, "lora": 0}[method]
    masters = 0 if layout.bf16_alone else shape.all if layout.frozen_masters else trained
    weights = 4 * shape.all if full else 2 * (shape.all if layout.compute_copy else shape.all - masters)
    masters = 0 if full else 4 * masters
    state = {"weights": weights // gpus, "masters": masters // gpus}
    if method == "dense":
        size = dtype.itemsize if layout.compute_copy else 4  # gradients come in the dtype of the shard
        return state | {"optimizer": 8 * trained // gpus + 4 * shape.layers}, size * trained // gpus
    if method == "lora":
        return state | {"projections": 4 * factors // gpus, "optimizer": (8 * factors + 8 * shape.layers) // gpus}, 4 * factors // gpus
    state |= {"projections": _projection(shape, rank, layout, 4 if full else 6), "optimizer": 4 * shape.d * (1 + rank * layout.momentum) // gpus}
    return state, 4 * rank * shape.d // (gpus if layout.sketch_rows else 1)


def _update(shape: _Shape, method: str, rank: int) -> int:
    """Temporaries of the optimizer's step: U in fp32 and in bf16; AdamW: two of its largest tensor (LoRA's are small)."""
    return {"logra": 6 * rank * shape.d, "dense": 8 * shape.largest, "lora": 0}[method]


def _rule(shape: _Shape, method: str, rank: int, gpus: int, layout: Layout, tokens: int) -> tuple[dict[str, int], int]:
    state, gradients = _state(shape, method, rank, gpus, layout, torch.bfloat16)
    if method == "logra":
        state["projections"] = _projection(shape, rank, layout, 4)  # without the copy in the compute dtype that this package keeps
    together = min(layout.logit_chunk or tokens, tokens) * shape.vocabulary
    average = state | {"gradients": gradients, "logits": (6 if method == "dense" else 8) * together}
    peak = sum(average.values())
    if method == "logra":
        probe = 8 * tokens * shape.vocabulary + 4 * rank * shape.d + 2 * shape.root
        peak = max(peak, sum(state.values()) + gradients + probe)
    return average, peak


def _kind(name: str) -> str | None:
    """Linear attention without its fused kernel keeps more than the kernel would, so all layers are then taken for full attention."""
    return "full_attention" if len(set(getattr(model_config(name), "layer_types", None) or ())) > 1 else None


@functools.cache
def _passes(name, method, rank, tokens, rows, dtype, checkpointing, storage, chunk) -> StepMemory:
    return simulate_step(name, method, rank, tokens, rows, dtype, checkpointing, storage=storage, chunk=chunk, attention=_kind(name))


@functools.cache
def _probe(name, rank, tokens, rows, dtype, estimator, storage, checkpointing) -> int:
    """Peak of the KL probe on fake tensors: of its forward passes, as kl.py makes them.

    The score sketch's (variants/score.py) is a backward-sized pass: planned as the training pass of its rows, with all logits at once and without
    the weights' gradients, or, if that is more, as what the layers keep with two logits, a gradient of them, and three float64 chunks of a draw.
    """
    if estimator not in ESTIMATORS:
        raise ConfigError(f"estimator = {estimator!r}: allowed is one of {', '.join(ESTIMATORS)}")
    vocabulary = model_config(name).vocab_size
    rows = min(rows, max(1, LOGITS // (tokens * vocabulary)))
    if estimator == "score_sketch":
        step = _passes(name, "logra", rank, tokens, rows, dtype, checkpointing, storage, 0)
        drawn = (3 * dtype.itemsize * rows * tokens + 24 * min(CHUNK, rows * tokens)) * vocabulary
        passes = max(step.peak_forward + step.gradients, step.peak_head + step.gradients, step.peak_layers) - step.state
        return max(passes, step.layers + drawn)
    with fake_model(name, "logra", rank, 2, dtype, False, storage, _kind(name)) as (net, optimizer, *_):
        layers = optimizer.targets
        factors = {n: torch.empty(t.module.out_features, rank) for n, t in layers.items()}
        update = SketchUpdate("", 1, factors, {n: t.how.projection for n, t in layers.items()}, drawn=_AtHand(layers))
        ids = torch.zeros(rows, tokens, dtype=torch.int64)
        with TrackMemory() as tracked, torch.no_grad():
            if estimator == "jvp":
                with forward_mode(net), _branch(net, update, None):
                    _reduced(*fw.unpack_dual(_contexts(net, ids)), logit_variance)
            else:
                z = _contexts(net, ids)
                with _branch(net, update, 1.0):
                    other = _contexts(net, ids)
                _reduced(z, other, kl_divergence)
    return tracked.peak


class _AtHand:
    """V of the targets as they keep it: matrices, or bits that are unpacked at each look-up."""

    def __init__(self, targets) -> None:
        self.targets = targets

    def get(self, name: str, default=None) -> torch.Tensor:
        return self.targets[name].projection()


def _contexts(net, ids: torch.Tensor) -> torch.Tensor:
    """kl.py picks the contexts' logits by a mask, which copies them; a fake mask has no known sum."""
    return net(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1).clone()


def _reduced(z_CV: torch.Tensor, other_CV: torch.Tensor, function) -> None:
    for z, other in zip(z_CV.split(CHUNK), other_CV.split(CHUNK), strict=True):
        function(z, other).sum()


@dataclass
class PhaseMeter:
    """`with meter.phase("probe"): ...` records the largest bytes in use during each phase of a real step, in `peaks`.

    On CUDA they are the caching allocator's (`torch.cuda.max_memory_allocated`), every tensor of the process included; on a CPU `base` plus
    what `TrackMemory` sees from the meter's start on. Not yet run on a GPU.
    """

    device: torch.device
    base: int = 0
    peaks: dict[str, int] = field(default_factory=dict)

    @contextlib.contextmanager
    def running(self) -> Iterator[PhaseMeter]:
        """Measure inside. Raises ConfigError for a device that is neither a CPU nor CUDA."""
        kind = torch.device(self.device).type
        if kind not in ("cpu", "cuda"):
            raise ConfigError(f"device = {self.device}: allowed is cpu or cuda")
        if kind == "cuda":
            yield self
            return
        with TrackMemory() as self._tracked:
            yield self

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One phase; entered again, the larger value stays."""
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            yield
            torch.cuda.synchronize(self.device)
            peak = torch.cuda.max_memory_allocated(self.device)
        else:
            self._tracked.peak = self._tracked.live
            yield
            peak = self.base + self._tracked.peak
        self.peaks[name] = max(peak, self.peaks.get(name, 0))

"""Forward mode in less memory and time: linear layers without a third product, and attention by blocks. `kl.forward_mode` has both from here.

Attention with a forward-mode rule that never holds a score for every pair of tokens: O(T · BLOCK) memory, any mask of transformers.

O = P V / l with P = exp(S − m), S = scale · Q Kᵀ where a query sees a key and −∞ elsewhere, m its row's largest, l = Σ P. Tangents Q̇, K̇, V̇ give
Ṡ = scale · (Q̇ Kᵀ + Q K̇ᵀ) and Ȯ = [(P ⊙ Ṡ) V + P V̇] / l − (Σ P ⊙ Ṡ / l) · O. All sums run over blocks of keys and are rescaled as m grows
(online softmax: Milakov and Gimelshein 2018; Dao et al. 2022). Belongs here: that rule, which blocks are to be visited, and the switch
that makes a model attend so. It is for forward mode alone: nothing is kept for a backward pass.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
import torch.autograd.forward_ad as fw
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from ..kl import FORWARD_MODE, INSTEAD
from ..settings import ConfigError

NAME = "logra_blockwise"  # of this attention in a model's config
BLOCK = 256  # queries, and keys, of a block
EMPTY, PARTLY, FULL = range(3)  # does no query of a block see a key of another, some, every one every


class Visible:
    """Which keys each query sees, block by block, by a mask function of transformers; the mask of all pairs is never drawn.

    function: (b, h, q, k) int64 tensors that broadcast -> bool, as transformers.masking_utils has them. first_query, first_key: positions
    of the first of each. queries, keys: positions of each block. states[i][j]: EMPTY, PARTLY or FULL, of the whole batch.
    """

    def __init__(
        self, rows: int, queries: int, keys: int, function: Callable, device: torch.device | str, first_query: int = 0, first_key: int = 0
    ) -> None:
        self.function, self.rows = function, torch.arange(rows, device=device)
        self.queries = (torch.arange(queries, device=device) + first_query).split(BLOCK)
        self.keys = (torch.arange(keys, device=device) + first_key).split(BLOCK)
        self.states = self._states()

    def among(self, i: int, j: int) -> torch.Tensor:
        """Whether the queries of block i see the keys of block j: bool [B or 1, 1, queries, keys]."""
        b, q, k = self.rows[:, None, None, None], self.queries[i][None, None, :, None], self.keys[j][None, None, None, :]
        return self.function(b, torch.zeros_like(b[:1]), q, k).expand(-1, -1, q.shape[2], k.shape[3])

    def _states(self) -> list[list[int]]:
        if isinstance(self.rows, FakeTensor):  # nobody can look at fake data, but two blocks after one another take the memory of any number
            return [[PARTLY if max(i, j) < 2 else EMPTY for j in range(len(self.keys))] for i in range(len(self.queries))]
        seen = (self.among(i, j) for i in range(len(self.queries)) for j in range(len(self.keys)))
        flags = torch.stack([block.any().long() + block.all() for block in seen])
        return flags.view(len(self.queries), len(self.keys)).tolist()


def attention_jvp(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_dot: torch.Tensor, k_dot: torch.Tensor, v_dot: torch.Tensor, visible: Visible, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention and its tangent, [B, T, H, E] each, in v's dtype; computed in fp32, or in fp64 if q is. Queries that see nothing get zeros.

    q [B, H, T, D], k [B, J, S, D], v [B, J, S, E] and tangents of the same shapes; J divides H, and H // J query heads in a row share a key head.
    """
    B, H, T, _ = q.shape
    J, E, work = k.shape[1], v.shape[-1], torch.promote_types(q.dtype, torch.float32)
    q, q_dot = (x.to(work).mul(scale).reshape(B * J, H // J, T, -1) for x in (q, q_dot))
    out, out_dot = (v.new_empty(B, T, J, H // J, E) for _ in range(2))
    k, v, k_dot, v_dot = (x.to(work).flatten(0, 1) for x in (k, v, k_dot, v_dot))
    tiny, done = torch.finfo(work).tiny, 0
    for i, positions in enumerate(visible.queries):
        rows = slice(done, done := done + len(positions))
        o, o_dot = _rows(*(x[:, :, rows].flatten(1, 2) for x in (q, q_dot)), k, v, k_dot, v_dot, visible, i, tiny)
        for whole, part in ((out, o), (out_dot, o_dot)):
            whole[:, rows] = part.view(B, J, H // J, -1, E).permute(0, 3, 1, 2, 4)
    return out.flatten(2, 3), out_dot.flatten(2, 3)


def _rows(q, q_dot, k, v, k_dot, v_dot, visible: Visible, i: int, tiny: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(O, Ȯ) [B J, G t, E] of block i of t queries: q [B J, G t, D] scaled, with G query heads beside one another; k, v [B J, S, ·]."""
    m, t = q.new_full((*q.shape[:2], 1), -math.inf), len(visible.queries[i])
    total, moment = torch.zeros_like(m), torch.zeros_like(m)  # Σ P and Σ P ⊙ Ṡ
    o, o_dot = (q.new_zeros(*q.shape[:2], v.shape[-1]) for _ in range(2))
    done = 0
    for j, positions in enumerate(visible.keys):
        keys = slice(done, done := done + len(positions))
        if visible.states[i][j] == EMPTY:
            continue
        s, s_dot = q @ k[:, keys].mT, (q_dot @ k[:, keys].mT).baddbmm_(q, k_dot[:, keys].mT)
        if visible.states[i][j] == PARTLY:
            s.view(len(visible.rows), -1, q.shape[1] // t, t, len(positions)).masked_fill_(~visible.among(i, j)[:, :, None], -math.inf)
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        level = m_new.masked_fill(m_new == -math.inf, 0.0)  # a row that has seen no key yet: −∞ − (−∞) is NaN
        keep, p = (m - level).exp_(), s.sub_(level).exp_()
        m, s_dot = m_new, s_dot.mul_(p)
        total, moment = total * keep + p.sum(-1, keepdim=True), moment * keep + s_dot.sum(-1, keepdim=True)
        o.mul_(keep).baddbmm_(p, v[:, keys])
        o_dot.mul_(keep).baddbmm_(s_dot, v[:, keys]).baddbmm_(p, v_dot[:, keys])
        del s, s_dot, p  # before the next block's are made
    total = total.clamp(min=tiny)
    o = o.div_(total)
    return o, o_dot.div_(total).addcmul_(moment.div_(total), o, value=-1)


def attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Visible | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, **others,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """`attention_jvp` of dual tensors as an attention function of transformers: [B, T, H, E], no weights.

    Raises ConfigError where another attention is asked for: dropout, a bias, a soft cap or sinks of the scores, a mask that is a tensor, gradients.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    asked = [n for n in ("position_bias", "softcap", "s_aux", "cache") if others.get(n) is not None]
    asked += [f"dropout = {dropout}"] if dropout else []
    asked += ["a mask that is a tensor"] if isinstance(attention_mask, torch.Tensor) else []
    asked += ["gradients"] if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)) else []
    if asked:
        raise ConfigError(f"attention of {type(module).__name__} with {', '.join(asked)} has no forward-mode rule here: {INSTEAD}")
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        function = causal_mask_function if causal else bidirectional_mask_function
        attention_mask = Visible(len(query), query.shape[2], key.shape[2], function, query.device)
    (q, q_dot), (k, k_dot), (v, v_dot) = (_dual(x) for x in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        return fw.make_dual(*attention_jvp(q, k, v, q_dot, k_dot, v_dot, attention_mask, scale)), None


def _dual(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    primal, tangent = fw.unpack_dual(x)
    return primal, torch.zeros_like(primal) if tangent is None else tangent


def visible_blocks(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0, mask_function: Callable | None = None,
    attention_mask: torch.Tensor | None = None, use_vmap: bool = False, device: torch.device | str = "cpu", **others,
) -> Visible:  # fmt: skip
    """`Visible` as a mask of transformers. attention_mask: [B, S] bool, False at padding.

    Raises ConfigError for a mask function of the model's own that cannot be asked for a whole block at once.
    """
    from transformers.masking_utils import and_masks, causal_mask_function, padding_mask_function, prepare_padding_mask

    if use_vmap:
        raise ConfigError(f"a mask function that a model adds by itself cannot be asked by blocks: {INSTEAD}")
    function = mask_function or causal_mask_function
    if attention_mask is not None:
        function = and_masks(function, padding_mask_function(prepare_padding_mask(attention_mask, kv_length, kv_offset)))
    return Visible(batch_size, q_length, kv_length, function, device, q_offset, kv_offset)


@contextlib.contextmanager
def forward_mode_attention(model: nn.Module) -> Iterator[None]:
    """Inside, attention goes by blocks in every transformers model in `model` that lets its attention be chosen. Configs are as before afterwards."""
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, visible_blocks)
    models = [m for m in model.modules() if isinstance(m, PreTrainedModel) and m._can_set_attn_implementation()]
    before = [(m.config, m.config._attn_implementation_internal) for m in models]
    try:
        for config, _ in before:
            config._attn_implementation_internal = NAME  # the public setter would reach into sub-configs and look for kernels
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


class FrozenLinear(TorchFunctionMode):
    """Inside a dual level, ẏ = ẋ Wᵀ of every `F.linear` whose weight and bias have no tangent.

    torch itself computes ẏ = ẋ Wᵀ + x Ẇᵀ with Ẇ = 0 written out: a product and a tensor of the weight's size too many in every layer.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self._linear(*args, **(kwargs or {})) if func is F.linear else func(*args, **(kwargs or {}))

    @staticmethod
    def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        x, x_dot = fw.unpack_dual(input)
        if x_dot is None or any(p is not None and fw.unpack_dual(p).tangent is not None for p in (weight, bias)):
            return F.linear(input, weight, bias)
        return fw.make_dual(F.linear(x, weight, bias), F.linear(x_dot, weight))


@contextlib.contextmanager
def eager_experts(model: nn.Module) -> Iterator[None]:
    """Inside, the experts of a transformers model are computed one after another: grouped products have no forward-mode rule."""
    from transformers import PreTrainedModel

    models = [m for m in model.modules() if isinstance(m, PreTrainedModel) and m._can_set_experts_implementation()]
    before = [(m.config, m.config._experts_implementation_internal) for m in models]
    try:
        for config, _ in before:
            config._experts_implementation_internal = "eager"
        yield
    finally:
        for config, implementation in before:
            config._experts_implementation_internal = implementation


FORWARD_MODE += [forward_mode_attention, eager_experts, lambda model: FrozenLinear()]

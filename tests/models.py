"""Models and batches that the tests share: a tiny random Llama with grouped-query heads, and the embedded LLM loaded once."""

from __future__ import annotations

import copy
import functools

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from logra_core import ProbeBatch
from logra_core.engines.policy import load_policy
from logra_core.variants import observe

# Every switch of SketchConfig beyond the published method; tests of exactness, sync, resume and faults run over all of them.
SWITCHES = {
    "one_sided": {},
    "two_sided": {"kind": "two_sided"},
    "equal_bytes": {"kind": "two_sided", "equal_bytes": True},
    "activation": {"projection": "activation"},
    "outliers dropped": {"projection": "activation", "drop_leading": 2},
    "shared": {"share_inputs": True},
    "shared activation": {"projection": "activation", "share_inputs": True},
    "hadamard": {"distribution": "hadamard"},
    "shared bits": {"projection_storage": "bits", "share_inputs": True},
    "ranks": {"ranks": {"down_proj": 7, "layers.1": 2, "layers.2.self_attn.k_proj": 1}},
}


def score(logra, ids: torch.Tensor) -> None:
    """The scoring pass that an activation-aware projection needs before backward; nothing for the others."""
    if logra.config.projection == "activation":
        with observe(logra.targets.values()):
            logra.model(input_ids=ids, use_cache=False)


def drawn(target) -> dict:
    """The matrices and bits that a target's sketch keeps, by key."""
    return target.how.source.made if hasattr(target.how, "source") else target.how._made


def tiny_llama(seed: int = 0, **changes) -> LlamaForCausalLM:
    settings = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=2)  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()


def half_training(checkpointing: bool | None, dropout: float) -> LlamaForCausalLM:
    """A tiny Llama in training mode but for one block. checkpointing: None, or whether reentrant."""
    model = tiny_llama(attention_dropout=dropout)
    model.train()
    model.model.layers[1].eval()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    return model


@functools.cache
def _policy():
    return load_policy()


def real_llm():
    """A fresh copy of the embedded LLM (loading it once), fp32."""
    model, tokenizer = _policy()
    return copy.deepcopy(model), tokenizer


def random_ids(rows: int, tokens: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, vocab, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def policy_loss(model, ids: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """A PPO-like loss: log-probs of the tokens weighted with one random advantage a row."""
    advantage = torch.randn(len(ids), 1, generator=torch.Generator().manual_seed(seed + 1))
    logp = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)[:, :-1]
    return -(logp.gather(-1, ids[:, 1:, None]).squeeze(-1) * advantage).mean()


def probe_batch(ids: torch.Tensor, prompt: int) -> ProbeBatch:
    response = torch.zeros_like(ids, dtype=torch.bool)
    response[:, prompt:] = True
    return ProbeBatch(ids, torch.ones_like(ids), response)

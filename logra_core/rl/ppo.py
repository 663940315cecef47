"""The RL algorithm: baseline, advantages, importance weights, loss, Pass@k. Pure functions and one small state.

Deltas from textbook PPO (METHOD section 6):
- no critic and no GAE: advantage = reward - a running mean of PAST batches' rewards (from 0, EMA weight 0.1), the same for every token;
- one response per prompt and no group baseline; reward 1 if the verifier accepts, else -0.01;
- one update per batch, so the ratio pi/pi_old is exactly 1 when it is taken: pi_old is the same forward's detached value, no extra pass;
  the clip is kept, and would bind only with more updates per batch;
- truncated importance sampling: every token is weighted by min(pi_old / pi_rollout, 2), where pi_rollout is what the engine sampled from;
- the loss is a sum over tokens divided by the generated tokens of the whole batch (long responses weigh more than short ones);
- no KL penalty against a reference model, no entropy bonus, no gradient clipping: step size is the step controller's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ..engines.rollout import can_share_prefix, exact_room


class RunningBaseline:
    """b <- (1 - w) b + w mean(rewards), starting at 0. `advantages` reads only what `observe` folded in before: past batches."""

    def __init__(self, weight: float = 0.1):
        if not 0 < weight <= 1:
            raise ValueError(f"RunningBaseline: weight = {weight!r}; allowed is 0 < weight <= 1")
        self.weight, self.value = weight, 0.0

    def advantages(self, rewards: torch.Tensor) -> torch.Tensor:
        """rewards fp [B] -> rewards - baseline, fp32 [B]. Changes nothing."""
        return rewards.to(torch.float32) - self.value

    def observe(self, rewards: torch.Tensor) -> None:
        """Fold this batch in, for the batches to come."""
        mean = float(rewards.double().mean())
        if not math.isfinite(mean):
            raise ValueError(f"RunningBaseline.observe: mean reward is {mean}")
        self.value += self.weight * (mean - self.value)

    def state_dict(self) -> dict:
        return {"value": self.value, "weight": self.weight}

    def load_state_dict(self, state: dict) -> None:
        if state["weight"] != self.weight:
            raise ValueError(f"RunningBaseline: saved with weight {state['weight']}, this one has {self.weight}")
        self.value = float(state["value"])


def rewards_of(correct: list[bool], failure_reward: float) -> torch.Tensor:
    """1 for a correct response, `failure_reward` for any other; fp32 [B]."""
    return torch.tensor([1.0 if c else failure_reward for c in correct], dtype=torch.float32)


def token_logprobs(
    head: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, labels: torch.Tensor, temperature: float = 1.0, chunk: int = 0
) -> torch.Tensor:
    """log softmax(head(hidden) / T)[labels], fp32, the shape of `labels` int64 [..., ]; 0 where the label is -100. Differentiable.

    hidden: [..., H]. chunk: that many tokens at a time, whose logits are dropped and computed again in backward; 0: all at once.
    """
    rows, flat = hidden.flatten(0, -2), labels.flatten()

    def some(rows, flat):
        logits = head(rows).float()
        logits = logits if temperature == 1 else logits / temperature
        return -F.cross_entropy(logits, flat, ignore_index=-100, reduction="none")

    if not chunk:
        return some(rows, flat).view(labels.shape)
    again = {"use_reentrant": False, "preserve_rng_state": False}
    parts = zip(rows.split(chunk), flat.split(chunk), strict=True)
    return torch.cat([checkpoint(some, *part, **again) for part in parts]).view(labels.shape)


@contextmanager
def _head_gives_logprobs(model, labels: torch.Tensor, temperature: float, chunk: int) -> Iterator[list[torch.Tensor]]:
    """Inside, the model's head returns the labels' log-probs [B, R, 1] in place of logits [B, R, V]. Yields what it returned.

    Done within the model's forward because FSDP has the head's weight whole only there, and in its backward.
    """
    head, made = model.get_output_embeddings(), []
    own, plain = head.__dict__.get("forward"), head.forward

    def forward(hidden):
        made.append(token_logprobs(plain, hidden, labels, temperature, chunk).unsqueeze(-1))
        return made[-1]

    head.forward = forward
    try:
        yield made
    finally:
        del head.forward
        if own is not None:
            head.forward = own


def sequence_logprobs(
    model, padded: dict[str, torch.Tensor], temperature: float = 1.0, prefix: torch.Tensor | None = None, chunk: int = 0
) -> torch.Tensor:
    """Log-probs of the response tokens under `model` at `temperature`: fp32 [B, T], 0 outside `response_mask`; differentiable.

    padded: input_ids, attention_mask, response_mask [B, T] as made by `Rollouts.padded`. Logits are computed at the response columns only
    ([B, R, V], R = longest response), so with cross-entropy the peak is two fp32 tensors of that size. Positions count real tokens, as in
    generation.
    prefix: int64 [P], tokens before those of `padded` that all rows share: computed once, with gradients, and exact; `Rollouts.shared` says
    how many may be left out. Not together with activation checkpointing, which keeps no cache.
    chunk: tokens whose logits exist at once (`token_logprobs`); 0: all. Equal within fp32 rounding.
    Raises:
        ValueError: bad shapes, masks or settings; a prefix that the model's attention cannot share exactly; so many columns that
            a row depends on the others (`exact_room`); or, with a chunk, a model that changes its head's logits (scaling, soft caps).
    """
    if chunk < 0:
        raise ValueError(f"sequence_logprobs: chunk = {chunk!r}; allowed is >= 0")
    if not temperature > 0:
        raise ValueError(f"sequence_logprobs: temperature = {temperature!r}; allowed is > 0 (greedy rollouts were not sampled)")
    device = model.get_input_embeddings().weight.device
    input_ids, mask = padded["input_ids"].to(device), padded["response_mask"].to(device)
    attention_mask = padded["attention_mask"].to(device)
    if input_ids.shape != mask.shape or input_ids.shape != attention_mask.shape:
        raise ValueError(f"sequence_logprobs: shapes differ: {tuple(input_ids.shape)}, {tuple(mask.shape)}, {tuple(attention_mask.shape)}")
    columns = mask.any(0).nonzero()
    if len(columns) == 0 or int(columns[0]) == 0:
        raise ValueError("sequence_logprobs: response_mask must mark at least one token, and none in column 0 (it has no context)")
    first = int(columns[0])
    keep = input_ids.shape[1] - first + 1
    cache, shared = None, 0 if prefix is None else len(prefix)
    width = shared + input_ids.shape[1]
    if (room := exact_room(model)) is not None and width > room:
        raise ValueError(
            f"sequence_logprobs: {width} columns; above {room} each row of a batch of {type(model).__name__} depends on the others (their lengths "
            "set its rotary frequencies or scales): allowed are shorter prompts or a smaller sampling.max_tokens"
        )
    if shared:
        if not can_share_prefix(model, width):
            raise ValueError(
                f"sequence_logprobs: {type(model).__name__} cannot share a prefix of {shared} tokens exactly among {width} columns (a sliding "
                "window, chunks, or a state that padding passes through): skip as many as Rollouts.shared(model) says"
            )
        cache = model(input_ids=prefix.to(device)[None], use_cache=True, logits_to_keep=1).past_key_values
        if cache is None:
            raise ValueError("sequence_logprobs: the model kept no cache (activation checkpointing?), so a prefix cannot be shared")
        cache.batch_repeat_interleave(len(input_ids))
        attention_mask = F.pad(attention_mask, (shared, 0), value=1)
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, shared:]
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": positions, "past_key_values": cache}
    inputs |= {"logits_to_keep": keep, "use_cache": cache is not None}
    labels = input_ids[:, first:].masked_fill(~mask[:, first:], -100)
    if chunk:
        with _head_gives_logprobs(model, F.pad(labels, (0, 1), value=-100), temperature, chunk) as made:
            logp = model(**inputs).logits
        if len(made) != 1 or logp.shape != made[0].shape or logp.data_ptr() != made[0].data_ptr():
            raise ValueError(f"sequence_logprobs: {type(model).__name__} changes the logits of its head, so chunk = {chunk} would be wrong; use 0")
        logp = logp[:, :-1, 0]
    else:
        logits = model(**inputs).logits[:, :-1]  # the last column predicts a token that is not there
        logp = token_logprobs(lambda z: z, logits, labels, temperature)
    return F.pad(logp, (first, 0))


def tis_weights(trainer_logp: torch.Tensor, rollout_logp: torch.Tensor, cap: float = 2.0) -> torch.Tensor:
    """min(exp(trainer - rollout), cap) per token, detached; same shape as the inputs."""
    if not cap >= 1:
        raise ValueError(f"tis_weights: cap = {cap!r}; allowed is >= 1")
    # clamped before exp as well: a huge difference must give the cap, not inf
    return (trainer_logp.detach() - rollout_logp).clamp(max=math.log(cap)).exp().clamp(max=cap)


def ppo_loss(
    logp: torch.Tensor, rollout_logp: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, batch_tokens: int,
    clip: float = 0.2, tis_cap: float = 2.0, old_logp: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:  # fmt: skip
    """Clipped token-level surrogate of one microbatch, already divided by the tokens of the WHOLE batch: microbatch losses add up to it.

        L = - sum_t w_t min(rho_t A, clip(rho_t, 1 - c, 1 + c) A) / batch_tokens,   rho = exp(logp - old), w = min(exp(old - rollout), cap)

    logp, rollout_logp, old_logp: fp32 [B, T] (old_logp None: logp detached, the on-policy case). advantages [B]. mask bool [B, T].
    Returns the scalar loss and sums over the microbatch's tokens: tokens, tis_sum, tis_max, tis_capped, ratio_clipped.
    """
    if logp.shape != rollout_logp.shape or logp.shape != mask.shape or advantages.shape != logp.shape[:1]:
        raise ValueError(
            f"ppo_loss: logp {tuple(logp.shape)}, rollout_logp {tuple(rollout_logp.shape)}, mask {tuple(mask.shape)} must be [B, T] alike, "
            f"advantages {tuple(advantages.shape)} [B]"
        )
    tokens = int(mask.sum())
    if not 0 < tokens <= batch_tokens:
        raise ValueError(f"ppo_loss: mask marks {tokens} tokens; expected 1 to batch_tokens = {batch_tokens}")
    if mask.dtype != torch.bool:
        raise ValueError(f"ppo_loss: mask is {mask.dtype}; expected torch.bool")
    old = logp.detach() if old_logp is None else old_logp.detach()
    ratio = (logp - old).exp()
    weight = tis_weights(old, rollout_logp, tis_cap)
    adv = advantages.to(logp)[:, None]
    gain = torch.minimum(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv)
    loss = -(weight * gain).masked_fill(~mask, 0.0).sum() / batch_tokens
    inside = weight[mask]
    stats = {
        "tokens": tokens,
        "tis_sum": float(inside.double().sum()),
        "tis_max": float(inside.max()),
        "tis_capped": int(((old - rollout_logp)[mask] > math.log(tis_cap)).sum()),
        "ratio_clipped": int((((ratio.detach() - 1).abs() > clip) & mask).sum()),
    }
    return loss, stats


def mismatch(rollout_logp: torch.Tensor, trainer_logp: torch.Tensor, mask: torch.Tensor, finished: torch.Tensor) -> float:
    """max(0, mean over the tokens of FINISHED responses of rollout - trainer log-prob), in nats; METHOD section 4.

    All [B, T] but finished bool [B]. 0 when no response finished.
    """
    if rollout_logp.shape != trainer_logp.shape or mask.shape != trainer_logp.shape or finished.shape != mask.shape[:1]:
        raise ValueError(
            f"mismatch: got {tuple(rollout_logp.shape)}, {tuple(trainer_logp.shape)}, {tuple(mask.shape)} and {tuple(finished.shape)}; "
            "expected [B, T] three times and finished [B]"
        )
    chosen = mask & finished.bool()[:, None]
    if not chosen.any():
        return 0.0
    mean = float((rollout_logp.double() - trainer_logp.detach().double())[chosen].mean())
    if not math.isfinite(mean):
        raise ValueError(f"mismatch: mean log-prob difference is {mean}")
    return max(0.0, mean)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased chance that at least one of k samples is right, from c right ones among n: 1 - C(n-c, k) / C(n, k)."""
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass_at_k: n = {n}, c = {c}, k = {k}; allowed is 1 <= k <= n and 0 <= c <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)

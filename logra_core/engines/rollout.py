"""Rollouts: drawing responses from the policy, with the log-probabilities of the distribution they were drawn from.

Belongs here: the `Rollouts` record, the engine protocol, the transformers engine and `make_engine`.
An engine owns its OWN copy of the weights. It is kept in step with the trainer by sync bytes alone (`sync.Replica`), never by sharing
tensors, so a missed or repeated update shows as a version or fingerprint that differs. Anything about vLLM lives in its own file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Sequence

import torch

if TYPE_CHECKING:
    from ..sync import SketchUpdate

from ..settings import Checked, ConfigError
from ..sync import Replica, SyncError, message_header
from ..weights import Masters

MIN_SHARED = 8  # a common beginning of the prompts shorter than this is not worth a pass of its own
LARGEST = 2**31  # bytes of a message in a call to vLLM: msgpack ends at 4 GiB, and base64 adds a third


# model_type of what takes no position_ids and needs none: relative positions (ALiBi), or none at all.
WITHOUT_POSITIONS = ("bloom", "mpt", "mamba", "mamba2", "falcon_mamba")
# model_type -> why padding before a row changes the row in transformers, whatever the attention mask says.
PADDING_COUNTS = {
    "rwkv": "its state reads padding as if it were tokens",
    "xlstm": "its state reads padding as if it were tokens",
    "recurrent_gemma": "its recurrent blocks read padding as if it were tokens",
    "deepseek_v4": "it compresses keys in blocks of columns, which padding shifts",
}


class RolloutError(RuntimeError):
    """A rollout that cannot be trusted: logits that are not finite, or a result of the wrong form."""


def shared_prefix(prompts: Sequence[Sequence[int] | torch.Tensor]) -> int:
    """Tokens of the common beginning of all prompts (chat template, system prompt), leaving each prompt one token or more.

    0 if shorter than `MIN_SHARED`. Whether it may be computed once instead of once a row, `can_share_prefix` says.
    """
    lists = [p.tolist() if isinstance(p, torch.Tensor) else list(p) for p in prompts]
    first, last = min(lists), max(lists)  # in lexicographic order: what these two share, all share
    length = next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), min(map(len, lists)))
    length = min(length, min(map(len, lists)) - 1)
    return length if len(lists) > 1 and length >= MIN_SHARED else 0


def _text_config(model):
    config = getattr(model, "config", None)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def can_share_prefix(model, columns: int) -> bool:
    """Whether the common beginning of the prompts of a batch can be computed once: is it exact for rows laid out as prefix, padding, rest?

    columns: of the longest row that can occur, padding included. With full attention it is: one row's keys and values serve all, and
    padding is masked. A sliding window or a chunk counts columns, so padding takes places in it: exact only where it holds all columns.
    Linear attention, convolutions and state spaces carry a state through the padding, or have no cache that can be repeated: never.
    Decided from the config, by the cache that transformers makes of it; False for whatever is not known to be exact.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    config = _text_config(model)
    if config is None or getattr(model, "_is_stateful", False) or "local" in (getattr(config, "attention_layers", None) or ()):
        return False
    if not {"position_ids", "past_key_values"} <= set(inspect.signature(model.forward).parameters):
        return False  # positions by column, as in MPT
    for layer in DynamicCache(config=config).layers or [None]:
        if type(layer) is DynamicSlidingWindowLayer:
            if layer.sliding_window < columns:
                return False
        elif type(layer) is not DynamicLayer:
            return False
    return True


def refuse_padding(model) -> None:
    """Raises ConfigError for a model whose rows change when padding stands before them: prompts of a batch could not be computed together."""
    config, parameters = _text_config(model), set(inspect.signature(model.forward).parameters)
    kind = getattr(config, "model_type", None)
    why = PADDING_COUNTS.get(kind)
    if why is None and "attention_mask" not in parameters:
        why = "its forward takes no attention_mask"
    if why is None and "position_ids" not in parameters and kind not in WITHOUT_POSITIONS:
        why = "its forward takes no position_ids"
    if why:
        raise ConfigError(
            f"{type(model).__name__} cannot be trained here: prompts of different lengths are padded on the left, and {why}. Allowed is a "
            "model of which a padded row equals the row alone, such as Llama, Qwen, Mistral, Gemma or Mamba"
        )


def exact_room(model) -> int | None:
    """Columns of a batch, of prompts and responses with padding, above which a row depends on the others; None: no such bound.

    Rotary frequencies of longrope and dynamic scaling follow the longest row of a batch; Llama 4 scales its queries by columns.
    """
    config, limits = _text_config(model), []
    rope = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *(v for v in rope.values() if isinstance(v, dict))):  # one, or one for each kind of layer
        if one.get("rope_type") in ("longrope", "dynamic"):
            limits.append(one.get("original_max_position_embeddings") or config.max_position_embeddings)
    if getattr(config, "model_type", "") == "llama4_text" and config.attn_temperature_tuning:
        limits.append(int(config.floor_scale) - 1)  # the scale is 1 below
    return min(limits, default=None)


@dataclass(frozen=True)
class SamplingConfig(Checked):
    """How responses are drawn. temperature 0 is greedy."""

    max_tokens: int = 4096
    temperature: float = 1.0
    top_p: float = 1.0

    def _check(self) -> None:
        self._need("max_tokens", self.max_tokens >= 1, ">= 1")
        self._need("temperature", self.temperature >= 0, ">= 0")
        self._need("top_p", 0 < self.top_p <= 1, "0 < top_p <= 1")


@dataclass(frozen=True)
class Rollouts:
    """One batch of prompts with one response each, all from the same weights.

    prompt_ids, response_ids: lists of int64 [n_i]; a response that ended by itself includes its end-of-sequence token.
    logprobs: list of fp32 [n_i], natural log, of the SAMPLING distribution (after temperature, then top-p) at each response token;
    for greedy decoding (temperature 0) of the temperature-1 distribution. finish_reasons: "stop" (end-of-sequence token drawn) or
    "length" (max_tokens reached). texts: decoded responses without special tokens. version: of the weights that generated them.
    """

    prompt_ids: list[torch.Tensor]
    response_ids: list[torch.Tensor]
    logprobs: list[torch.Tensor]
    finish_reasons: list[str]
    texts: list[str]
    version: int

    def __post_init__(self) -> None:
        sizes = {len(v) for v in (self.prompt_ids, self.response_ids, self.logprobs, self.finish_reasons, self.texts)}
        if len(sizes) != 1:
            raise ValueError(f"Rollouts: lists of different lengths {sorted(sizes)}")
        for i, (ids, logp) in enumerate(zip(self.response_ids, self.logprobs)):
            if len(ids) == 0 or len(ids) != len(logp):
                raise ValueError(f"Rollouts: response {i} has {len(ids)} tokens and {len(logp)} log-probs; at least 1, and as many of each")

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def tokens(self) -> int:
        """Generated tokens of the batch (the loss divisor)."""
        return sum(len(r) for r in self.response_ids)

    def shared(self, model) -> int:
        """Tokens at the beginning of all prompts that a pass of `model` over these rows may compute once; 0 where that would not be exact."""
        columns = max(map(len, self.prompt_ids)) + max(map(len, self.response_ids))
        shared = shared_prefix(self.prompt_ids)
        return shared if shared and can_share_prefix(model, columns) else 0

    def select(self, indices: Sequence[int]) -> Rollouts:
        """The rollouts at `indices`, in that order."""
        pick = lambda values: [values[i] for i in indices]  # noqa: E731
        lists = (self.prompt_ids, self.response_ids, self.logprobs, self.finish_reasons, self.texts)
        return Rollouts(*(pick(v) for v in lists), version=self.version)

    def padded(self, pad_id: int, skip: int = 0) -> dict[str, torch.Tensor]:
        """Rectangular tensors [B, T]: prompts padded on the left, responses on the right, so that responses share their first column.

        skip: leave out the first `skip` tokens of every prompt (a prefix that is computed apart).
        input_ids int64, attention_mask int64, response_mask bool (True at response tokens; the context of column t is column t-1),
        rollout_logprobs fp32 (0 outside responses). Built from lengths, never from token ids: pad and end-of-sequence may coincide.
        """
        if len(self) == 0:
            raise ValueError("Rollouts.padded: no rollouts")
        if not 0 <= skip < min(len(p) for p in self.prompt_ids):
            raise ValueError(f"Rollouts.padded: skip = {skip}; the shortest prompt has {min(len(p) for p in self.prompt_ids)} tokens, one must stay")
        width_P = max(len(p) for p in self.prompt_ids) - skip
        width_R = max(len(r) for r in self.response_ids)
        shape = (len(self), width_P + width_R)
        input_ids = torch.full(shape, pad_id, dtype=torch.int64)
        attention_mask = torch.zeros(shape, dtype=torch.int64)
        response_mask = torch.zeros(shape, dtype=torch.bool)
        logprobs = torch.zeros(shape, dtype=torch.float32)
        for i, (prompt, response, logp) in enumerate(zip((p[skip:] for p in self.prompt_ids), self.response_ids, self.logprobs)):
            first, last = width_P - len(prompt), width_P + len(response)
            input_ids[i, first:last] = torch.cat([prompt, response])
            attention_mask[i, first:last] = 1
            response_mask[i, width_P:last] = True
            logprobs[i, width_P:last] = logp
        return {"input_ids": input_ids, "attention_mask": attention_mask, "response_mask": response_mask, "rollout_logprobs": logprobs}


def end_ids(generation_config, tokenizer) -> tuple[int, ...]:
    """End-of-sequence tokens: the generation config's (or None), and the tokenizer's."""
    ends = getattr(generation_config, "eos_token_id", None)
    ends = [ends] if isinstance(ends, int) else list(ends or [])
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ends:
        ends.append(tokenizer.eos_token_id)
    if not ends:
        raise ValueError("neither the model's generation config nor the tokenizer names an end-of-sequence token")
    return tuple(ends)


def check_request(prompts: list[list[int]], sampling: SamplingConfig, seed: int, vocabulary: int, room: int | None) -> None:
    """What every engine asks of `generate`; room: tokens of prompt and response together. Raises ValueError or TypeError."""
    if not isinstance(sampling, SamplingConfig):
        raise TypeError(f"generate: sampling is a {type(sampling).__name__}; expected SamplingConfig")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"generate: seed = {seed!r}; allowed is an integer in 0 <= seed < 2**63")
    if not prompts:
        raise ValueError("generate: no prompts")
    for i, p in enumerate(prompts):
        if isinstance(p, str) or len(p) == 0 or not all(isinstance(t, int) and 0 <= t < vocabulary for t in p):
            raise ValueError(f"generate: prompt {i} must be a non-empty list of token ids in 0 <= id < {vocabulary}; got {str(p)[:60]!r}")
        if room is not None and len(p) + sampling.max_tokens > room:
            raise ValueError(f"generate: prompt {i} has {len(p)} tokens; with max_tokens {sampling.max_tokens} it exceeds the model's {room}")


@dataclass(frozen=True)
class Staged:
    """A message that an engine has checked and not taken yet. One of the two is called, once; until then the engine may stand still."""

    commit: Callable[[], None]
    abort: Callable[[], None]


class RolloutEngine(Protocol):
    """What the trainer needs of an engine; `sync` and `resync` take bytes as they would arrive over a wire, `stage` either kind.

    room: tokens of prompt and response together that it takes (None: not known).
    """

    version: int
    room: int | None

    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seed: int, expected_version: int | None = None) -> Rollouts: ...
    def sync(self, update: bytes | SketchUpdate) -> None: ...
    def resync(self, payload: bytes) -> None: ...
    def stage(self, message: bytes) -> Staged: ...
    def fingerprint(self) -> str: ...
    def close(self) -> None: ...


class _Recorder:
    """Last logits processor: log-prob of each drawn token, one step late (the token of step t is seen at step t+1).

    Keeps one [B, V] tensor instead of `output_scores`' one per step. Refuses scores that do not normalise (NaN, +inf, all -inf).
    """

    def __init__(self) -> None:
        self.columns: list[torch.Tensor] = []  # fp32 [B] each
        self._scores: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._scores is not None:
            self.finish(input_ids[:, -1])
        norm = torch.logsumexp(scores, dim=-1)
        if not torch.isfinite(norm).all():
            rows = (~torch.isfinite(norm)).nonzero().flatten().tolist()
            raise RolloutError(f"logits are not finite at generated token {len(self.columns)} of batch rows {rows[:8]}; nothing was sampled")
        self._scores, self._norm = scores, norm
        return scores

    def finish(self, last_ids: torch.Tensor) -> None:
        self.columns.append(self._scores.gather(1, last_ids[:, None])[:, 0] - self._norm)
        self._scores = None


class TransformersRollout:
    """`model.generate` on an own copy of the policy, in this process.

    model: a causal LM that the engine takes over (hand it a copy of its own; sketches must not be attached to it). targets: as in
    `SketchConfig.targets`, the layers that follow the trainer's. run_id, version: what the weights are now (None: the first message
    decides). rounding: how the trainer keeps its weights (fp32 masters unless told). batch_rows: sequences per `generate` call; fixes the result too, like the thread count.
    """

    def __init__(
        self, model, tokenizer, targets: tuple[str, ...], run_id: str | None = None, version: int = 0, batch_rows: int = 64,
        rounding: Masters | None = None,
    ) -> None:  # fmt: skip
        from transformers import GenerationConfig

        if batch_rows < 1:
            raise ValueError(f"TransformersRollout: batch_rows = {batch_rows}; allowed is >= 1")
        refuse_padding(model)
        self.model, self.tokenizer, self.batch_rows = model.eval().requires_grad_(False), tokenizer, batch_rows
        rooms = (getattr(model.config, "max_position_embeddings", None), exact_room(model))
        self.room = min((r for r in rooms if r), default=None)
        self.eos_ids = ends = end_ids(getattr(model, "generation_config", None), tokenizer)
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
        # generate() fills unset options from the model's own generation config (top_k, repetition_penalty, ...): they would bend the
        # sampling distribution behind our back, so the copy gets an empty one.
        model.generation_config = GenerationConfig(eos_token_id=list(ends), pad_token_id=self.pad_id)
        self._replica = Replica(model, targets, run_id, version, rounding)

    @property
    def version(self) -> int:
        return self._replica.version

    def sync(self, update: bytes | SketchUpdate) -> None:
        """Apply the update that leads from `version` to `version + 1`; anything else raises `SyncError` and changes nothing."""
        self._replica.apply(update)

    def resync(self, payload: bytes) -> None:
        """Replace the weights by a full state (`sync.full_state_bytes`)."""
        self._replica.resync(payload)

    def stage(self, message: bytes) -> Staged:
        """Check a message of either kind; changes nothing before `commit`."""
        full = message_header(message)["kind"] == "full"
        return Staged(self._replica.prepare_full(message) if full else self._replica.prepare(message), lambda: None)

    def fingerprint(self) -> str:
        return self._replica.fingerprint()

    def close(self) -> None:
        self.model = None

    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seed: int, expected_version: int | None = None) -> Rollouts:
        """One response per prompt: a function of (weights, prompts, sampling, seed) alone; the global random state is left as found.

        Prompts are processed in order of length, `batch_rows` at a time, and returned in the order given. Raises `ValueError` for bad
        prompts or seed, `SyncError` if the engine's version is not `expected_version`, `RolloutError` for logits that are not finite.
        """
        self._check(prompts, sampling, seed, expected_version)
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))  # like lengths together: less padding
        made: list[tuple] = [()] * len(prompts)
        device = self.model.get_input_embeddings().weight.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.inference_mode():
            torch.manual_seed(seed)
            for start in range(0, len(order), self.batch_rows):
                rows = order[start : start + self.batch_rows]
                for i, result in zip(rows, self._generate_rows([prompts[i] for i in rows], sampling, device)):
                    made[i] = result
        texts = self.tokenizer.batch_decode([m[0].tolist() for m in made], skip_special_tokens=True)
        return Rollouts(
            [torch.tensor(p, dtype=torch.int64) for p in prompts], [m[0] for m in made], [m[1] for m in made], [m[2] for m in made],
            list(texts), self.version,
        )

    def _generate_rows(self, prompts: list[list[int]], sampling: SamplingConfig, device: torch.device) -> list[tuple]:
        from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

        width, shared = max(map(len, prompts)), shared_prefix(prompts)
        if shared and not can_share_prefix(self.model, width + sampling.max_tokens):
            shared = 0
        input_ids = torch.full((len(prompts), width), self.pad_id, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for i, p in enumerate(prompts):  # shared beginning, padding, rest
            input_ids[i, :shared], input_ids[i, width - len(p) + shared :] = torch.tensor(p[:shared]), torch.tensor(p[shared:])
            attention_mask[i, :shared], attention_mask[i, width - len(p) + shared :] = 1, 1
        cache = None
        if shared:
            cache = self.model(input_ids[:1, :shared].to(device), use_cache=True, logits_to_keep=1).past_key_values
            cache.batch_repeat_interleave(len(prompts))
        recorder = _Recorder()
        greedy = sampling.temperature == 0
        warpers = LogitsProcessorList()
        if not greedy and sampling.temperature != 1:
            warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if not greedy and sampling.top_p < 1:
            warpers.append(TopPLogitsWarper(float(sampling.top_p)))
        warpers.append(recorder)  # last: what it sees is what is sampled from
        out = self.model.generate(
            input_ids.to(device), attention_mask=attention_mask.to(device), logits_processor=warpers, do_sample=not greedy,
            temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=sampling.max_tokens, use_cache=True,
            past_key_values=cache,
        )  # fmt: skip
        recorder.finish(out[:, -1])
        response_ids, logp = out[:, width:].cpu(), torch.stack(recorder.columns, dim=1).float().cpu()
        if response_ids.shape != logp.shape:
            raise RolloutError(f"generate returned {tuple(response_ids.shape)} tokens for {tuple(logp.shape)} recorded log-probs")
        ended = torch.isin(response_ids, torch.tensor(self.eos_ids))
        results = []
        for i in range(len(prompts)):
            ends = ended[i].nonzero().flatten()
            length = int(ends[0]) + 1 if len(ends) else response_ids.shape[1]
            results.append((response_ids[i, :length].clone(), logp[i, :length].clone(), "stop" if len(ends) else "length"))
        return results

    def _check(self, prompts, sampling, seed, expected_version) -> None:
        if self.model is None:
            raise RolloutError("the engine was closed")
        check_request(prompts, sampling, seed, self.model.get_input_embeddings().num_embeddings, self.room)
        if expected_version is not None and expected_version != self.version:
            raise SyncError(f"the rollout engine is at version {self.version}, the trainer expects {expected_version}: an update was missed")

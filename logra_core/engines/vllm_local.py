"""Rollouts from vLLM: the engine of `RolloutEngine` that follows the trainer through the `logra` weight-transfer backend.

Belongs here: `VLLMRollout` and what makes its results a function of (weights, prompts, sampling, seed) alone. Importing this file needs
no vLLM; constructing the engine does, and says so. How weights get in is backend.py and sender.py.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..sync import SketchUpdate, SyncError
from .plugin import BACKEND, environment, register
from .policy import embedded_policy
from .rollout import RolloutError, Rollouts, SamplingConfig, Staged, check_request, end_ids

MAX_SEED = 2**63 - 1
# What every engine needs, in this process or as a server, by vLLM's own names.
SERVING = {
    "dtype": "bfloat16", "generation_config": "vllm", "logprobs_mode": "processed_logprobs", "weight_transfer_config": {"backend": BACKEND},
    "worker_extension_cls": "logra_core.engines.backend.WorkerExtension",
}  # fmt: skip

# vLLM's CPU worker cannot give back the random numbers that a seeded request drew in a step that took a part of its prompt: no parts.
ON_CPU = {"enforce_eager": True, "enable_chunked_prefill": False}


class _Served:
    """What rollouts from a vLLM share, wherever it runs: version and digests from the worker, messages, and the reading of answers."""

    own_process = True  # calls from several threads to several engines do not disturb each other
    sender: Any = None
    tokenizer: Any
    vocabulary: int
    room: int | None

    @property
    def version(self) -> int:
        return self._status()["version"]

    def sync(self, update: bytes | SketchUpdate) -> None:
        """Commit the update that leads from `version` to `version + 1`; anything else raises `SyncError` and changes nothing."""
        self._open()
        self.sender.send_weights(update.to_bytes() if isinstance(update, SketchUpdate) else bytes(update))

    def resync(self, payload: bytes) -> None:
        """Replace the target weights by a full state (`sync.full_state_bytes`)."""
        self._open()
        self.sender.send_weights(payload)

    def stage(self, message: bytes) -> Staged:
        """Have the workers check a message of either kind; the engine stands still until `commit` or `abort`."""
        self._open()
        self.sender.stage(message)
        return Staged(self.sender.commit, self.sender.abort)

    def fingerprint(self) -> str:
        """Of the worker's fp32 masters, else of what it serves ("" before the first resync); served was compared at the last commit."""
        return self._status("masters").get("fingerprint", "")

    def served_fingerprint(self) -> str:
        """Of the weights that the engine multiplies by, read back; equal to the trainer's `weights.fingerprint(torch.bfloat16)`."""
        return self._status("served").get("served", "")

    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seed: int, expected_version: int | None = None) -> Rollouts:
        """One response per prompt, each with a random stream of its own out of `seed` and its place in the list.

        Raises as `TransformersRollout.generate`; also RolloutError if a response was not made by the current version alone.
        """
        self._open()
        check_request(prompts, sampling, seed, self.vocabulary, self.room)
        status = self._status()
        if expected_version is not None and expected_version != status["version"]:
            raise SyncError(f"the rollout engine is at version {status['version']}, the trainer expects {expected_version}: an update was missed")
        if not status["consistent"]:
            raise SyncError("the engine may serve a mixture of versions since a failed roll back: send a full resync")
        answers = self._run(prompts, [self._sampling(sampling, seed, i) for i in range(len(prompts))])
        return self._collect(prompts, answers, status)

    def _sampling(self, sampling: SamplingConfig, seed: int, row: int) -> dict[str, Any]:
        own = None if sampling.temperature == 0 else (seed + row * 0x9E3779B97F4A7C15) % MAX_SEED
        return {
            "max_tokens": sampling.max_tokens, "temperature": float(sampling.temperature), "top_p": float(sampling.top_p), "top_k": 0, "seed": own,
            "logprobs": 0, "detokenize": False, "stop_token_ids": list(self.eos_ids),
        }  # fmt: skip

    def _collect(self, prompts: list[list[int]], answers: list[Answer], status: dict) -> Rollouts:
        if len(answers) != len(prompts):
            raise RolloutError(f"vLLM answered {len(answers)} of {len(prompts)} requests")
        label = f"{status['run_id']}:{status['version']}" if status["run_id"] else "default"
        for answer in answers:
            if answer.reason not in ("stop", "length"):
                raise RolloutError(f"a response ended with {answer.reason!r}; expected stop or length")
            if spans := [v for v in answer.versions if v != label]:
                raise RolloutError(f"a response was made by weights {spans[0]}, the engine is at {label}")
        logprobs = [torch.tensor(a.logprobs, dtype=torch.float32) for a in answers]
        if bad := [i for i, logp in enumerate(logprobs) if not torch.isfinite(logp).all()]:
            raise RolloutError(f"log-probs of responses {bad[:8]} are not finite")
        texts = self.tokenizer.batch_decode([a.ids for a in answers], skip_special_tokens=True)
        ids = [[torch.tensor(i, dtype=torch.int64) for i in rows] for rows in (prompts, [a.ids for a in answers])]
        return Rollouts(*ids, logprobs, [a.reason for a in answers], texts, status["version"])

    def _status(self, digests: str = "") -> dict[str, Any]:
        self._open()
        first, *others = self.sender.client.status(digests)
        if differ := [o for o in others if o != first]:
            raise SyncError(f"workers differ: {first} and {differ[0]}")
        return first

    def _open(self) -> None:
        if self.sender is None:
            raise RolloutError("the engine was closed")


class VLLMRollout(_Served):
    """An in-process vLLM with its own copy of the policy, served in bfloat16; its worker keeps fp32 masters if the trainer does.

    path: folder of a plain checkpoint (None: the embedded policy). tokenizer: decodes the responses (None: the one in `path`).
    max_model_len: tokens of prompt and response together (None: the model's own limit). kv_cache_gib: memory for keys and values.
    max_num_seqs: requests that run together. options: further arguments of `vllm.LLM`. On a CPU the model runs eagerly (nothing is
    compiled at start; at this size it is no slower). log: file for what the engine's processes print (None: where this process prints).
    Results are a function of (weights, prompts, sampling, seed) alone, on one machine and thread count.
    """

    def __init__(
        self, path: str | Path | None = None, tokenizer=None, max_model_len: int | None = None, kv_cache_gib: float = 1.0,
        max_num_seqs: int = 64, log: str | Path | None = None, **options: Any,
    ) -> None:  # fmt: skip
        vllm, sender = import_vllm()
        register()  # for a source tree that was never installed; the worker processes need the entry point
        settings = {
            "max_model_len": max_model_len,
            "kv_cache_memory_bytes": int(kv_cache_gib * 2**30), "max_num_seqs": max_num_seqs, "seed": 0, "disable_log_stats": True,
        } | ({} if torch.cuda.is_available() else ON_CPU)  # fmt: skip
        path = embedded_policy() if path is None else path
        try:
            with _printing_to(log):  # the engine's processes keep what is open here
                self.llm = vllm.LLM(model=str(path), **(SERVING | settings | options))
        except Exception as error:
            raise RolloutError(f"vLLM did not start: {error}{'' if log is None else f' (its own words: {log})'}") from error
        self.tokenizer, self.eos_ids = tokenizer_and_ends(path, self.llm.model_config.hf_config, tokenizer)
        self.vocabulary, self.room = self.llm.model_config.hf_text_config.vocab_size, self.llm.model_config.max_model_len
        self.sender = sender.LoGRASender.trainer_init(sender.SenderInfo(rank=0), client=sender.LLMClient(self.llm))
        self._params = vllm.SamplingParams

    def close(self) -> None:
        """Stop the engine's process."""
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = self.sender = None

    def _run(self, prompts: list[list[int]], params: list[dict]) -> list[Answer]:
        # Requests reach the engine one by one; it is held until all are there, so that batches do not depend on timing. An empty cache does
        # the rest: a cached prefix changes the order of additions, and with it the last bits.
        llm = self.llm
        if llm.llm_engine.is_sleeping():
            raise RolloutError("the engine sleeps: wake it before a rollout")
        if not llm.reset_prefix_cache():
            raise RolloutError("prefix cache not reset: requests of somebody else are running")
        llm.sleep(level=0)
        try:
            llm.enqueue([{"prompt_token_ids": list(p)} for p in prompts], [self._params(**p) for p in params], use_tqdm=False)
        finally:
            llm.wake_up(tags=["scheduling"])
        results = llm.wait_for_completion(use_tqdm=False)
        if [list(r.prompt_token_ids) for r in results] != [list(p) for p in prompts]:
            raise RolloutError("vLLM returned its answers in another order")
        outs = [r.outputs[0] for r in results]
        return [
            Answer(list(o.token_ids), [step[t].logprob for step, t in zip(o.logprobs, o.token_ids, strict=True)], o.finish_reason,
                   [v.version for v in o.weight_versions or []])
            for o in outs
        ]  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """One response as an engine returns it. versions: labels of the weights that drew its tokens."""

    ids: list[int]
    logprobs: list[float]
    reason: str
    versions: list[str]


def import_vllm():
    """vLLM and the module `sender`; the ImportError says what is missing."""
    try:
        os.environ |= environment()  # read by vLLM's processes when they start
        import vllm

        from . import sender
    except ImportError as error:
        raise ImportError(f'engine "vllm" needs vLLM, which cannot be imported here ({error}); install it or use engine "transformers"') from error
    return vllm, sender


@contextlib.contextmanager
def _printing_to(path: str | Path | None):
    """File descriptors 1 and 2 lead to `path` meanwhile, for this process and for those it starts."""
    if path is None:
        yield
        return
    sys.stdout.flush(), sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with open(path, "ab") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os.dup2(kept[0], 1), os.dup2(kept[1], 2)
        os.close(kept[0]), os.close(kept[1])


def tokenizer_and_ends(path: str | Path, config: Any = None, tokenizer=None):
    """The tokenizer in `path` (or the one given), and the end-of-sequence tokens of the generation config there."""
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(str(path)) if tokenizer is None else tokenizer
    try:
        found = GenerationConfig.from_pretrained(str(path))
    except OSError:
        found = config
    return tokenizer, end_ids(found, tokenizer)

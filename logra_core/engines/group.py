"""Several rollout engines behind the protocol of one.

Belongs here: how prompts are divided and how one message reaches all engines or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..sync import SketchUpdate, SyncError, message_header
from .rollout import RolloutEngine, Rollouts, SamplingConfig, Staged


class EngineGroup:
    """engines: each with its own copy of the policy, all at one version. Prompts are divided into contiguous parts of nearly equal size.

    A message is staged at every engine before the first one commits it: one refusal, and all stay where they were. If a commit itself
    fails (an engine had drifted, or died), engines stand at different versions; `generate` then refuses until a full resync.
    """

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        if not engines:
            raise ValueError("EngineGroup: no engines; at least 1 is needed")
        self.engines = list(engines)

    @classmethod
    def start(cls, makers: Sequence[Callable[[], RolloutEngine]]) -> EngineGroup:
        """Call every maker; if one fails, close those already made."""
        made: list[RolloutEngine] = []
        try:
            for make in makers:
                made.append(make())
        except BaseException:
            for engine in made:
                engine.close()
            raise
        return cls(made)

    @property
    def tokenizer(self) -> Any:
        return self.engines[0].tokenizer

    @property
    def version(self) -> int:
        """Of all engines. Raises SyncError if they differ."""
        return self._same("versions", [e.version for e in self.engines])

    @property
    def room(self) -> int | None:
        """Tokens of prompt and response together that every engine takes (None: not known of any)."""
        return min((e.room for e in self.engines if e.room is not None), default=None)

    def fingerprint(self) -> str:
        """Of all engines. Raises SyncError if they differ."""
        return self._same("weights", [e.fingerprint() for e in self.engines])

    def sync(self, update: bytes | SketchUpdate) -> None:
        """As one engine's, at all of them or none."""
        self.stage(update.to_bytes() if isinstance(update, SketchUpdate) else bytes(update)).commit()

    def resync(self, payload: bytes) -> None:
        """As one engine's; brings engines that differ together again."""
        self.stage(payload).commit()

    def stage(self, message: bytes) -> Staged:
        """Stage at every engine. Raises SyncError, naming the engine that refused, with all of them as they were."""
        staged: list[Staged] = []
        for i, engine in enumerate(self.engines):
            try:
                staged.append(engine.stage(message))
            except Exception as error:
                self._abort(staged)
                raise SyncError(f"engine {i} of {len(self.engines)} refused, none has changed: {error}") from error

        def commit() -> None:
            for i, one in enumerate(staged):
                try:
                    one.commit()
                except Exception as error:
                    self._abort(staged[i + 1 :])
                    raise SyncError(f"engine {i} of {len(staged)} could not commit ({self._reached(i, message)}): {error}") from error

        return Staged(commit, lambda: self._abort(staged))

    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seed: int, expected_version: int | None = None) -> Rollouts:
        """As one engine's; engines in processes of their own work in parallel. Whether it repeats bit for bit is as with one engine."""
        if not prompts:
            raise ValueError("generate: no prompts")
        version = self.version
        if expected_version is not None and expected_version != version:
            raise SyncError(f"the rollout engines are at version {version}, the trainer expects {expected_version}: an update was missed")
        share, more = divmod(len(prompts), len(self.engines))
        ends = [(i + 1) * share + min(i + 1, more) for i in range(len(self.engines))]
        parts = [prompts[a:b] for a, b in zip([0, *ends], ends)]
        # Engines in this process share torch's random state, so they take turns.
        apart = all(getattr(e, "own_process", False) for e in self.engines)
        with ThreadPoolExecutor(max_workers=len(self.engines) if apart else 1) as pool:
            jobs = [pool.submit(e.generate, p, sampling, (seed + i) % 2**63, version) for i, (e, p) in enumerate(zip(self.engines, parts)) if p]
        made = [j.result() for j in jobs]
        return Rollouts(*(sum((getattr(m, field) for m in made), []) for field in ROWS), version)

    def close(self) -> None:
        """Close every engine."""
        for engine in self.engines:
            engine.close()

    def _reached(self, i: int, message: bytes) -> str:
        """Who has taken a message that engine i failed to commit, in words; it may have failed after its weights had changed."""
        if (took := _took(self.engines[i], message)) is None:
            others = f"engines 0 to {i - 1} took the message" if i else "the others have not"
            return f"the engine may have changed, {others}: send a full resync"
        if not (count := i + took):
            return "none has taken the message"
        return f"engines 0 to {count - 1} took the message{', the others did not' * (count < len(self.engines))}: send a full resync"

    @staticmethod
    def _abort(staged: list[Staged]) -> None:
        for one in staged:
            one.abort()

    def _same(self, what: str, values: list) -> Any:
        if len(set(values)) != 1:
            raise SyncError(f"{what} of the engines differ ({', '.join(map(str, values))}): send a full resync")
        return values[0]


def _took(engine: RolloutEngine, message: bytes) -> bool | None:
    """Whether an engine is at a message's version; None if it cannot be asked, or its weights are not those of the message."""
    try:
        header = message_header(message)
        if engine.version != header["version"]:
            return False
        return True if engine.fingerprint() == header["fingerprint"] else None
    except Exception:  # whatever an engine that died raises
        return None


ROWS = ("prompt_ids", "response_ids", "logprobs", "finish_reasons", "texts")

"""Several engines as one: a message reaches all or none, prompts come back in order. Tiny models here; on real engines: test_vllm_http.py."""

from __future__ import annotations

import pytest
import torch
from models import policy_loss
from tiny import tiny_policy

from logra_core.engines.group import EngineGroup
from logra_core.engines.policy import load_policy
from logra_core.engines.rollout import SamplingConfig, Staged, TransformersRollout
from logra_core.optim import LoGRA
from logra_core.rl.engine import make_engine
from logra_core.rl.settings import TrainConfig
from logra_core.settings import ConfigError
from logra_core.sync import SyncError, full_state_bytes
from logra_core.variants import OptimConfig, SketchConfig

TARGETS = SketchConfig().targets
PROMPTS = [[5, 6, 7], [40], [9, 1, 9, 30, 31], [5, 6, 7], [60, 61]]
SAMPLING = SamplingConfig(max_tokens=6, temperature=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def parts(folder):
    """A trainer, two engines and their group, in step."""
    logra = LoGRA(load_policy(folder)[0], SketchConfig(rank=4), OptimConfig(update_ratio=1e-3))
    engines = [TransformersRollout(*load_policy(folder), TARGETS) for _ in range(2)]
    group = EngineGroup(engines)
    group.resync(full_state_bytes(logra.weights, logra.run_id, logra.version))
    return logra, engines, group


def next_update(logra) -> bytes:
    policy_loss(logra.model, torch.randint(2, 90, (2, 9), generator=torch.Generator().manual_seed(logra.version)), logra.version).backward()
    return logra.apply(logra.propose(), 0.9).to_bytes(logra.weights.fingerprint())


def test_updates_reach_every_engine(parts):
    logra, engines, group = parts
    for _ in range(3):
        group.sync(next_update(logra))
    assert group.version == 3 and group.fingerprint() == logra.weights.fingerprint() == engines[1].fingerprint()


def test_prompts_are_divided_and_come_back_in_order(parts):
    _, engines, group = parts
    made = group.generate(PROMPTS, SAMPLING, 11)
    first, second = engines[0].generate(PROMPTS[:3], SAMPLING, 11), engines[1].generate(PROMPTS[3:], SAMPLING, 12)
    assert [p.tolist() for p in made.prompt_ids] == PROMPTS and made.texts == first.texts + second.texts
    assert all(torch.equal(a, b) for a, b in zip(made.logprobs, first.logprobs + second.logprobs, strict=True))
    alone = group.generate(PROMPTS[:1], SAMPLING, 11)  # fewer prompts than engines
    assert alone.texts == engines[0].generate(PROMPTS[:1], SAMPLING, 11).texts


def test_a_refusal_by_the_second_engine_leaves_the_first_as_it_was(parts):
    logra, engines, group = parts
    one, two = next_update(logra), next_update(logra)
    engines[1].sync(one)
    before = [e.fingerprint() for e in engines]
    with pytest.raises(SyncError, match=r"engine 1 of 2 refused, none has changed: .*repeated or out of order"):
        group.sync(one)
    assert [e.fingerprint() for e in engines] == before and [e.version for e in engines] == [0, 1]
    with pytest.raises(SyncError, match="versions of the engines differ"):
        group.generate(PROMPTS, SAMPLING, 0)
    with pytest.raises(SyncError, match="engine 0 of 2 refused"):
        group.sync(two)
    group.resync(full_state_bytes(logra.weights, logra.run_id, logra.version))
    assert group.version == 2 and group.fingerprint() == logra.weights.fingerprint()


def test_a_commit_that_fails_names_the_engine_and_a_resync_heals(parts):
    logra, engines, group = parts
    engines[1].model.model.layers[0].mlp.up_proj.weight.mul_(1.5)  # drift, which only the fingerprint after the merge can see
    with pytest.raises(SyncError, match=r"engine 1 of 2 could not commit \(engines 0 to 0 took the message"):
        group.sync(next_update(logra))
    with pytest.raises(SyncError, match="versions of the engines differ"):
        group.generate(PROMPTS, SAMPLING, 0)
    group.resync(full_state_bytes(logra.weights, logra.run_id, logra.version))
    assert group.fingerprint() == logra.weights.fingerprint()


@pytest.mark.parametrize("asked", [True, False])
def test_the_first_engine_that_fails_after_it_took_the_message_is_not_called_unchanged(parts, asked):
    """As when vLLM's prefix cache cannot be reset: the new weights are served by then."""
    logra, engines, group = parts
    stage = engines[0].stage

    def taken_and_failed(commit):
        commit()
        if not asked:
            engines[0]._replica = None  # it died
        raise RuntimeError("prefix cache not reset")

    engines[0].stage = lambda message: Staged(lambda commit=stage(message).commit: taken_and_failed(commit), lambda: None)
    told = "engines 0 to 0 took the message, the others did not" if asked else "the engine may have changed, the others have not"
    with pytest.raises(SyncError, match=rf"engine 0 of 2 could not commit \({told}: send a full resync\): prefix cache not reset"):
        group.sync(next_update(logra))
    assert engines[1].version == 0 and (not asked or engines[0].version == 1)


def test_a_first_commit_that_changed_nothing_says_so(parts):
    logra, engines, group = parts
    engines[0].model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    with pytest.raises(SyncError, match=r"engine 0 of 2 could not commit \(none has taken the message\)"):
        group.sync(next_update(logra))
    assert [e.version for e in engines] == [0, 0]


def test_a_group_has_room_for_what_every_engine_takes(parts):
    _, engines, group = parts
    assert group.room == 256
    engines[0].room, engines[1].room = 64, None
    assert group.room == 64


def test_an_engine_that_cannot_start_closes_those_before_it(folder):
    made = []

    def make():
        made.append(TransformersRollout(*load_policy(folder), TARGETS))
        return made[-1]

    with pytest.raises(ZeroDivisionError):
        EngineGroup.start([make, lambda: 1 / 0])
    assert made[0].model is None
    with pytest.raises(ValueError, match="no engines"):
        EngineGroup([])


def test_settings(folder):
    group = make_engine(TrainConfig(model=str(folder), engines=2))
    assert isinstance(group, EngineGroup) and len(group.engines) == 2 and group.engines[0].model is not group.engines[1].model
    assert TrainConfig(engine="vllm", engine_urls=["http://a"]).engine_urls == ("http://a",)
    for bad in ({"engines": 0}, {"engine_urls": ("http://a",)}, {"engine": "vllm", "engines": 2, "engine_urls": ("http://a",)}):
        with pytest.raises(ConfigError, match="engine"):
            TrainConfig(**bad)

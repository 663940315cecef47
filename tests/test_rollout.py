"""rollout.py on a tiny Llama: log-probs against a float64 forward, seeds, finish reasons, versions, refusals."""

import copy
import json
import math
import sys

import pytest
import torch
from tiny import tiny_policy

from logra_core.engines.policy import at_home, load_policy
from logra_core.engines.rollout import RolloutError, Rollouts, SamplingConfig, TransformersRollout, shared_prefix
from logra_core.optim import LoGRA
from logra_core.rl.engine import make_engine
from logra_core.rl.settings import TrainConfig
from logra_core.settings import ConfigError
from logra_core.sync import SyncError, full_state_bytes
from logra_core.variants import OptimConfig, SketchConfig
from logra_core.weights import Weights

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPTS = [[5, 6, 7], [40], [9, 1, 9, 30, 31, 32, 33, 34], [5, 6, 7], [60, 61, 62, 63, 64]]  # one holds the pad id


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def engine(folder):
    return TransformersRollout(*load_policy(folder), TARGETS)


def reference_logprobs(model, prompt, response, temperature, top_p):
    """Float64, one sequence, no padding, no cache: log-probs of the distribution after temperature, then top-p."""
    with torch.no_grad():
        logits = model.double()(torch.tensor([prompt + response])).logits[0]
    model.float()
    values = []
    for t, token in enumerate(response):
        p = torch.softmax(logits[len(prompt) + t - 1] / temperature, -1)
        order = p.argsort(descending=True)
        kept, total = [], 0.0
        for v in order.tolist():  # the smallest set of likeliest tokens whose mass reaches top_p
            kept.append(v)
            total += float(p[v])
            if total >= top_p:
                break
        values.append(math.log(float(p[token]) / total) if token in kept else -math.inf)
    return values


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.7, 1.0), (0.7, 0.7), (1.0, 0.5)])
def test_logprobs_are_those_of_the_sampling_distribution(engine, temperature, top_p):
    made = engine.generate(PROMPTS, SamplingConfig(12, temperature, top_p), seed=3)
    model = copy.deepcopy(engine.model)
    for prompt, response, logp in zip(PROMPTS, made.response_ids, made.logprobs):
        expected = reference_logprobs(model, prompt, response.tolist(), temperature, top_p)
        assert logp.dtype == torch.float32
        assert logp.tolist() == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.7)])
def test_a_shared_beginning_changes_nothing(engine, temperature, top_p, monkeypatch):
    shared = list(range(20, 32))
    prompts = [shared + p for p in PROMPTS]
    assert shared_prefix(prompts) == 12 and shared_prefix(PROMPTS) == 0
    assert shared_prefix([shared, shared]) == 11 and shared_prefix([shared]) == 0  # each keeps a token; one row shares with nobody
    assert shared_prefix([torch.tensor(shared + [5]), torch.tensor(shared[:10] + [6, 7, 8])]) == 10
    made = engine.generate(prompts, SamplingConfig(12, temperature, top_p), seed=3)
    assert [p.tolist() for p in made.prompt_ids] == prompts
    model = copy.deepcopy(engine.model)
    for prompt, response, logp in zip(prompts, made.response_ids, made.logprobs):
        assert logp.tolist() == pytest.approx(reference_logprobs(model, prompt, response.tolist(), temperature, top_p), abs=5e-5)
    monkeypatch.setattr("logra_core.engines.rollout.MIN_SHARED", 100)
    apart = engine.generate(prompts, SamplingConfig(12, temperature, top_p), seed=3)
    assert all(torch.equal(a, b) for a, b in zip(made.response_ids, apart.response_ids))


def test_greedy_takes_the_likeliest_token_and_reports_temperature_one(engine):
    made = engine.generate(PROMPTS, SamplingConfig(8, 0.0, 0.3), seed=3)
    again = engine.generate(PROMPTS, SamplingConfig(8, 0.0), seed=99)
    assert all(torch.equal(a, b) for a, b in zip(made.response_ids, again.response_ids))
    model = copy.deepcopy(engine.model)
    for prompt, response, logp in zip(PROMPTS, made.response_ids, made.logprobs):
        response = response.tolist()
        assert logp.tolist() == pytest.approx(reference_logprobs(model, prompt, response, 1.0, 1.0), abs=5e-5)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == response


def test_sampled_frequencies_follow_the_reported_probabilities(engine):
    n = 4000
    made = engine.generate([[5, 6, 7]] * n, SamplingConfig(1, 1.0), seed=0)
    with torch.no_grad():
        p = torch.softmax(engine.model(torch.tensor([[5, 6, 7]])).logits[0, -1].double(), -1)
    counts = torch.bincount(torch.cat(made.response_ids), minlength=len(p)).double()
    for token in p.argsort(descending=True)[:8].tolist():
        sigma = math.sqrt(n * float(p[token]) * (1 - float(p[token])))
        assert abs(float(counts[token]) - n * float(p[token])) < 5 * sigma


def test_the_seed_decides_and_the_global_state_stays(engine):
    sampling = SamplingConfig(10)
    before = torch.random.get_rng_state()
    a = engine.generate(PROMPTS, sampling, seed=7)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(123)
    b, c = engine.generate(PROMPTS, sampling, seed=7), engine.generate(PROMPTS, sampling, seed=8)
    assert all(torch.equal(x, y) for x, y in zip(a.response_ids + a.logprobs, b.response_ids + b.logprobs))
    assert not all(torch.equal(x, y) for x, y in zip(a.response_ids, c.response_ids))
    assert not torch.equal(a.response_ids[0], a.response_ids[3])  # equal prompts draw separately


def test_stop_includes_the_end_token_and_length_does_not_invent_one(engine):
    eos = engine.eos_ids[0]
    assert engine.pad_id == eos
    with torch.no_grad():  # make the end token likely, but not certain
        engine.model.get_input_embeddings().weight[eos] *= 3
    made = engine.generate(PROMPTS * 20, SamplingConfig(6), seed=1)
    reasons = set(made.finish_reasons)
    assert reasons == {"stop", "length"}
    for response, reason, logp, text in zip(made.response_ids, made.finish_reasons, made.logprobs, made.texts):
        ids = response.tolist()
        assert len(ids) == len(logp)
        assert ids.count(eos) == (reason == "stop")
        assert (ids[-1] == eos) if reason == "stop" else (len(ids) == 6)
        assert text == "".join(chr(i + 30) for i in ids if i >= 2)


def test_the_models_own_generation_config_does_not_bend_sampling(folder, tmp_path):
    plain = TransformersRollout(*load_policy(folder), TARGETS).generate(PROMPTS, SamplingConfig(8), seed=5)
    model, tokenizer = load_policy(folder)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    extra = {"eos_token_id": [1, 50], "pad_token_id": 1, "do_sample": True, "top_k": 2, "temperature": 0.3, "top_p": 0.5}
    extra["repetition_penalty"] = 1.5
    (tmp_path / "generation_config.json").write_text(json.dumps(extra))
    bent = TransformersRollout(*load_policy(tmp_path), TARGETS)
    assert bent.eos_ids == (1, 50)  # its end tokens count, its sampling options do not
    made = bent.generate(PROMPTS, SamplingConfig(8), seed=5)
    for a, b in zip(plain.response_ids, made.response_ids):
        length = min(len(a), len(b))
        assert torch.equal(a[:length], b[:length])
        if len(b) < len(a):
            assert int(b[-1]) == 50


def test_splitting_a_batch_keeps_order_and_prompts(folder):
    small = TransformersRollout(*load_policy(folder), TARGETS, batch_rows=2)
    made = small.generate(PROMPTS, SamplingConfig(5, 0.0), seed=0)
    whole = TransformersRollout(*load_policy(folder), TARGETS).generate(PROMPTS, SamplingConfig(5, 0.0), seed=0)
    assert [p.tolist() for p in made.prompt_ids] == PROMPTS
    assert [r.tolist() for r in made.response_ids] == [r.tolist() for r in whole.response_ids]


def test_padded_layout_comes_from_lengths_not_from_ids():
    made = Rollouts(
        [torch.tensor([1, 1, 5]), torch.tensor([7])], [torch.tensor([8, 1]), torch.tensor([1, 9, 1])],
        [torch.tensor([-0.5, -1.0]), torch.tensor([-2.0, -3.0, -4.0])], ["stop", "length"], ["", ""], 4,
    )  # fmt: skip
    padded = made.padded(1)
    assert padded["input_ids"].tolist() == [[1, 1, 5, 8, 1, 1], [1, 1, 7, 1, 9, 1]]
    assert padded["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]
    assert padded["response_mask"].int().tolist() == [[0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1]]
    assert padded["rollout_logprobs"].tolist() == [[0, 0, 0, -0.5, -1, 0], [0, 0, 0, -2, -3, -4]]
    assert made.tokens == 5 and made.select([1]).padded(1)["input_ids"].tolist() == [[7, 1, 9, 1]]
    assert made.select([1]).version == 4
    assert made.select([0]).padded(1, skip=2)["input_ids"].tolist() == [[5, 8, 1]]
    with pytest.raises(ValueError, match="skip = 1"):
        made.padded(1, skip=1)
    with pytest.raises(ValueError, match="2 tokens and 1 log-probs"):
        Rollouts([torch.tensor([1])], [torch.tensor([1, 2])], [torch.tensor([0.0])], ["stop"], [""], 0)


def test_nan_logits_are_refused(engine):
    with torch.no_grad():
        engine.model.model.norm.weight[0] = float("nan")
    with pytest.raises(RolloutError, match="not finite at generated token 0"):
        engine.generate(PROMPTS, SamplingConfig(4), seed=0)


@pytest.mark.parametrize(
    ("prompts", "sampling", "seed", "error", "message"),
    [
        ([], SamplingConfig(4), 0, ValueError, "no prompts"),
        ([[]], SamplingConfig(4), 0, ValueError, "prompt 0"),
        ([[3], [97]], SamplingConfig(4), 0, ValueError, "prompt 1 .* id < 97"),
        (["text"], SamplingConfig(4), 0, ValueError, "prompt 0"),
        ([[3.0]], SamplingConfig(4), 0, ValueError, "prompt 0"),
        ([[3]], {"max_tokens": 4}, 0, TypeError, "expected SamplingConfig"),
        ([[3]], SamplingConfig(4), -1, ValueError, "seed = -1"),
        ([[3]], SamplingConfig(4), True, ValueError, "seed = True"),
        ([[3] * 10], SamplingConfig(250), 0, ValueError, "exceeds the model's 256"),
    ],
)
def test_bad_input_is_refused(engine, prompts, sampling, seed, error, message):
    with pytest.raises(error, match=message):
        engine.generate(prompts, sampling, seed)


def test_the_engine_follows_the_trainer_by_bytes_alone(folder):
    model, tokenizer = load_policy(folder)
    logra = LoGRA(model, SketchConfig(rank=4), OptimConfig(update_ratio=1e-2))
    weights = Weights({n: t.module for n, t in logra.targets.items()})
    engine = make_engine(TrainConfig(model=str(folder)))
    engine.resync(full_state_bytes(weights, logra.run_id, 0))
    first = engine.generate(PROMPTS, SamplingConfig(6), 0, expected_version=0)
    messages = []
    for _ in range(2):
        ids = torch.tensor([PROMPTS[2]])
        model(ids, labels=ids).loss.backward()
        messages.append(logra.apply(logra.propose(), 1.0).to_bytes(weights.fingerprint()))
    with pytest.raises(SyncError):
        engine.sync(messages[1])  # the first was dropped
    with pytest.raises(SyncError, match="at version 0, the trainer expects 2"):
        engine.generate(PROMPTS, SamplingConfig(6), 0, expected_version=2)
    for message in messages:
        engine.sync(message)
    assert engine.version == 2 and engine.fingerprint() == weights.fingerprint()
    moved = engine.generate(PROMPTS, SamplingConfig(6), 0, expected_version=2)
    assert (first.version, moved.version) == (0, 2)
    assert not all(torch.equal(a, b) for a, b in zip(first.logprobs, moved.logprobs))
    logra.detach()
    own = TransformersRollout(model, tokenizer, TARGETS)  # the trainer's own weights give the same bits
    assert all(torch.equal(a, b) for a, b in zip(moved.logprobs, own.generate(PROMPTS, SamplingConfig(6), 0).logprobs))
    engine.close()
    with pytest.raises(RolloutError, match="closed"):
        engine.generate(PROMPTS, SamplingConfig(6), 0)


def test_engines_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as where it is not installed
    with pytest.raises(ImportError, match='engine "vllm" needs vLLM'):
        make_engine(TrainConfig(engine="vllm"))
    with pytest.raises(ConfigError, match="engine"):
        TrainConfig(engine="sglang")
    with pytest.raises(FileNotFoundError, match="no policy"):
        make_engine(TrainConfig(model="/nowhere/policy"))


def test_a_model_in_the_home_folder_is_given_to_every_engine_by_its_path(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    seen, model = [], f"~/{folder.name}"
    monkeypatch.setattr("logra_core.rl.engine.VLLMRollout", lambda path, **_: seen.append(path))
    monkeypatch.setattr("logra_core.rl.engine.ServerRollout", lambda url, path, **_: seen.append(path))
    make_engine(TrainConfig(engine="vllm", model=model, out=str(tmp_path)))
    make_engine(TrainConfig(engine="vllm", model=model, out=str(tmp_path), engine_urls=("http://a",)))
    assert seen == [str(folder)] * 2 and make_engine(TrainConfig(model=model)).model is not None
    make_engine(TrainConfig(engine="vllm", out=str(tmp_path)))
    assert seen[2] is None  # the embedded policy
    assert at_home("owner/name") == "owner/name" and at_home("") == ""

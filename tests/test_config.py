"""Settings refuse bad values at construction, naming field, value and what is allowed; they survive JSON."""

import json

import pytest

from logra_core.engines.rollout import SamplingConfig
from logra_core.rl.configfile import from_dict
from logra_core.rl.settings import DenseConfig, PPOConfig, TaskConfig, TrainConfig
from logra_core.settings import ConfigError, to_dict
from logra_core.variants import KLConfig, OptimConfig, SketchConfig

BAD = [
    (SketchConfig, "rank", 0, ">= 1"),
    (SketchConfig, "rank", 4.0, "expected int"),
    (SketchConfig, "rank", True, "expected int"),
    (SketchConfig, "distribution", "cauchy", "rademacher, gaussian, orthonormal, hadamard, coordinates"),
    (SketchConfig, "seed", -1, "0 <= seed"),
    (SketchConfig, "targets", (), "at least one"),
    (SketchConfig, "targets", ("q_proj", 1), "tuple"),
    (SketchConfig, "refresh", 1, "expected bool"),
    (SketchConfig, "refresh_every", 0, ">= 1"),
    (OptimConfig, "beta1", 1.0, "0 <= beta1 < 1"),
    (OptimConfig, "update_ratio", "1e-5", "expected float"),
    (OptimConfig, "update_ratio", -1e-5, ">= 0"),
    (OptimConfig, "beta2", 1.0, "beta2 < 1"),
    (OptimConfig, "wire_dtype", "int8", "bfloat16, float32"),
    (KLConfig, "budget", 0.0, "> 0"),
    (KLConfig, "budget", float("nan"), "finite"),
    (KLConfig, "alpha_max", float("inf"), "finite"),
    (KLConfig, "estimator", "guess", "jvp, finite_difference, score_sketch"),
    (KLConfig, "score_samples", 0, ">= 1"),
    (KLConfig, "mismatch_floor", 1.5, "<= 1"),
    (SamplingConfig, "top_p", 0.0, "0 < top_p"),
    (PPOConfig, "tis_cap", 0.5, ">= 1"),
    (DenseConfig, "lr", -1.0, ">= 0"),
    (TaskConfig, "grader_seconds", 0.0, "> 0"),
    (TrainConfig, "method", "sgdm", "logra, dense"),
    (TrainConfig, "updates", -1, ">= 0"),
    (TrainConfig, "out", "", "a folder"),
]


@pytest.mark.parametrize("cls, field, value, words", BAD)
def test_a_bad_value_names_field_value_and_range(cls, field, value, words):
    with pytest.raises(ConfigError) as error:
        cls(**{field: value})
    assert f"{cls.__name__}.{field} = {value!r}" in str(error.value) and words in str(error.value)


def test_defaults_are_the_papers_settings():
    c = TrainConfig()
    assert (c.sketch.rank, c.sketch.distribution, c.sketch.refresh) == (256, "rademacher", True)
    assert (c.sketch.kind, c.sketch.projection, c.sketch.equal_bytes, c.sketch.share_inputs) == ("one_sided", "random", False, False)
    assert (c.optim.beta2, c.optim.eps, c.optim.update_ratio) == (0.95, 1e-8, 6e-5)
    assert (c.kl.schedule, c.kl.budget, c.kl.budget_end, c.kl.horizon, c.kl.alpha_max, c.kl.probe_responses) == ("cosine", 2e-4, 2e-5, 300, 3.0, 2)
    assert (c.ppo.prompts_per_update, c.ppo.failure_reward, c.ppo.baseline_weight, c.ppo.tis_cap) == (128, -0.01, 0.1, 2.0)
    assert (c.dense.lr, c.dense.beta1, c.dense.beta2, c.dense.warmup, c.dense.final_fraction) == (1e-6, 0.9, 0.95, 9, 0.1)
    assert (c.eval_sampling.temperature, c.eval_sampling.top_p, c.eval_samples, c.sampling.max_tokens) == (0.7, 0.7, 4, 4096)


def test_through_json_and_back():
    config = TrainConfig(sketch=SketchConfig(rank=7, targets=("q_proj",)), task=TaskConfig(options={"min_terms": 2}))
    assert from_dict(TrainConfig, json.loads(json.dumps(to_dict(config)))) == config


def test_unknown_fields_are_named():
    with pytest.raises(ConfigError, match="no field lrr; it has out, model"):
        from_dict(TrainConfig, {"lrr": 1})
    with pytest.raises(ConfigError, match="SketchConfig has no field rnk"):
        from_dict(TrainConfig, {"sketch": {"rnk": 1}})

"""The study of sketch kinds: its cosines against float64 and against what training accumulates, and the recording command."""

import pytest
import torch
from test_reconstruction import recipe  # noqa: F401  (a fixture: a tiny policy trained for two updates)

from logra_core import ConfigError, LoGRA
from logra_core.lab.reconstruction import load_stage, policy_gradients, sample
from logra_core.lab.reconstruction_sketches import KINDS, OUTLIERS, RANKS, factor_cosine, main, measure, observe_inputs, summary
from logra_core.rl.configfile import load_config
from logra_core.rl.ppo import ppo_loss, sequence_logprobs
from logra_core.rl.runlog import read_log
from logra_core.variants import OptimConfig, SketchConfig, observe

NAME = "model.layers.1.mlp.down_proj"


def test_factor_cosine_is_the_plain_one():
    torch.manual_seed(0)
    G, S, V = torch.randn(9, 14), torch.randn(9, 3), torch.randn(3, 14)
    R = (S @ V).double()
    assert factor_cosine(G, S, V) == pytest.approx(float((G.double() * R).sum() / (G.double().norm() * R.norm())), abs=1e-6)


@pytest.mark.parametrize("kind, rank", [("two-sided", 16), ("two-sided, equal bytes", 64), ("activation", 16), ("hadamard", 4)])
def test_a_cosine_is_that_of_the_factors_that_training_would_use(recipe, kind, rank):  # noqa: F811
    cfg = load_config(recipe[0])
    model, tokenizer, update, _ = load_stage(cfg, recipe[1])
    rollouts, rewards = sample(model, tokenizer, cfg, update)
    finders = {r: f for (n, r), f in observe_inputs(model, tokenizer, cfg, rollouts, 6).items() if n == NAME}
    G = policy_gradients(model, tokenizer, cfg, rollouts, rewards - 0.5)[NAME]
    row = measure(G, NAME, cfg.seed, finders, {})
    logra = LoGRA(model, SketchConfig(rank=rank, seed=cfg.seed, **KINDS[kind]), OptimConfig(rule="sgd", wire_dtype="float32"))
    padded = rollouts.padded(tokenizer.pad_token_id)
    if kind == "activation":
        finder = logra.targets[NAME].how.source.finder  # same inputs; another stream, as names and ranks of specs go into it
        with observe(logra.targets.values(), padded["attention_mask"]):
            sequence_logprobs(model, padded)
        assert finder.tokens >= finders[rank].tokens > 0  # here a common beginning counts once a row
    logp = sequence_logprobs(model, padded)
    ppo_loss(logp, padded["rollout_logprobs"], rewards - 0.5, padded["response_mask"], rollouts.tokens)[0].backward()
    found, values = row["cosines"][kind][RANKS.index(rank)]
    assert found == pytest.approx(factor_cosine(G, *logra.targets[NAME].how.factors(logra.targets[NAME].sketch.grad)), abs=0.1 if kind == "activation" else 1e-3)
    assert values == logra.targets[NAME].sketch.numel()


def test_what_is_left_without_the_leading_directions_and_with_only_them(recipe):  # noqa: F811
    """Against plain float64: G projected on the directions m + 1 .. m + 16 of Ω X, and on all rows of a smaller Ω X."""
    cfg = load_config(recipe[0])
    model, tokenizer, update, _ = load_stage(cfg, recipe[1])
    rollouts, rewards = sample(model, tokenizer, cfg, update)
    finders = {r: f for (n, r), f in observe_inputs(model, tokenizer, cfg, rollouts, 6).items() if n == NAME}
    G = policy_gradients(model, tokenizer, cfg, rollouts, rewards - 0.5)[NAME].double()
    row, seen = measure(G.float(), NAME, cfg.seed, finders, {})["outliers"], {}
    for arm, switches in OUTLIERS.items():
        rank, drop = switches["rank"], switches.get("drop_leading", 0)
        V = torch.linalg.svd(finders[rank + drop]._sum_RK.double(), full_matrices=False).Vh[drop:]
        seen[arm] = float((G @ V.T).norm() / G.norm())
        assert row[arm][0] == pytest.approx(seen[arm], abs=2e-3) and row[arm][1] == rank * len(G)
    assert list(seen) == list(OUTLIERS) and seen["without the leading 16"] < seen["without the leading 1"] < row_of_all(finders, G)


def row_of_all(finders, G):
    """Cosine of the plain range finder at rank 16."""
    V = torch.linalg.svd(finders[16]._sum_RK.double(), full_matrices=False).Vh
    return float((G @ V.T).norm() / G.norm())


def test_the_command_records_and_goes_on_where_it_was_stopped(recipe, tmp_path, capsys):  # noqa: F811
    out = tmp_path / "study.jsonl"
    arguments = [str(recipe[0]), "--checkpoint", str(recipe[1]), "--out", str(out), "--every", "1"]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    rows = read_log(out)[1]
    gradients = [r for r in rows if r["kind"] == "gradient"]
    assert len(gradients) == 21 * 4 and all(set(r["cosines"]) == set(KINDS) and set(r["outliers"]) == set(OUTLIERS) for r in gradients)
    for r in gradients:
        for kind, values in r["cosines"].items():
            for value, rank, best in zip(values, RANKS, r["cosines"]["best"], strict=True):
                assert value is None or abs(value[0]) <= best[0] + 2e-3, (r["layer"], kind, rank)
    assert summary(gradients) in table and "trained, verified advantages, 21 layers" in table
    lines = out.read_text().splitlines(keepends=True)
    done = [i for i, line in enumerate(lines) if '"layer_done"' in line]
    out.write_text("".join(lines[: done[9] + 3]))  # killed within the eleventh layer
    assert main(arguments) == 0
    assert read_log(out)[1] == rows
    with pytest.raises(ConfigError, match="other settings"):
        main([*arguments[:-1], "2"])

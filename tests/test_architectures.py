"""A tiny random model of each architecture through what the project does with it: every cell is right, or refused with what to do instead.

`PYTHONPATH=. OMP_NUM_THREADS=1 python tests/test_architectures.py` prints the table that these tests fill.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

import pytest
import torch
import transformers
from models import policy_loss, probe_batch, random_ids
from tiny import tiny_tokenizer

from logra_core import ConfigError, LoGRA, OptimConfig, SketchConfig, attach, detach, exact_kl
from logra_core.engines import rollout
from logra_core.engines.rollout import Rollouts, SamplingConfig, TransformersRollout, can_share_prefix, exact_room, refuse_padding
from logra_core.kl import q_finite_difference, q_jvp
from logra_core.rl.ppo import sequence_logprobs
from logra_core.sketch import select_targets

COMMON = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, initializer_range=0.2, pad_token_id=1, eos_token_id=1, bos_token_id=None,
)  # fmt: skip
MLA = dict(num_key_value_heads=4, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
ROUTED = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1, first_k_dense_replace=1)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
LINEAR = dict(
    layer_types=["linear_attention", "full_attention"], head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=8,
)  # fmt: skip
WINDOW = dict(sliding_window=16)
QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Architecture:
    """family: of `<family>Config` and `<family>ForCausalLM`. targets: where the default ones will not do. shares: is a prefix computed once?

    refused: checks that may end in a refusal; all others must be right. note: beside the default targets that were found.
    """

    family: str
    changes: dict
    targets: tuple[str, ...] | None = None
    shares: bool = True
    refused: tuple[str, ...] = ()
    config: str = ""
    only: tuple[str, ...] = ()  # of COMMON; () is all
    note: str = ""

    def build(self) -> transformers.PreTrainedModel:
        common = {k: v for k, v in COMMON.items() if not self.only or k in self.only}
        config = getattr(transformers, self.config or self.family + "Config")(**(common | self.changes))
        torch.manual_seed(0)
        model = getattr(transformers, self.family + "ForCausalLM")(config).float().eval()
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                if parameter.dim() == 1 or "sinks" in name:  # norms, biases, sinks: not at a value that hides what they do
                    parameter.add_(0.1 * torch.randn_like(parameter))
                elif float(parameter.abs().max()) == 0:
                    parameter.normal_(0, 0.2)
        return model

    @property
    def chosen(self) -> tuple[str, ...]:
        return self.targets or SketchConfig().targets


def other(targets: str, *also: str) -> dict:
    """Targets to name where the default ones are refused."""
    return {"targets": tuple(targets.split()), "refused": ("targets", *also)}


ALL = {
    "Llama": Architecture("Llama", {}),
    "Qwen2": Architecture("Qwen2", {}),
    "Qwen2 with windows": Architecture("Qwen2", WINDOW | dict(use_sliding_window=True, max_window_layers=0), shares=False),
    "Qwen3": Architecture("Qwen3", dict(head_dim=8)),
    "Qwen2-MoE": Architecture("Qwen2Moe", EXPERTS | dict(shared_expert_intermediate_size=16)),
    "Qwen3-MoE": Architecture("Qwen3Moe", EXPERTS | dict(head_dim=8), **other("q_proj k_proj v_proj o_proj")),
    "Qwen3.5 (hybrid)": Architecture("Qwen3_5", LINEAR, shares=False, config="Qwen3_5TextConfig"),
    "Qwen3-Next (hybrid)": Architecture(
        "Qwen3Next", LINEAR | EXPERTS | dict(shared_expert_intermediate_size=16), shares=False
    ),
    "Mistral with windows": Architecture("Mistral", WINDOW, shares=False),
    "Mixtral": Architecture("Mixtral", dict(num_local_experts=4), **other("q_proj k_proj v_proj o_proj")),
    "Gemma": Architecture("Gemma", dict(head_dim=8)),
    "Gemma 2": Architecture("Gemma2", WINDOW | dict(head_dim=8), shares=False, refused=("kl",)),
    "Gemma 3 (text)": Architecture(
        "Gemma3", WINDOW | dict(head_dim=8, layer_types=["sliding_attention", "full_attention"]), shares=False, config="Gemma3TextConfig"
    ),
    "Phi-3": Architecture("Phi3", {}, **other("qkv_proj o_proj gate_up_proj down_proj")),
    "gpt-oss": Architecture("GptOss", WINDOW | dict(head_dim=8, num_local_experts=4), shares=False, **other("q_proj k_proj v_proj o_proj", "kl")),
    "Granite": Architecture("Granite", {}),
    "OLMo": Architecture("Olmo", {}),
    "OLMo 2": Architecture("Olmo2", {}),
    "OLMo 3 (windows)": Architecture("Olmo3", WINDOW | dict(layer_types=["sliding_attention", "full_attention"]), shares=False),
    "DeepSeek-V2": Architecture(
        "DeepseekV2", MLA | ROUTED | dict(head_dim=8),
        **other("q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj gate_proj up_proj down_proj")
    ),
    "DeepSeek-V3": Architecture(
        "DeepseekV3", MLA | ROUTED, **other("q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj gate_proj up_proj down_proj")
    ),
    "Cohere": Architecture("Cohere", {}),
    "Cohere 2 (windows)": Architecture("Cohere2", WINDOW | dict(layer_types=["sliding_attention", "full_attention"]), shares=False),
    "StableLM": Architecture("StableLm", {}),
    "GLM-4": Architecture("Glm4", dict(head_dim=8), **other("q_proj k_proj v_proj o_proj gate_up_proj down_proj")),
    "GPT-NeoX": Architecture("GPTNeoX", {}, **other("query_key_value dense dense_h_to_4h dense_4h_to_h")),
    "Starcoder2": Architecture("Starcoder2", {}, **other("q_proj k_proj v_proj o_proj c_fc c_proj")),
    "SmolLM3": Architecture("SmolLM3", {}),
    "Llama 4 (chunks)": Architecture(
        "Llama4",
        dict(head_dim=8, attention_chunk_size=16, layer_types=["chunked_attention", "full_attention"], num_local_experts=4,
             num_experts_per_tok=1, intermediate_size_mlp=48, interleave_moe_layer_step=1),
        shares=False, config="Llama4TextConfig",
    ),
    "LFM2 (convolutions)": Architecture(
        "Lfm2", dict(layer_types=["conv", "full_attention"]), shares=False, **other("q_proj k_proj v_proj out_proj in_proj w1 w2 w3")
    ),
    "Bamba (hybrid)": Architecture(
        "Bamba", dict(attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1), shares=False
    ),
    "Mamba": Architecture(
        "Mamba", dict(state_size=8), shares=False,
        only=("vocab_size", "hidden_size", "num_hidden_layers", "initializer_range", "pad_token_id", "eos_token_id"),
        **other("in_proj out_proj x_proj"),
    ),
    "Mamba 2": Architecture(
        "Mamba2", dict(state_size=8, num_heads=8, head_dim=8, expand=2, n_groups=1), shares=False,
        only=("vocab_size", "hidden_size", "num_hidden_layers", "initializer_range", "pad_token_id", "eos_token_id"), **other("in_proj out_proj"),
    ),
    "GPT-Neo (local)": Architecture(
        "GPTNeo", dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=16), shares=False,
        only=("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings", "initializer_range", "pad_token_id", "eos_token_id"),
        **other("q_proj k_proj v_proj out_proj c_fc c_proj"),
    ),
    "MPT (ALiBi)": Architecture(
        "Mpt", dict(d_model=32, n_heads=4, n_layers=2, max_seq_len=128), shares=False,
        only=("vocab_size", "initializer_range", "pad_token_id", "eos_token_id"), **other("Wqkv out_proj up_proj down_proj"),
    ),
    "RecurrentGemma": Architecture(
        "RecurrentGemma", dict(lru_width=32, attention_window_size=16, num_hidden_layers=3), shares=False,
        **other("linear_x linear_y linear_out gate_proj up_proj down_proj", "trainer", "engine", "kl"),
    ),
}  # fmt: skip
REST, RESPONSE, SHARED = (3, 20, 9, 30), 12, 12  # tokens of prompts after the shared ones, of a response, shared
TOLERANCE = 1e-4  # nats in fp32


@functools.cache
def prompts() -> list[list[int]]:
    common = random_ids(1, SHARED, 97, seed=1)[0].tolist()
    return [common + random_ids(1, n, 97, seed=n)[0].tolist() for n in REST]


def given_rollouts() -> Rollouts:
    responses = list(random_ids(len(REST), RESPONSE, 97, seed=2))
    responses[1] = responses[1][:5]
    zeros = [torch.zeros(len(r)) for r in responses]
    return Rollouts([torch.tensor(p) for p in prompts()], responses, zeros, ["stop"] * len(REST), [""] * len(REST), 0)


@torch.no_grad()
def alone(model, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """Log-probs of a response by a plain forward of the one row: no padding, no cache."""
    logits = model(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, response[:, None])[:, 0]


def deviation(model, rollouts: Rollouts, logprobs: list[torch.Tensor]) -> float:
    rows = zip(rollouts.prompt_ids, rollouts.response_ids, logprobs, strict=True)
    return max(float((alone(model, prompt, response) - logp).abs().max()) for prompt, response, logp in rows)


@torch.no_grad()
def trainer_logprobs(model, rollouts: Rollouts, shared: int) -> list[torch.Tensor]:
    padded = rollouts.padded(1, skip=shared)
    logp = sequence_logprobs(model, padded, 1.0, rollouts.prompt_ids[0][:shared])
    return [row[mask] for row, mask in zip(logp, padded["response_mask"])]


# Each check returns what a cell of the table says, or raises ConfigError or RuntimeError with what to do instead.


def check_targets(case: Architecture, model) -> str:
    return f"{len(select_targets(model, SketchConfig().targets))} layers" + case.note


def check_trainer(case: Architecture, model) -> str:
    refuse_padding(model)
    rollouts = given_rollouts()
    shared = rollouts.shared(model)
    assert shared == (SHARED if case.shares else 0)
    worst = deviation(model, rollouts, trainer_logprobs(model, rollouts, shared))
    assert worst < TOLERANCE
    return f"{'shared' if shared else 'not shared'}, {worst:.0e}"


def check_engine(case: Architecture, model) -> str:
    engine = TransformersRollout(model, tiny_tokenizer(), case.chosen)
    made = engine.generate(prompts(), SamplingConfig(RESPONSE), seed=0)
    assert sum(map(len, made.response_ids)) > 2 * RESPONSE
    worst = deviation(model, made, made.logprobs)
    assert worst < TOLERANCE
    return f"{worst:.0e}"


def check_sketch(case: Architecture, model) -> str:
    ids = random_ids(3, 24, 97)
    layers = select_targets(model, case.chosen)
    policy_loss(model, ids).backward()
    dense = {n: m.weight.grad.double().clone() for n, m in layers.items()}
    model.zero_grad()
    targets = attach(model, SketchConfig(rank=5, targets=case.chosen))
    assert set(targets) == set(dense)
    policy_loss(model, ids).backward()
    found = {n: (t.sketch.grad.double(), dense[n] @ t.projection().double().T) for n, t in targets.items()}
    detach(model)
    assert all(float(expected.norm()) > 0 for _, expected in found.values())
    worst = max(float((S - expected).norm() / expected.norm()) for S, expected in found.values())
    assert worst < 1e-4
    return f"{worst:.0e}"


def check_kl(case: Architecture, model) -> str:
    """α² q against the exact KL of α and −α, whose mean has no term in α³, at about 1e-6 nats: beyond, routed experts change places."""
    ids = random_ids(3, 24, 97)
    logra = LoGRA(model, SketchConfig(rank=5, targets=case.chosen), OptimConfig(update_ratio=1e-2))
    policy_loss(model, ids).backward()
    update, probe = logra.propose(), probe_batch(ids, 5)
    logra.zero_grad()
    alpha = math.sqrt(1e-6 / q_finite_difference(model, update, probe, 1e-2, target=1e-6))
    exact = (exact_kl(model, update, probe, alpha) + exact_kl(model, update, probe, -alpha)) / 2
    q = q_finite_difference(model, update, probe, alpha)
    assert q > 0 and alpha**2 * q == pytest.approx(exact, rel=0.05)  # what a refusal below names must work
    predicted = alpha**2 * q_jvp(model, update, probe)
    assert predicted == pytest.approx(exact, rel=0.02)
    return f"{abs(predicted / exact - 1):.1%}"


CHECKS = {"targets": check_targets, "trainer": check_trainer, "engine": check_engine, "sketch": check_sketch, "kl": check_kl}
WAYS_OUT = {"targets": "linear layers here end in", "trainer": "Allowed is", "engine": "Allowed is", "kl": "finite_difference"}
HEADS = {
    "targets": "default targets", "trainer": "trainer's log-probs (nats)", "engine": "engine's log-probs (nats)", "sketch": "S against G Aᵀ",
    "kl": "predicted against exact KL",
}  # fmt: skip


def cell(name: str, check: str) -> tuple[bool, str]:
    """(right?, what it says) of one cell of the table; anything but right or a refusal that says what to do raises."""
    case = ALL[name]
    try:
        return True, CHECKS[check](case, case.build())
    except (ConfigError, RuntimeError) as error:
        if check not in case.refused or WAYS_OUT[check] not in str(error):
            raise
        return False, str(error)


def markdown(cells: dict[str, dict[str, tuple[bool, str]]]) -> str:
    """The table: an architecture a row; numbers are the largest deviation found."""

    def text(case: Architecture, check: str, right: bool, says: str) -> str:
        if right:
            return says
        if check == "targets":
            return "named: " + " ".join(f"`{t}`" for t in case.targets)
        return "refused: `finite_difference`" if check == "kl" else "refused: padding changes it"

    lines = ["| architecture | " + " | ".join(HEADS.values()) + " |", "|---" * (len(HEADS) + 1) + "|"]
    for name, row in cells.items():
        lines.append(f"| {name} | " + " | ".join(text(ALL[name], check, *row[check]) for check in HEADS) + " |")
    return "\n".join(lines)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", ALL)
def test_right_or_refused(name, check):
    right, says = cell(name, check)
    print(f"{name}, {check}: {'right' if right else 'refused'}, {says}")
    if check == "targets" and not right:
        assert select_targets(ALL[name].build(), ALL[name].targets)


def test_the_table_has_a_row_for_each_and_says_what_to_do():
    names = ["Llama", "Gemma 2", "RecurrentGemma"]
    table = markdown({n: {c: (c not in ALL[n].refused, "x") for c in CHECKS} for n in names})
    lines = table.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {n}" for n in names] and len({line.count("|") for line in lines}) == 1
    assert "refused" not in lines[2] and "`finite_difference`" in lines[3] and "named: `linear_x`" in lines[4] and "padding" in lines[4]


WINDOWED = ["Mistral with windows", "Gemma 3 (text)", "Qwen2 with windows"]


@pytest.mark.parametrize("name", [*WINDOWED, "Llama 4 (chunks)", "GPT-Neo (local)", "MPT (ALiBi)"])
def test_sharing_by_force_would_be_wrong(name, monkeypatch):
    """Else the table could not fail."""
    model, rollouts = ALL[name].build(), given_rollouts()
    with pytest.raises(ValueError, match=r"cannot share a prefix of 12 tokens .*Rollouts.shared"):
        trainer_logprobs(model, rollouts, SHARED)
    monkeypatch.setattr("logra_core.rl.ppo.can_share_prefix", lambda *_: True)
    monkeypatch.setattr("logra_core.engines.rollout.can_share_prefix", lambda *_: True)
    made = TransformersRollout(model, tiny_tokenizer(), ALL[name].chosen).generate(prompts(), SamplingConfig(RESPONSE), seed=0)
    forced = deviation(model, rollouts, trainer_logprobs(model, rollouts, SHARED)), deviation(model, made, made.logprobs)
    print(f"{name}: trainer {forced[0]:.1f}, engine {forced[1]:.1f} nats")
    assert min(forced) > 0.1


@pytest.mark.parametrize("name", [*WINDOWED, "Llama 4 (chunks)"])
def test_a_window_that_holds_the_longest_row_is_shared_exactly(name, monkeypatch):
    columns = SHARED + max(REST) + RESPONSE
    size = "attention_chunk_size" if "Llama" in name else "sliding_window"
    case = dataclasses.replace(ALL[name], changes=ALL[name].changes | {size: columns}, shares=True)
    model = case.build()
    assert can_share_prefix(model, columns) and not can_share_prefix(model, columns + 1)
    check_trainer(case, model)
    seen, forward = [], model.forward
    monkeypatch.setattr(model, "forward", functools.wraps(forward)(lambda *a, **k: seen.append(len((*a, k.get("input_ids"))[0])) or forward(*a, **k)))
    check_engine(case, model)
    assert seen[:2] == [1, 4]  # the prefix alone, then all rows


def test_what_is_not_known_to_be_exact_is_not_shared(monkeypatch):
    class Unknown(torch.nn.Module):
        def forward(self, input_ids, attention_mask, position_ids, past_key_values):
            pass

    assert not can_share_prefix(Unknown(), 8)
    model = ALL["Llama"].build()
    assert can_share_prefix(model, 10**9) and given_rollouts().shared(model) == SHARED
    monkeypatch.setattr(rollout, "MIN_SHARED", SHARED + 1)
    assert given_rollouts().shared(model) == 0


@pytest.mark.parametrize("kind", ["rwkv", "xlstm", "deepseek_v4", ""])
def test_a_model_that_padding_changes_is_refused_when_an_engine_is_made(kind):
    model = ALL["Llama"].build()
    if kind:
        model.config.model_type = kind
    else:
        model.forward = lambda input_ids, attention_mask: None
    with pytest.raises(ConfigError, match="LlamaForCausalLM cannot be trained here: .*padded.*Allowed is"):
        TransformersRollout(model, tiny_tokenizer(), QKVO)


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "scaled queries"])
def test_rows_that_depend_on_their_batch_are_refused(kind, monkeypatch):
    """Above the length that it was trained at, such a model turns all rows of a batch by the frequencies of the longest one. Llama 4 scales its
    queries by columns, padding among them."""
    if kind == "scaled queries":
        case = ALL["Llama 4 (chunks)"]
        model = dataclasses.replace(case, changes=case.changes | {"floor_scale": 41, "no_rope_layers": [1, 0]}).build()
    else:
        long = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 40} if kind == "longrope" else {}
        settings = {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0} | long}
        model = Architecture("Llama", settings | ({"max_position_embeddings": 40} if kind == "dynamic" else {})).build()
    rollouts = given_rollouts()
    assert exact_room(model) == 40 and exact_room(ALL["Llama"].build()) is None
    engine = TransformersRollout(model, tiny_tokenizer(), QKVO)
    assert engine.room == 40
    with pytest.raises(ValueError, match="exceeds the model's 40"):
        engine.generate(prompts(), SamplingConfig(RESPONSE), seed=0)
    short = rollouts.select([0, 2])
    assert deviation(model, short, trainer_logprobs(model, short, short.shared(model))) < TOLERANCE
    for shared in (0, SHARED):
        with pytest.raises(ValueError, match="54 columns; above 40 .*smaller sampling.max_tokens"):
            trainer_logprobs(model, rollouts, shared)
    monkeypatch.setattr("logra_core.rl.ppo.exact_room", lambda _: None)
    assert deviation(model, rollouts, trainer_logprobs(model, rollouts, 0)) > 0.01


if __name__ == "__main__":
    print(markdown({name: {check: cell(name, check) for check in CHECKS} for name in ALL}))

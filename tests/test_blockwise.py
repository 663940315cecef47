"""Attention by blocks in forward mode against torch.func.jvp of plain softmax attention, and inside models against transformers' eager attention."""

import contextlib

import pytest
import torch
from models import half_training, policy_loss, probe_batch, random_ids, real_llm, tiny_llama
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM, MistralConfig, MistralForCausalLM
from transformers.masking_utils import causal_mask_function, chunked_causal_mask_function, sliding_window_causal_mask_function

from logra_core import ConfigError, LoGRA, ProbeBatch
from logra_core.kl import forward_mode, q_jvp
from logra_core.planning.memory import TrackMemory
from logra_core.variants import OptimConfig, SketchConfig
from logra_core.variants.attention import EMPTY, FULL, NAME, PARTLY, Visible, attention_jvp, forward_mode_attention, visible_blocks

SMALL = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             head_dim=8, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=2)  # fmt: skip


def plain(q, k, v, seen, scale):
    """Softmax attention [B, T, H, E] with all scores at once; a query that sees nothing gets zeros."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~seen, -float("inf")).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return (torch.softmax(scores, -1).masked_fill(~seen.any(-1, keepdim=True), 0.0) @ v).transpose(1, 2)


def operands(tokens, heads=(4, 2), rows=2, widths=(8, 6), dtype=torch.float64, scale=1.0):
    g = torch.Generator().manual_seed(tokens)
    shapes = [(rows, heads[i > 0], tokens, widths[i > 1]) for i in (0, 1, 2)]
    made = [torch.randn(s, generator=g, dtype=torch.float64) for s in 2 * shapes]
    return [(x * (scale if i in (0, 1) else 1.0)).to(dtype) for i, x in enumerate(made)]


def both(made, visible, seen, scale=0.3):
    exact = [x.double() for x in made]
    expected = torch.func.jvp(lambda *a: plain(*a, seen, scale), tuple(exact[:3]), tuple(exact[3:]))
    return attention_jvp(*made, visible, scale), expected


def blocks(monkeypatch, size):
    monkeypatch.setattr("logra_core.variants.attention.BLOCK", size)


def padded(rows, tokens, lengths):
    return torch.arange(tokens)[None] >= tokens - torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("tokens", "block"), [(24, 8), (23, 8), (5, 8), (17, 1), (16, 16)])
def test_causal_and_left_padded_against_torch_in_float64(tokens, block, heads, monkeypatch):
    blocks(monkeypatch, block)
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    for real in (None, padded(3, tokens, (tokens, tokens // 2, 1))):
        visible = visible_blocks(3, tokens, tokens, attention_mask=real)
        seen = causal.expand(3, 1, -1, -1) if real is None else causal & real[:, None, None, :]
        ours, expected = both(operands(tokens, heads, rows=3), visible, seen)
        for a, b in zip(ours, expected, strict=True):
            assert a.shape == (3, tokens, heads[0], 6) and torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    assert (ours[0][2, : tokens - 1] == 0).all() and (ours[1][2, : tokens - 1] == 0).all()


@pytest.mark.parametrize("function", [sliding_window_causal_mask_function(5), chunked_causal_mask_function(6, torch.tensor([0, 3]))])
def test_any_mask_function_of_transformers(function, monkeypatch):
    blocks(monkeypatch, 4)
    visible = visible_blocks(2, 22, 22, mask_function=function)
    b, q, k = torch.arange(2)[:, None, None, None], torch.arange(22)[:, None], torch.arange(22)
    seen = function(b, torch.zeros_like(b), q[None, None], k[None, None, None]).expand(2, 1, 22, 22)
    ours, expected = both(operands(22), visible, seen)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(ours, expected, strict=True))
    assert visible.states[5][0] == EMPTY and visible.states[0][5] == EMPTY


def test_blocks_above_the_diagonal_or_of_padding_are_skipped(monkeypatch):
    blocks(monkeypatch, 4)
    assert visible_blocks(1, 10, 10).states == [[PARTLY, EMPTY, EMPTY], [FULL, PARTLY, EMPTY], [FULL, FULL, PARTLY]]
    real = padded(2, 10, (5, 6))
    assert visible_blocks(2, 10, 10, attention_mask=real).states == [[EMPTY] * 3, [EMPTY, PARTLY, EMPTY], [EMPTY, PARTLY, PARTLY]]
    later = Visible(1, 4, 12, causal_mask_function, "cpu", first_query=8)  # queries that come after what is cached
    assert later.states == [[FULL, FULL, PARTLY]]


@pytest.mark.parametrize("magnitude", [1.0, 30.0, 1e3])
def test_large_scores_and_single_precision(magnitude, monkeypatch):
    """Scores up to some 1e7; in fp64 as exact as plain softmax, in fp32 within 1e-5 of it where fp32 can be (scores of order 1)."""
    blocks(monkeypatch, 8)
    seen = torch.ones(30, 30, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    made = operands(30, scale=magnitude)
    ours, expected = both(made, visible_blocks(2, 30, 30), seen)
    for a, b in zip(ours, expected, strict=True):
        assert torch.isfinite(a).all() and float((a - b).abs().max() / b.abs().max()) < 1e-12 * max(1.0, magnitude**2)
    ours, expected = both([x.float() for x in made], visible_blocks(2, 30, 30), seen)
    assert all(torch.isfinite(a).all() and a.dtype == torch.float32 for a in ours)
    if magnitude == 1.0:
        assert all(float((a - b).abs().max() / b.abs().max()) < 1e-5 for a, b in zip(ours, expected, strict=True))


def test_half_precision_is_rounded_once():
    """Softmax and sums are in fp32: of bf16 operands, results are those of fp64 to one rounding."""
    seen = torch.ones(30, 30, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    ours, expected = both(operands(30, dtype=torch.bfloat16), visible_blocks(2, 30, 30), seen)
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == torch.bfloat16 and torch.allclose(a.double(), b, rtol=2**-8, atol=1e-5)


def test_memory_grows_as_the_length(monkeypatch):
    blocks(monkeypatch, 64)
    peaks = []
    for tokens in (512, 1024):
        made = operands(tokens, dtype=torch.float32)
        with TrackMemory() as memory:
            attention_jvp(*made, visible_blocks(2, tokens, tokens), 0.3)
        peaks.append(memory.peak)
        assert max(torch.Size(s).numel() for s in memory.shapes) <= 2 * 4 * max(64 * 64, tokens * 8)
    assert peaks[1] < 2.1 * peaks[0] < 2.1 * 4 * 2 * 4 * 512 * 512  # the second: four tensors of scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_tensors_take_the_memory_of_real_ones(dtype, monkeypatch):
    """As the planner counts the probe; which blocks are skipped cannot be known then."""
    blocks(monkeypatch, 16)
    made, peaks = operands(70, dtype=dtype), []
    for mode in (contextlib.nullcontext(), FakeTensorMode()):
        with mode:
            given = [mode.from_tensor(x) for x in made] if isinstance(mode, FakeTensorMode) else made
            visible = visible_blocks(2, 70, 70)
            with TrackMemory() as memory:
                attention_jvp(*given, visible, 0.3)
        peaks.append(memory.peak)
    assert peaks[0] == peaks[1] > 0


# ------------------------------------------------------------------ in models


@contextlib.contextmanager
def torchs_own_rules(model):
    with torch.autograd.forward_ad.dual_level(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield


def q_both(model, update, probe, monkeypatch):
    ours = q_jvp(model, update, probe)
    with monkeypatch.context() as patch:
        patch.setattr("logra_core.kl.forward_mode", torchs_own_rules)
        model.set_attn_implementation("eager")
        theirs = q_jvp(model, update, probe)
        model.set_attn_implementation("sdpa")
    return ours, theirs


def left_padded(ids, prompt, lengths):
    """Rows of `ids` cut to their last `lengths` tokens, responses from `prompt` on."""
    real = padded(*ids.shape, lengths)
    return ProbeBatch(ids.where(real, torch.zeros_like(ids)), real.long(), real & (torch.arange(ids.shape[1]) >= prompt))


def proposal(model, ids):
    logra = LoGRA(model, SketchConfig(rank=8), OptimConfig(update_ratio=1e-2))
    policy_loss(model, ids).backward()
    return logra.propose()


def mistral():
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=5)).eval()


@pytest.mark.parametrize("make", [tiny_llama, mistral])
@pytest.mark.parametrize("block", [5, 64])
def test_q_equals_that_of_eager_attention(make, block, monkeypatch):
    blocks(monkeypatch, block)
    model, ids = make(), random_ids(3, 14, 96)
    update = proposal(model, ids)
    for probe in (probe_batch(ids, 6), left_padded(ids, 6, (14, 9, 11))):
        ours, theirs = q_both(model, update, probe, monkeypatch)
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert q_jvp(model, update, probe) == q_jvp(model, update, probe)


def test_only_one_kind_of_layer_updated(monkeypatch):
    """Queries, keys or values without a tangent, in the first layers or everywhere."""
    model, ids = tiny_llama(), random_ids(3, 14, 96)
    logra = LoGRA(model, SketchConfig(rank=8, targets=("layers.1.self_attn.v_proj",)), OptimConfig(update_ratio=1e-2))
    policy_loss(model, ids).backward()
    ours, theirs = q_both(model, logra.propose(), probe_batch(ids, 5), monkeypatch)
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_linear_layers_take_two_products_and_no_zeros_of_the_weights_size():
    """One for the value, one for the tangent; the rule is torch's where the weight has a tangent too."""
    layer, g = torch.nn.Linear(24, 16).requires_grad_(False), torch.Generator().manual_seed(0)
    x, x_dot, w_dot = (torch.randn(n, 24, generator=g) for n in (5, 5, 16))
    with torch.no_grad(), forward_mode(layer), FlopCounterMode(display=False) as counter, TrackMemory() as memory:
        y = torch.autograd.forward_ad.unpack_dual(layer(torch.autograd.forward_ad.make_dual(x, x_dot)))
    assert torch.equal(y.primal, layer(x)) and torch.equal(y.tangent, x_dot @ layer.weight.T)
    assert counter.get_total_flops() == 2 * (2 * 5 * 24 * 16) and memory.peak < 4 * 24 * 16
    with torch.no_grad(), forward_mode(layer):
        moving = torch.autograd.forward_ad.make_dual(layer.weight.detach(), w_dot)
        y = torch.autograd.forward_ad.unpack_dual(torch.nn.functional.linear(torch.autograd.forward_ad.make_dual(x, x_dot), weight=moving))
    assert torch.allclose(y.tangent, x_dot @ layer.weight.T + x @ w_dot.T, rtol=1e-5, atol=1e-6)


def test_half_models_and_autocast():
    model, ids = tiny_llama(), random_ids(3, 14, 96)
    update, probe = proposal(model, ids), probe_batch(ids, 5)
    q = q_jvp(model, update, probe)
    with torch.autocast("cpu", torch.bfloat16):
        assert q_jvp(model, update, probe) == pytest.approx(q, rel=0.05)
    assert q_jvp(model.bfloat16(), update, probe) == pytest.approx(q, rel=0.05)


def test_the_model_is_left_as_found_also_on_an_error():
    model, ids = half_training(None, 0.1), random_ids(2, 10, 96)
    update, probe = proposal(model, ids), probe_batch(ids, 4)
    modes, state, inside = [m.training for m in model.modules()], torch.get_rng_state(), []

    def fail(module, args, output):
        inside.append(model.config._attn_implementation)
        raise ValueError("stop")

    handle = model.model.norm.register_forward_hook(fail)
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        with pytest.raises(ValueError, match="stop"):
            q_jvp(model, update, probe)
        assert model.config._attn_implementation == implementation and [m.training for m in model.modules()] == modes
    handle.remove()
    assert inside == [NAME, NAME] and torch.equal(torch.get_rng_state(), state)


def test_what_has_no_rule_is_refused_by_name():
    gemma = Gemma2ForCausalLM(Gemma2Config(**SMALL, query_pre_attn_scalar=8)).eval()
    sinks = GptOssForCausalLM(GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1)).eval()
    ids = random_ids(2, 8, 96)
    for model, message in ((gemma, "Gemma2Attention with softcap"), (sinks, "GptOssAttention with s_aux")):
        before = model.config._attn_implementation
        with pytest.raises(ConfigError, match=f"{message}.*finite_difference"), torch.no_grad(), torch.autograd.forward_ad.dual_level():
            with forward_mode_attention(model):
                model(input_ids=ids, use_cache=False)
        assert model.config._attn_implementation == before != NAME
    model = tiny_llama()
    with pytest.raises(ConfigError, match="LlamaAttention with gradients"), forward_mode_attention(model):
        model(input_ids=ids, use_cache=False)
    with pytest.raises(ConfigError, match="a mask that is a tensor"), torch.no_grad(), forward_mode_attention(model):
        model(input_ids=ids, attention_mask=torch.zeros(2, 1, 8, 8), use_cache=False)
    with pytest.raises(ConfigError, match="cannot be asked by blocks"):
        visible_blocks(1, 8, 8, use_vmap=True)


def test_real_llm_with_left_padding(monkeypatch):
    blocks(monkeypatch, 16)
    model, _ = real_llm()
    ids = random_ids(3, 40, 49152)
    update = proposal(model, ids[:1])
    ours, theirs = q_both(model, update, left_padded(ids, 20, (40, 27, 21)), monkeypatch)
    print(f"q by blocks over q by eager attention, off by {ours / theirs - 1:.1e}")
    assert ours == pytest.approx(theirs, rel=1e-5)

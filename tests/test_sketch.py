"""S equals the dense G Aᵀ in every way a training loop runs backward, and nothing of the size of G is ever allocated."""

import contextlib
import gc

import pytest
import torch
from models import SWITCHES, drawn, policy_loss, random_ids, real_llm, tiny_llama
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from logra_core import ConfigError, LoGRA, MissingSketchError, attach, detach
from logra_core.lab import reference
from logra_core.planning.memory import TrackMemory
from logra_core.planning.shapes import target_table
from logra_core.sketch import SKETCH
from logra_core.variants import OptimConfig, SketchConfig
from logra_core.variants.activation import observe
from logra_core.variants.two_sided import TwoSidedSketch

FP32, BF16 = 1e-5, 1e-2  # largest ‖S − G Aᵀ‖/‖G Aᵀ‖ allowed; measured about 6e-7 and 5e-3
CELLS = [(d, c) for d in ("fp32", "autocast", "bf16") for c in ("none", "reentrant", "non-reentrant")]


def context(dtype):
    return torch.autocast("cpu", torch.bfloat16) if dtype == "autocast" else contextlib.nullcontext()


def prepare(model, dtype, checkpointing):
    model = model.to(torch.bfloat16) if dtype == "bf16" else model
    if checkpointing != "none":
        model.train()  # Hugging Face checkpoints in training mode only; these models have no dropout
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    return model


def dense_gradients(model, ids, dtype):
    """G of every target by torch's own autograd."""
    with context(dtype):
        loss = policy_loss(model, ids)
    loss.backward()
    grads = {n: p.grad.double() for n, p in model.named_parameters() if n.endswith("_proj.weight")}
    model.zero_grad()
    return {n.removesuffix(".weight"): g for n, g in grads.items()}


def worst_error(targets, dense):
    errors = []
    for name, target in targets.items():
        pairs = [(target.sketch.grad, dense[name] @ target.projection().double().T)]
        if isinstance(target.how, TwoSidedSketch):
            Y, Z = target.how.parts(target.sketch.grad)
            pairs = [(Y, pairs[0][1]), (Z, target.how.left().double() @ dense[name])]
        errors += [float((found.double() - expected).norm() / expected.norm()) for found, expected in pairs]
    return max(errors)


def check_cell(model, ids, dtype, checkpointing, rank, switch="one_sided"):
    model = prepare(model, dtype, checkpointing)
    dense = dense_gradients(model, ids, dtype)
    targets = attach(model, SketchConfig(rank=rank, **SWITCHES[switch]))
    if hasattr(next(iter(targets.values())).how, "source") and hasattr(next(iter(targets.values())).how.source, "finder"):
        with observe(targets.values()), context(dtype):
            model(input_ids=ids, use_cache=False)
        assert all(t.how.by_value for t in targets.values())
    with context(dtype):
        loss = policy_loss(model, ids)
    loss.backward()
    assert all(t.weight.grad is None for t in targets.values())
    assert all(t.sketch.grad.dtype == torch.float32 for t in targets.values())
    return worst_error(targets, dense), len(targets)


@pytest.mark.parametrize("dtype, checkpointing", CELLS)
def test_all_targets_of_the_real_llm(dtype, checkpointing):
    model, _ = real_llm()
    error, count = check_cell(model, random_ids(2, 24, 49152), dtype, checkpointing, 64)
    print(f"{dtype} {checkpointing}: worst relative error over {count} targets {error:.1e}")
    assert count == 210
    assert error <= (FP32 if dtype == "fp32" else BF16)


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("dtype, checkpointing", CELLS)
def test_tiny_model(dtype, checkpointing, switch):
    error, count = check_cell(tiny_llama(), random_ids(3, 10, 96), dtype, checkpointing, 5, switch)
    assert count == 21 and error <= (FP32 if dtype == "fp32" else 3 * BF16)  # 32-wide layers average bf16 rounding less


def test_against_the_loop_oracle():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(11, 7))
    targets = attach(layer, SketchConfig(rank=3, targets=("0",)))
    x_NK = torch.randn(13, 11)
    y_ND = layer(x_NK)
    g_ND = torch.randn_like(y_ND)
    y_ND.backward(g_ND)
    expected = reference.sketch(g_ND, x_NK, targets["0"].projection())
    assert torch.allclose(targets["0"].sketch.grad.double(), expected, rtol=1e-5, atol=1e-6)


def test_forward_and_input_gradient_are_the_ordinary_ones_to_the_bit():
    model, ids = tiny_llama(), random_ids(2, 9, 96)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    before = model(inputs_embeds=embedded).logits
    (grad_before,) = torch.autograd.grad(before.square().sum(), embedded)
    attach(model, SketchConfig(rank=4))
    after = model(inputs_embeds=embedded).logits
    (grad_after,) = torch.autograd.grad(after.square().sum(), embedded)
    assert torch.equal(before, after) and torch.equal(grad_before, grad_after)
    with torch.no_grad():
        assert torch.equal(model(inputs_embeds=embedded).logits, before)


def test_first_layer_with_a_plain_input():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    x = torch.randn(8, 6)
    model(x).square().sum().backward()
    dense = {n: m.weight.grad.double().clone() for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    model.zero_grad()
    targets = attach(model, SketchConfig(rank=3, targets=("0", "2")))
    model(x).square().sum().backward()
    assert worst_error(targets, dense) <= FP32


def test_checkpointed_first_layer_with_a_plain_input():
    """Reentrant checkpointing of a plain input gives no gradient at all in torch; the missing sketch must be an error."""
    for reentrant in (False, True):
        model = nn.Sequential(nn.Linear(6, 5))
        logra = LoGRA(model, SketchConfig(rank=3, targets=("0",)))
        y = checkpoint(model, torch.randn(8, 6), use_reentrant=reentrant)
        if y.requires_grad:
            y.sum().backward()
            assert logra.propose().version == 1
        else:
            with pytest.raises(MissingSketchError, match="any of 1 targets"):
                logra.propose()
        logra.detach()


@pytest.mark.parametrize("switch", ["one_sided", "two_sided", "shared", "shared bits"])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_several_forwards_then_one_backward_and_microbatches(checkpointing, switch):
    model, ids = prepare(tiny_llama(), "fp32", checkpointing), random_ids(4, 10, 96)
    dense = dense_gradients(model, ids, "fp32")
    targets = attach(model, SketchConfig(rank=5, **SWITCHES[switch]))
    losses = [policy_rows(model, ids, row) for row in range(4)]
    torch.stack(losses).mean().backward()
    assert worst_error(targets, dense) <= FP32
    model.zero_grad()
    assert all(t.sketch.grad is None for t in targets.values())
    for row in range(4):
        (policy_rows(model, ids, row) / 4).backward()
    assert worst_error(targets, dense) <= FP32


def policy_rows(model, ids, row):
    advantage = torch.randn(len(ids), 1, generator=torch.Generator().manual_seed(1))[row]
    logp = model(input_ids=ids[row : row + 1], use_cache=False).logits.log_softmax(-1)[:, :-1]
    return -(logp.gather(-1, ids[row : row + 1, 1:, None]).squeeze(-1) * advantage).mean()


def test_sketch_follows_torch_gradient_semantics():
    """Twice through a retained graph doubles, as `.grad` does; `autograd.grad` of another input adds nothing."""
    model, ids = tiny_llama(), random_ids(2, 8, 96)
    targets = attach(model, SketchConfig(rank=4))
    loss = policy_loss(model, ids)
    loss.backward(retain_graph=True)
    once = {n: t.sketch.grad.clone() for n, t in targets.items()}
    loss.backward()
    assert all(torch.allclose(t.sketch.grad, 2 * once[n]) for n, t in targets.items())
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    torch.autograd.grad(model(inputs_embeds=embedded).logits.sum(), embedded)
    assert all(torch.allclose(t.sketch.grad, 2 * once[n]) for n, t in targets.items())


def test_gradient_clipping_scales_the_sketch_and_reports_its_norm():
    model, ids = tiny_llama(), random_ids(2, 8, 96)
    logra = LoGRA(model, SketchConfig(rank=4))
    policy_loss(model, ids).backward()
    norm = logra.grad_norm()
    reported = nn.utils.clip_grad_norm_(model.parameters(), norm / 2)
    assert norm > 0 and float(reported) == pytest.approx(norm, rel=1e-5)
    assert logra.grad_norm() == pytest.approx(norm / 2, rel=1e-4)


def test_compiled_after_attach_equals_eager_and_compiled_before_is_refused():
    model, ids = tiny_llama(num_hidden_layers=1), random_ids(2, 8, 96)
    dense = dense_gradients(model, ids, "fp32")
    targets = attach(model, SketchConfig(rank=4))
    policy_loss(torch.compile(model), ids).backward()
    assert worst_error(targets, dense) <= FP32
    detach(model)
    compiled = torch.compile(model)
    with pytest.raises(RuntimeError, match="compiled"):
        attach(compiled, SketchConfig(rank=4))
    model.model.layers[0].compile()
    with pytest.raises(RuntimeError, match="compiled"):
        attach(model, SketchConfig(rank=4))


def test_attach_and_detach_leave_state_dict_and_flags():
    model, ids = tiny_llama(), random_ids(2, 8, 96)
    model.lm_head.weight.requires_grad_(False)
    keys, flags = list(model.state_dict()), {n: p.requires_grad for n, p in model.named_parameters()}
    attach(model, SketchConfig(rank=4))
    assert list(model.state_dict()) == keys
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [n for n, _ in model.named_parameters() if n.endswith(SKETCH)]
    result = model.load_state_dict(model.state_dict(), strict=True)
    assert not result.missing_keys and not result.unexpected_keys
    with pytest.raises(RuntimeError, match="sketch already"):
        attach(model, SketchConfig(rank=4))
    detach(model)
    assert list(model.state_dict()) == keys and {n: p.requires_grad for n, p in model.named_parameters()} == flags
    assert not any(m._forward_hooks or m._state_dict_hooks for m in model.modules())
    policy_loss(model, ids).backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None


@pytest.mark.parametrize("switch", ["one_sided", "two_sided", "shared", "shared bits"])
def test_saved_tensors_are_freed_after_backward(switch):
    model, ids = tiny_llama(), random_ids(2, 8, 96)
    attach(model, SketchConfig(rank=4, **SWITCHES[switch]))
    with TrackMemory() as memory:
        for _ in range(2):
            loss = policy_loss(model, ids)
            loss.backward()
            del loss
            model.zero_grad()
            gc.collect()
    projections = sum({id(x): x.nbytes for t in model._logra_targets.values() for x in drawn(t).values()}.values())
    assert memory.live <= projections + 4096  # nothing of the steps is left but the drawn projections


@pytest.mark.parametrize("switch", ["one_sided", "two_sided"])
def test_no_tensor_of_a_targets_shape_in_backward_and_update(switch):
    """Dispatch level, on the real LLM: neither G nor U A exists, in whole, at any moment."""
    model, _ = real_llm()
    logra = LoGRA(model, SketchConfig(rank=16, **SWITCHES[switch]), OptimConfig(update_ratio=1e-4))
    shapes = {tuple(t.weight.shape) for t in logra.targets.values()}
    shapes |= {s[::-1] for s in shapes}
    loss = policy_loss(model, random_ids(1, 20, 49152))
    with TrackMemory() as memory:
        loss.backward()
        logra.step()
    assert memory.shapes and not memory.shapes & shapes
    model, _ = real_llm()  # the detector itself: with trainable weights it must see G
    loss = policy_loss(model, random_ids(1, 20, 49152))
    with TrackMemory() as memory:
        loss.backward()
    assert memory.shapes & shapes == {tuple(t.weight.shape) for t in logra.targets.values()}


@pytest.mark.parametrize("switch", ["one_sided", "two_sided", "shared"])
def test_backward_after_a_redraw_is_refused(switch):
    model, ids = tiny_llama(), random_ids(2, 8, 96)
    logra = LoGRA(model, SketchConfig(rank=4, **SWITCHES[switch]))
    late = policy_loss(model, ids)
    policy_loss(model, ids).backward()
    logra.step()
    with pytest.raises(RuntimeError, match="another projection draw than the current one .1."):
        late.backward()


def test_what_cannot_be_a_target_is_an_error():
    model = tiny_llama(tie_word_embeddings=True)
    for targets, words in (
        (("q_proj", "w_q"), "w_q.*matches no module.*q_proj"),
        (("mlp",), "LlamaMLP, not a linear layer"),
        (("lm_head",), "tied"),
    ):
        with pytest.raises(ConfigError, match=words):
            attach(model, SketchConfig(rank=4, targets=targets))
    for changes in ({"distribution": "orthonormal"}, {"distribution": "hadamard"}, {"distribution": "coordinates"}, {"projection": "activation"}):
        with pytest.raises(ConfigError, match="rows need rank <= inputs"):
            attach(model, SketchConfig(rank=40, **changes))
    assert not hasattr(model, "_logra_targets") and all(p.requires_grad for p in model.parameters())


def test_table_lists_every_kind():
    table = target_table(attach(tiny_llama(), SketchConfig(rank=4)))
    for kind in SketchConfig().targets:
        assert kind in table
    assert "21" in table.splitlines()[-1]


def test_zero_tokens_and_unused_layers():
    layer = nn.ModuleDict({"a": nn.Linear(5, 4), "b": nn.Linear(5, 4)})
    logra = LoGRA(layer, SketchConfig(rank=2, targets=("a", "b")))
    layer["a"](torch.zeros(0, 5)).sum().backward()
    assert torch.equal(logra.targets["a"].sketch.grad, torch.zeros(4, 2))
    assert float(logra.propose().factors["b"].norm()) == 0


class CountProducts(TorchDispatchMode):
    """How many matrix products had a result of a given number of columns."""

    def __init__(self, columns):
        super().__init__()
        self.columns, self.count = columns, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += func is torch.ops.aten.mm.default and out.shape[1] == self.columns
        return out


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_layers_that_read_the_same_input_share_one_projection_and_one_product(checkpointing):
    counts = {}
    for switch in ("one_sided", "shared"):
        model, ids = prepare(tiny_llama(), "fp32", checkpointing), random_ids(2, 9, 96)
        targets = attach(model, SketchConfig(rank=5, **SWITCHES[switch]))
        with CountProducts(5) as counter:
            loss = policy_loss(model, ids)
            forward = counter.count
            loss.backward()
        counts[switch] = forward
        for block in (f"model.layers.{i}." for i in range(3)):
            A = {n.rpartition(".")[2]: t.projection() for n, t in targets.items() if n.startswith(block)}
            for pair in (("q_proj", "k_proj"), ("q_proj", "v_proj"), ("gate_proj", "up_proj")):
                assert torch.equal(A[pair[0]], A[pair[1]]) is (switch == "shared")
            assert not torch.equal(A["q_proj"], A["gate_proj"]) and not torch.equal(A["q_proj"], A["o_proj"])
    per_pass = {"none": 1, "reentrant": 0, "non-reentrant": 1}[checkpointing]  # reentrant checkpointing runs its first pass without gradients
    assert counts == {"one_sided": 21 * per_pass, "shared": 12 * per_pass}


def test_a_shared_product_is_not_used_for_another_input():
    """The same tensor changed in place, another draw, and different inputs of layers that usually share one."""
    torch.manual_seed(0)
    model = nn.ModuleDict({n: nn.Linear(12, 8, bias=False) for n in ("q_proj", "k_proj")})
    logra = LoGRA(model, SketchConfig(rank=4, share_inputs=True, targets=("q_proj", "k_proj")))
    x, g = torch.randn(6, 12), torch.randn(6, 8)
    for change in (lambda: None, lambda: x.mul_(2), lambda: x.copy_(torch.randn(6, 12))):
        y = model["q_proj"](x)
        y.backward(g)
        first, A = x.clone(), logra.targets["q_proj"].projection()
        change()
        model["k_proj"](x).backward(g)
        assert torch.allclose(logra.targets["q_proj"].sketch.grad, g.T @ first @ A.T, atol=1e-5)
        assert torch.allclose(logra.targets["k_proj"].sketch.grad, g.T @ x @ A.T, atol=1e-5)
        logra.step()  # and the next draw
    assert len(logra.targets["q_proj"].how.products) == 1
    del x
    gc.collect()
    assert len(logra.targets["q_proj"].how.products) == 0


def test_a_layer_of_two_names_is_sketched_once():
    """A wrapper that keeps the model and a part of it, as value heads do."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.llm = tiny_llama()
            self.backbone = self.llm.model

    model = Two()
    targets = attach(model, SketchConfig(rank=4))
    assert len(targets) == len({id(t.module) for t in targets.values()}) == 21 and all(n.startswith("llm.") for n in targets)
    dense = tiny_llama()
    for one in (model.llm, dense):
        policy_loss(one, random_ids(2, 8, 96)).backward()
    for name, target in targets.items():
        expected = dense.get_submodule(name.removeprefix("llm.")).weight.grad @ target.projection().T
        assert float((target.sketch.grad - expected).norm() / expected.norm()) < 1e-5, name


class Stored(nn.Linear):
    """As quantised layers do: the weight it multiplies with is made of the one it has."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.weight = nn.Parameter(torch.zeros(outputs, inputs).to(torch.float8_e4m3fn), requires_grad=False)


@pytest.mark.parametrize("layer", [Stored(8, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))], ids=["fp8", "parametrised"])
def test_layers_that_compute_with_another_weight_are_refused(layer):
    model = nn.Module()
    model.q_proj = layer
    with pytest.raises(ConfigError, match="'q_proj' is .*, not a linear layer with a plain floating-point weight"):
        attach(model, SketchConfig(rank=2, targets=("q_proj",)))


def test_two_layers_of_one_name_are_refused():
    model = nn.Module()
    model.module = nn.ModuleDict({"q_proj": nn.Linear(4, 4)})
    model.q_proj = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="two layers are called 'q_proj'"):
        attach(model, SketchConfig(rank=2, targets=("q_proj",)))


def test_data_parallel_wrappers_are_refused_with_what_to_use():
    model = nn.DataParallel(tiny_llama())
    with pytest.raises(ConfigError, match="DataParallel would not add up sketches.*ShardedLoGRA"):
        attach(model, SketchConfig(rank=4))
    assert all(p.requires_grad for p in model.parameters())

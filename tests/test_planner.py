"""The planner against measured steps on a CPU, against the paper's averages, and against itself (every switch saves what its formula says)."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from models import drawn, probe_batch, random_ids, real_llm

from logra_core import ConfigError, LoGRA, predict_q
from logra_core.planning.layout import BEST, PAPER, SWITCHES, Layout, layout_of
from logra_core.planning.memory import TrackMemory, measure_step, optimizer_bytes, storage_bytes
from logra_core.planning.planner import CATEGORIES, H100, PHASES, PhaseMeter, plan, saving
from logra_core.planning.shapes import linear_shapes, parameters
from logra_core.rl.settings import PPOConfig, TrainConfig
from logra_core.variants import KLConfig, OptimConfig, SketchConfig

NAME, GiB = "SmolLM2-135M", 2**30
# METHOD section 7: published on H100, four training GPUs, GiB a GPU (average, peak).
PUBLISHED = {
    ("Qwen2.5-Math-1.5B", "dense"): (9.18, 9.19), ("Qwen2.5-7B", "dense"): (31.82, 31.85), ("Qwen2.5-Math-1.5B", "logra"): (7.18, 8.66),
    ("Qwen2.5-7B", "logra"): (17.29, 22.26), ("27B (assumed)", "logra"): (51.54, 53.88),
}  # fmt: skip


@pytest.fixture(scope="module")
def llm():
    return real_llm()[0]


def on_one(method: str, rank: int, tokens: int, **settings):
    """A plan of one fp32 device with a single microbatch that trains the targets alone, which is what a CPU measures."""
    settings["layout"] = replace(settings.get("layout", PAPER), dense_all=False)
    return plan(NAME, method, rank, 1, tokens=tokens, dtype=torch.float32, accumulate=False, **settings)


@pytest.mark.parametrize(
    ("method", "rank", "checkpointing", "layout"),
    [
        ("dense", 64, False, Layout()),
        ("logra", 64, False, Layout()),
        ("logra", 256, True, Layout()),
        ("logra", 256, True, Layout(projection="bits", logit_chunk=16)),
    ],
)
def test_peak_within_five_percent_of_the_measured_one(llm, method, rank, checkpointing, layout):
    """SmolLM2-135M on a CPU. Measured: equal in the passes, to 0.3 % in the optimizer's step."""
    tokens = 96
    how = {"storage": layout.projection, "chunk": layout.logit_chunk}
    real = measure_step(llm, method, rank, random_ids(1, tokens, 49152), checkpointing, **how)
    made = on_one(method, rank, tokens, checkpointing=checkpointing, layout=layout)
    passes = max(made.total("forward"), made.total("backward"))
    assert passes == pytest.approx(real.peak, rel=1e-3)
    assert made.total("update") == pytest.approx(real.state + real.scratch, rel=0.02)
    measured = max(real.peak, real.state + real.scratch)
    assert max(made.total(p) for p in ("forward", "backward", "update")) == pytest.approx(measured, rel=0.05)


def test_phases_of_a_real_step_on_a_cpu(llm):
    """Forward, backward, update and probe of one step, as the meter sees them. Measured: within 0.2 %."""
    rank, tokens, ids = 64, 96, random_ids(2, 96, 49152)
    logra = LoGRA(llm, SketchConfig(rank=rank))
    projections = storage_bytes(t.projection() for t in logra.targets.values())
    moments = 4 * sum(t.module.out_features for t in logra.targets.values())
    meter = PhaseMeter(torch.device("cpu"), storage_bytes(llm.parameters()) + projections + moments)
    with meter.running():
        with meter.phase("forward"):
            logits = llm(input_ids=ids, use_cache=False).logits.float()
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            del logits
        with meter.phase("backward"):
            loss.backward()
        del loss
        with meter.phase("probe"):
            update = logra.propose()
            predict_q(llm, update, probe_batch(ids, 1), KLConfig())
        with meter.phase("update"):
            logra.apply(update, 0.0)
    logra.detach()
    made = on_one("logra", rank, tokens, rows=2, checkpointing=False)
    for phase in meter.peaks:
        assert made.total(phase) == pytest.approx(meter.peaks[phase], rel=0.02), phase
    assert meter.peaks["probe"] > meter.peaks["update"]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_score_sketchs_probe_is_planned(llm, checkpointing):
    """A backward-sized pass of two rows, with activations kept and recomputed. Measured: planned 0.8 and 1.1 % above."""
    rank, tokens, ids = 64, 96, random_ids(2, 96, 49152)
    logra = LoGRA(llm, SketchConfig(rank=rank))
    if checkpointing:
        llm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    F.cross_entropy(llm(input_ids=ids, use_cache=False).logits.float()[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    update = logra.propose()
    with TrackMemory() as tracked:
        predict_q(llm, update, probe_batch(ids, 1), KLConfig(estimator="score_sketch", score_samples=2))
    logra.detach()
    llm.gradient_checkpointing_disable()
    made = on_one("logra", rank, tokens, rows=2, checkpointing=checkpointing, estimator="score_sketch").phases["probe"]["probe"]
    assert tracked.peak <= made <= 1.03 * tracked.peak


def test_the_rule_gives_the_papers_averages():
    """Found by hand to fit five figures, so this checks the arithmetic, not the inference. The 27B config is assumed."""
    for (name, method), (average, peak) in PUBLISHED.items():
        made = plan(name, method)
        assert made.average / GiB == pytest.approx(average, rel=0.08), (name, method)
        assert made.rule_peak / GiB == pytest.approx(peak, rel=0.12), (name, method)


def test_dense_27b_fails_at_the_first_adam_state():
    """As in the paper: everything but Adam's state fits, with it nothing does."""
    made = plan("27B (assumed)", "dense")
    assert not made.fits() and "does not fit" in made.answer() and "largest term: optimizer" in made.answer()
    assert max(made.total(p) - made.phases[p]["optimizer"] for p in ("forward", "backward")) < H100


def test_the_best_settings_fit():
    seven, big = (plan(n, "logra", layout=BEST) for n in ("Qwen2.5-7B", "27B (assumed)"))
    two = plan("27B (assumed)", "logra", gpus=2, layout=BEST)
    assert seven.average <= 12 * GiB and big.average <= 36 * GiB
    assert two.fits() and not plan("27B (assumed)", "logra", gpus=2).fits()
    assert plan("Qwen2.5-7B", "logra").answer().startswith("Qwen2.5-7B, logra, 4 GPUs: fits")


def test_each_switch_saves_what_its_formula_says():
    name = "Qwen2.5-7B"
    all_, layers = parameters(name), linear_shapes(name)
    trained, k = sum(d * k for d, k in layers.values()), sum(k for _, k in layers.values())
    shared = sum(k for n, (_, k) in layers.items() if not n.endswith(("k_proj", "v_proj", "up_proj")))
    saved = {s.title: saving(s, name, method="logra")[0] for s in SWITCHES}
    expected = [2 * all_ // 4, 4 * (all_ - trained) // 4, 4 * 256 * k - 32 * k, 4 * 256 * (k - shared), 8 * (4096 - 256) * 152064]
    expected.append(3 * 256 * sum(d for d, _ in layers.values()))
    assert list(saved.values()) == pytest.approx(expected, rel=1e-6, abs=64)


def test_the_layout_of_a_run_is_what_its_optimizer_keeps(llm):
    """Shared projections as bits, fp32 ones, and a mean of sketches made with one A: to the byte."""
    shared = SketchConfig(rank=64, share_inputs=True)
    cases = (replace(shared, projection_storage="bits"), OptimConfig()), (shared, OptimConfig()), (replace(shared, refresh=False), OptimConfig(beta1=0.9))
    for sketch, optim in cases:
        cfg = TrainConfig(sketch=sketch, optim=optim, ppo=PPOConfig(logit_chunk=16))
        logra = LoGRA(llm, sketch, optim)
        for target in logra.targets.values():
            target.projection()
        held = sum({id(x): x.nbytes for t in logra.targets.values() for x in drawn(t).values()}.values())
        moments, sketches = optimizer_bytes(logra), 4 * sum(t.sketch.numel() for t in logra.targets.values())
        logra.detach()
        made = on_one("logra", 64, 16, layout=layout_of(cfg)).phases["update"]
        assert (made["projections"], made["optimizer"], made["gradients"]) == (held, moments, sketches)
    assert layout_of(cfg).logit_chunk == 16 and layout_of(cfg).frozen_masters and not layout_of(cfg).sketch_rows
    with pytest.raises(ConfigError, match="one_sided only"):
        layout_of(TrainConfig(sketch=SketchConfig(kind="two_sided")))


def test_more_gpus_or_less_work_never_need_more():
    made = [plan(NAME, "logra", gpus=n, tokens=64).peak for n in (2, 4, 8)]
    assert made == sorted(made, reverse=True)
    assert plan(NAME, "logra", tokens=64).peak < plan(NAME, "logra", tokens=128).peak
    one = plan(NAME, "lora", tokens=64)
    assert "probe" not in one.phases and set(one.phases) <= set(PHASES) and set(one.phases["update"]) == set(CATEGORIES)
    assert one.total("probe") == 0 and PAPER == Layout()


def test_bf16_alone_is_the_sum_of_its_shapes():
    """Stochastic rounding: 2 bytes a weight and no masters, where fp32 shards take 4."""
    cfg = TrainConfig(compute_dtype="bfloat16", optim=OptimConfig(stochastic_rounding=True))
    layout = layout_of(cfg)
    assert layout.bf16_alone and not layout_of(TrainConfig()).bf16_alone
    made, masters = (plan(NAME, "logra", tokens=64, layout=x).phases["update"] for x in (layout, replace(layout, bf16_alone=False)))
    assert (made["weights"], made["masters"]) == (2 * parameters(NAME) // 4, 0)
    assert (masters["weights"], masters["masters"]) == (0, 4 * parameters(NAME) // 4)


def test_bad_input_is_named():
    for bad, message in (({"method": "galore"}, "dense, lora, logra"), ({"gpus": 0}, "gpus = 0"), ({"estimator": "guess"}, "jvp, .*score_sketch")):
        with pytest.raises(ConfigError, match=message):
            plan(NAME, **({"method": "logra", "tokens": 16} | bad))
    with pytest.raises(ConfigError, match="Layout.projection = 'int8'"):
        Layout(projection="int8")
    with pytest.raises(ConfigError, match="cpu or cuda"), PhaseMeter(torch.device("meta")).running():
        pass

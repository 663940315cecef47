"""Launching: nothing outlives its starter, a run killed at any moment goes on to the same end, and every failure names itself."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from test_train import HELD_OUT, LONG, SHORT, exact, questions, settings
from tiny import tiny_policy

from logra_core import ConfigError
from logra_core.planning.launch import Guarded, LaunchConfig, LaunchError, Servers, state, train
from logra_core.rl.runlog import RunLog, read_log
from logra_core.rl.settings import TrainConfig
from logra_core.rl.trainer import Trainer, config_digest

ROOT = Path(__file__).resolve().parents[1]
RECIPES = {"11_ppo_h100_math": "ci_math.yaml", "12_ppo_h100_27b": "ci_gym.yaml"}
LIMIT = 900  # seconds for any part of a notebook; on two quiet cores a tenth of it is needed
# Writes its pid and those of a child and of a grandchild in another session whose parent is gone; none of them heeds SIGTERM.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
a = subprocess.Popen([sys.executable, "-c", sleep])
orphan = "import os, subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True, stdout=-3, stderr=-3).pid)"
b = subprocess.run([sys.executable, "-c", orphan, sleep], capture_output=True, text=True).stdout if os.name else ""
print(os.getpid(), a.pid, int(b), flush=True)
time.sleep(300)
"""
STARTER = """
import sys, time
from pathlib import Path
from logra_core.planning.launch import Guarded
held = Guarded([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]), grace=1.0)
time.sleep(300)
"""


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            found += [pid] if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else []
        except psutil.NoSuchProcess:
            pass
    return found


def until(done, seconds: float, what: str):
    end = time.monotonic() + seconds
    while not (value := done()):
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.05)
    return value


def children() -> dict[int, str]:
    """Every process below this one, by number; some are left by other tests (fork servers)."""
    found = {}
    for p in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if p.status() != psutil.STATUS_ZOMBIE:
                found[p.pid] = " ".join(p.cmdline())
    return found


def pids_in(log: Path) -> list[int]:
    return [int(w) for w in log.read_text().split()] if log.exists() else []


# ---------------------------------------------------------------- the guard


@pytest.mark.parametrize("end", ["closed", "starter killed", "guard told", "guard killed", "command ended"])
def test_nothing_outlives_its_starter(tmp_path, end):
    log = tmp_path / "log"
    script = STUBBORN if end != "guard killed" else STUBBORN.replace("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsleep", "sleep")
    script = script.replace("time.sleep(300)\n", "raise SystemExit(3)\n") if end == "command ended" else script
    if end == "starter killed":
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        starter = subprocess.Popen([sys.executable, "-c", STARTER, script, str(log)], env=environment, start_new_session=True)
        pids = until(lambda: pids_in(log)[:3], 60, "start")
        os.killpg(starter.pid, signal.SIGKILL)
        starter.wait()
    else:
        held = Guarded([sys.executable, "-c", script], log, grace=1.0)
        pids = until(lambda: pids_in(log)[:3], 60, "start")
        assert end == "command ended" or len(alive(pids)) == 3
        if end == "closed":
            held.close()
            assert held.poll() == 128 + signal.SIGKILL
        elif end == "command ended":
            until(lambda: held.poll() is not None, 30, "end")
            assert held.poll() == 3
        else:
            held._process.send_signal(signal.SIGTERM if end == "guard told" else signal.SIGKILL)
    gone = pids if end != "guard killed" else pids[:1]  # no power over what a killed guard's command leaves behind
    until(lambda: not alive(gone), 60, f"{end}: processes {gone}")
    for pid in alive(pids):
        os.kill(pid, signal.SIGKILL)


# ---------------------------------------------------------------- a run without servers


def recipe_of(folder: Path, **changes) -> str:
    cfg = settings(tiny_policy(folder / "policy"), folder / "run", **({"updates": 2, "checkpoint_every": 1, "threads": 1} | changes))
    path = folder / "recipe.json"
    path.write_text(json.dumps(asdict(cfg)))
    return str(path)


def test_train_shows_rows_as_they_come_and_leaves_finished_runs_alone(tmp_path):
    launch = LaunchConfig(recipe_of(tmp_path), servers=0)
    assert {seed: state(launch.config(seed)) for seed in (3, 4)} == {3: "new", 4: "new"}
    seen, when = [], []
    made = train(launch, [3], lambda seed, row: (seen.append((seed, row)), when.append(state(launch.config(3)))))
    assert seen == [(3, row) for row in made[3]] and [r["kind"] for r in made[3]] == ["eval", "update", "update", "eval", "end"]
    assert when[0] == "unfinished" and when[-1] == "finished"
    header = read_log(tmp_path / "run/seed3/log.jsonl")[0]
    assert header["config"]["seed"] == header["config"]["sketch"]["seed"] == 3
    words = (tmp_path / "run/seed3/train.log").read_text()
    assert "after 2 updates" in words
    again = train(launch, [3], lambda *_: pytest.fail("nothing to do"))
    assert again == made and (tmp_path / "run/seed3/train.log").read_text() == words
    assert str(tmp_path) not in (tmp_path / "run/seed3/log.jsonl").read_text()
    with pytest.raises(ConfigError, match="is of another run: ppo.clip"):
        train(LaunchConfig(launch.recipe, ("ppo.clip=0.3",), servers=0), [3])
    # Further updates go on from the checkpoint; a row that was dropped on the way comes once more.
    more, seen = LaunchConfig(launch.recipe, ("updates=3",), servers=0), []
    assert state(more.config(3)) == "unfinished"
    train(more, [3], lambda seed, row: seen.append(row["kind"]))
    assert seen[:5] == ["eval", "update", "update", "eval", "end"] and seen[-3:] == ["update", "eval", "end"]


def test_a_failing_trainer_is_reported_in_its_own_words(tmp_path):
    with pytest.raises(LaunchError, match=r"(?s)training of seed 0 ended with code \d+; .* no policy at '/no/such/folder'"):
        train(LaunchConfig(recipe_of(tmp_path), ("model=/no/such/folder",), ranks=1, servers=0), [0])


def test_an_interrupt_ends_every_process(tmp_path):
    before, pids = children(), []

    def interrupt(seed, row):
        pids.extend(pid for pid, words in children().items() if pid not in before and "logra_core.rl.train" in words)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(LaunchConfig(recipe_of(tmp_path, updates=500), servers=0), [0], interrupt)
    assert len(pids) >= 3 and not alive(pids)  # torchrun (below its guard) and two ranks


def test_ranks_drop_the_questions_that_one_process_drops(tmp_path):
    changes = {"task": questions(tmp_path / "data", SHORT + LONG, HELD_OUT), "ppo": {"prompts_per_update": 4, "microbatch": 2}}
    launch = LaunchConfig(recipe_of(tmp_path, **changes), servers=0)
    ranks = train(launch, [0])[0]
    cfg = replace(launch.config(0), out=str(tmp_path / "one"))
    Trainer(cfg).run()
    (header, _), (other, one) = read_log(tmp_path / "run/seed0/log.jsonl"), read_log(tmp_path / "one/log.jsonl")
    assert header["task_counts"] == other["task_counts"] and header["task_counts"]["train_too_long"] == len(LONG)
    assert header["config_digest"] == other["config_digest"]
    made, alone = ([(r["tokens"], r["reward_rate"]) for r in rows if r["kind"] == "update"] for rows in (ranks, one))
    assert made == alone and len(made) == 2


def test_a_run_is_known_by_its_whole_settings_from_any_folder(tmp_path, monkeypatch):
    """A record keeps of an absolute path what is below the working folder, or its end; its digest tells the rest."""
    cfg = TrainConfig(out=str(tmp_path / "run"), model=str(tmp_path / "a" / "qwen"), updates=1)
    (tmp_path / "elsewhere").mkdir()
    for digest in ({"config_digest": config_digest(cfg)}, {}):
        monkeypatch.chdir(tmp_path)
        log = tmp_path / "run" / "log.jsonl"
        log.unlink(missing_ok=True)
        with RunLog(log, {"seed": 0, "config": asdict(cfg)} | digest) as made:
            made.row("end", update=1)
        assert str(tmp_path) not in log.read_text() and state(cfg) == "finished"
        monkeypatch.chdir(tmp_path / "elsewhere")
        if digest:
            assert state(cfg) == "finished" and state(replace(cfg, out=cfg.out + "/", engine_urls=(), updates=2)) == "unfinished"
            with pytest.raises(ConfigError, match="of another run: seed .saved 0, now 1"):
                state(replace(cfg, model="a/qwen", seed=1))
            monkeypatch.chdir(tmp_path)
            with pytest.raises(ConfigError, match="of another run: a path in its settings, such as model"):
                state(replace(cfg, model="a/qwen"))
        else:  # a record from before there were digests
            with pytest.raises(ConfigError, match="of another run: model .saved 'a/qwen', now 'qwen'"):
                state(cfg)


def test_a_server_gets_the_home_folder_by_its_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    launch = LaunchConfig(recipe_of(tmp_path), ("model=~/policy",))
    words = launch.serving(8000, launch.config(0))
    assert words[words.index("--model") + 1] == f"{tmp_path}/policy"


@pytest.mark.parametrize(
    ("settings", "needle"),
    [
        ({"ranks": 0}, "LaunchConfig.ranks = 0: allowed is >= 1"),
        ({"servers": -1}, "servers = -1"),
        ({"train_devices": [0]}, "none, or one for each of 2 ranks"),
        ({"rollout_devices": [0, 1]}, "none, or one for each of 1 servers"),
        ({"train_devices": [0, 1], "rollout_devices": [1]}, "GPUs that nothing else of the run uses"),
        ({"start_seconds": 0}, "start_seconds = 0"),
    ],
)
def test_a_bad_launch_is_refused_by_name(settings, needle):
    with pytest.raises(ConfigError, match=needle):
        LaunchConfig("recipe.yaml", **settings)


def test_commands_name_servers_devices_and_folders(tmp_path):
    launch = LaunchConfig(recipe_of(tmp_path), ranks=4, servers=2, train_devices=[0, 1, 2, 3], rollout_devices=[4, 5])
    words = launch.command(7, ["http://127.0.0.1:1", "http://127.0.0.1:2"])
    assert words[1:5] == ["-m", "torch.distributed.run", "--nproc-per-node", "4"] and words[-7:-5] == ["logra_core.rl.train", launch.recipe]
    assert words[-5:] == [
        "seed=7", "sketch.seed=7", f"out={tmp_path}/run/seed7", "engine=vllm", "engine_urls=[http://127.0.0.1:1, http://127.0.0.1:2]",
    ]  # fmt: skip
    assert launch.config(7).engine == "vllm" and launch.config(7).engine_urls == ()
    shown = tmp_path / "shown"
    held = Guarded([sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['X'])"], shown, [4, 5], {"X": "y"})
    until(lambda: held.poll() is not None, 30, "end")
    assert (held.poll(), shown.read_text()) == (0, "4,5 y\n")
    held.close()


# ---------------------------------------------------------------- servers


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make vllm")
def test_a_server_that_fails_or_is_slow_is_reported_and_ended(tmp_path):
    before, launch = children(), LaunchConfig(recipe_of(tmp_path), ("model=/no/such/folder",), start_seconds=300)
    with pytest.raises(LaunchError, match=r"(?s)vLLM server 0 ended with code \d+:.*/no/such/folder"):
        Servers(launch, launch.config(0), tmp_path)
    slow = LaunchConfig(launch.recipe, start_seconds=1)
    with pytest.raises(LaunchError, match="vLLM server 0 is not up after 1 s"):
        Servers(slow, slow.config(0), tmp_path)
    assert not children().keys() - before.keys()


# ---------------------------------------------------------------- the notebooks, killed and run again


def nbrun(notebook: str, out: Path, log: Path, updates: int) -> subprocess.Popen:
    given = {"out": out, "updates": updates, "recipe": ROOT / "data" / "recipes" / RECIPES[notebook]}
    words = [sys.executable, "-m", "logra_core.lab.nbrun", str(ROOT / "notebooks" / f"{notebook}.ipynb"), "-o", str(log.parent / "executed")]
    words += [w for name, value in given.items() for w in ("-p", name, str(value))]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LOGRA_FIGURES": str(log.parent), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, env=environment, stdout=log.open("ab"), stderr=subprocess.STDOUT, start_new_session=True, cwd=log.parent)


def killed_in_update_2(process: subprocess.Popen, checkpoints: Path, log: Path) -> None:
    """Wait for the checkpoint of update 1; then kill the runner and the kernel without warning, and see that nothing is left of them."""
    try:

        def saved() -> bool:
            assert process.poll() is None, log.read_text()[-3000:]
            return (checkpoints / "000001").is_dir()

        until(saved, LIMIT, "checkpoint of update 1")
        tree = psutil.Process(process.pid).children(recursive=True)
        names = {p.pid: " ".join(p.cmdline()) for p in tree}
        for part, least in (("ipykernel_launcher", 1), ("guard.py", 2), ("vllm.entrypoints", 2), ("logra_core.rl.train", 4)):
            assert sum(part in n for n in names.values()) >= least, names
    finally:
        kernels = psutil.Process(process.pid).children() if process.poll() is None else []
        os.killpg(process.pid, signal.SIGKILL)
        for kernel in kernels:
            os.killpg(kernel.pid, signal.SIGKILL)  # a session of its own
        process.wait()
    until(lambda: not alive(list(names)), 60, "end of every process")
    assert sorted(p.name for p in checkpoints.glob("[0-9]*")) == ["000001"]  # so it was update 2 that was cut


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make vllm")
@pytest.mark.parametrize(("notebook", "updates"), [("11_ppo_h100_math", 3), ("12_ppo_h100_27b", 2)])
def test_a_notebook_killed_in_an_update_goes_on_to_the_same_end(tmp_path, notebook, updates):
    """Two FSDP ranks and a real vLLM server, gone at once. Run again, every row is that of a run that nobody killed (compared for one of
    the notebooks: they share the launch)."""
    out, log = tmp_path / "killed", tmp_path / "nbrun.log"
    killed_in_update_2(nbrun(notebook, out, log, updates), out / "seed0/checkpoint", log)
    process = nbrun(notebook, out, log, updates)
    try:
        assert process.wait(LIMIT) == 0, log.read_text()[-3000:]
    finally:
        process.terminate()  # nbrun ends its kernel, and the kernel's end is that of the launch
        process.wait()
    rows = read_log(out / "seed0/log.jsonl")[1]
    kinds = [("eval", 0), *(("update", u) for u in range(1, updates + 1)), ("eval", updates), ("end", updates)]
    assert [(r["kind"], r["update"]) for r in rows] == kinds
    assert rows[-1]["fingerprint"] == rows[-2]["fingerprint"] != rows[0]["fingerprint"]
    if notebook.startswith("11"):
        options = {"max_model_len": 512, "max_num_seqs": 1, "no_enable_prefix_caching": True}  # the notebook's own
        recipe = str(ROOT / "data" / "recipes" / RECIPES[notebook])
        whole = train(LaunchConfig(recipe, (f"out={tmp_path}/whole",), kv_cache_gib=0.25, server_options=options), [0])[0]
        assert [exact(r) for r in rows] == [exact(r) for r in whole]

"""The logra backend in a vLLM server, another process, updated over its RL routes; one server for the module."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import statistics
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models import real_llm
from test_vllm_backend import OPTIONS, RANK, UPDATES, flipped, full, next_update, prompts

from logra_core import LoGRA, SyncError
from logra_core.engines.group import EngineGroup
from logra_core.engines.plugin import environment
from logra_core.engines.rollout import RolloutError, SamplingConfig
from logra_core.engines.vllm_local import ON_CPU
from logra_core.engines.vllm_server import ServerRollout, serve_command
from logra_core.rl.ppo import sequence_logprobs
from logra_core.variants import OptimConfig, SketchConfig

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make vllm")

HERE = Path(__file__).resolve().parent
START_SECONDS = 240


def serve(policy: Path, port: int, log: Path) -> subprocess.Popen:
    options = OPTIONS | {"max_num_seqs": 64, "kv_cache_memory_bytes": 2**30} | ON_CPU
    command = serve_command(policy, port, **options)
    path = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    env = os.environ | environment() | {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": path}
    env.pop("VLLM_ALLOW_INSECURE_SERIALIZATION", None)
    return subprocess.Popen(command, env=env, stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    import requests

    from logra_core.engines.policy import embedded_policy
    from logra_core.engines.sender import HTTPClient, LoGRASender, SenderInfo

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("server")
    server = serve(embedded_policy(), port, folder / "log")
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
        while True:
            try:
                if requests.get(f"{url}/health", timeout=5).ok:
                    break
            except requests.ConnectionError:
                pass
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{(folder / 'log').read_text()[-3000:]}")
            time.sleep(1)
        sender = LoGRASender.trainer_init(SenderInfo(rank=0, spool=str(folder)), client=HTTPClient(url))
        model, tokenizer = real_llm()
        logra = LoGRA(model, SketchConfig(rank=RANK), OptimConfig(update_ratio=1e-4))
        yield SimpleNamespace(url=url, sender=sender, logra=logra, tokenizer=tokenizer, folder=folder)
    finally:
        os.killpg(server.pid, signal.SIGTERM)  # its own session: the server and its engine process
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def complete(run, prompt: list[int], tokens: int, **options) -> dict:
    import requests

    body = {"model": "policy", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 0, "return_token_ids": True} | options
    response = requests.post(f"{run.url}/v1/completions", json=body, timeout=300)
    response.raise_for_status()
    return response.json()["choices"][0]


def in_step(run) -> bool:
    (seen,), weights = run.sender.client.status("served"), run.logra.weights
    label = f"{run.logra.run_id}:{run.logra.version}"
    return run.sender.client.weight_version() == label and (seen["version"], seen["fingerprint"], seen["served"]) == (
        run.logra.version, weights.fingerprint(), weights.fingerprint(torch.bfloat16),
    )  # fmt: skip


def test_updates_over_http_are_served_bit_for_bit(run):
    from logra_core.engines.vllm_local import VLLMRollout

    long = prompts(run.tokenizer, 1, repeat=40)[0]
    complete(run, long, 8)  # its keys and values must not outlive the updates
    run.sender.send_weights(full(run))  # as a file
    assert in_step(run) and not list(run.folder.glob("*.full"))
    seconds = []
    for _ in range(UPDATES):
        message = next_update(run)
        began = time.perf_counter()
        run.sender.send_weights(message)
        seconds.append(time.perf_counter() - began)
    assert in_step(run)
    print(f"sync over HTTP: {statistics.median(seconds):.3f} s, {len(message):,} bytes (a third more as base64)")
    run.logra.model.save_pretrained(run.folder / "checkpoint")
    run.tokenizer.save_pretrained(run.folder / "checkpoint")
    served = [complete(run, p, 16, stop_token_ids=[run.tokenizer.eos_token_id]) for p in (long, prompts(run.tokenizer, 1)[0])]
    # The second engine, in this process, starts from the trainer's checkpoint: the same answers, then the same updates.
    run.second = VLLMRollout(run.folder / "checkpoint", **OPTIONS)
    for prompt, choice in zip((long, prompts(run.tokenizer, 1)[0]), served, strict=True):
        made = run.second.generate([prompt], SamplingConfig(max_tokens=16, temperature=0.0), 0)
        assert made.response_ids[0].tolist() == choice["token_ids"]
        assert made.logprobs[0].tolist() == torch.tensor(choice["logprobs"]["token_logprobs"]).tolist()


def test_two_engines_follow_one_trainer_and_share_the_prompts(run):
    server = ServerRollout(run.url, run.folder / "checkpoint", spool=str(run.folder))
    group = EngineGroup([server, run.second])
    group.resync(full(run))
    for _ in range(UPDATES):
        group.sync(next_update(run))
    weights = run.logra.weights
    assert group.version == run.logra.version and group.fingerprint() == weights.fingerprint()
    assert {e._status("served")["served"] for e in group.engines} == {weights.fingerprint(torch.bfloat16)}
    asked = prompts(run.tokenizer, 7)
    made = group.generate(asked, SamplingConfig(max_tokens=16, temperature=1.0), 3, expected_version=run.logra.version)
    assert [p.tolist() for p in made.prompt_ids] == asked and made.version == run.logra.version
    padded = made.padded(run.tokenizer.pad_token_id)
    with torch.no_grad():
        gap = (sequence_logprobs(run.logra.model, padded, temperature=1.0) - padded["rollout_logprobs"])[padded["response_mask"]].abs()
    assert gap.mean() < 0.1
    for prompt in asked[:2]:  # one at a time, there is nothing to be batched with
        alone = [e.generate([prompt], SamplingConfig(max_tokens=8, temperature=0.0), 0) for e in group.engines]
        assert alone[0].texts == alone[1].texts and torch.equal(alone[0].logprobs[0], alone[1].logprobs[0])
    # One engine refuses: neither changes. Both are asked again with the right message.
    message = next_update(run)
    before = [e._status("served") for e in group.engines]
    with pytest.raises(SyncError, match="engine 0 of 2 refused, none has changed: .*corrupted on the way"):
        group.sync(flipped(message))
    run.second.llm.sleep(level=1)
    with pytest.raises(SyncError, match="engine 1 of 2 refused, none has changed: .*sleeps or is paused"):
        group.sync(message)
    run.second.llm.wake_up()
    assert [e._status("served") for e in group.engines] == before and not server.sender.client.asleep()
    group.sync(message)
    assert group.fingerprint() == weights.fingerprint()
    run.second.close()
    with pytest.raises(RolloutError, match="no vLLM server with the logra backend at http://127.0.0.1:9"):
        ServerRollout("http://127.0.0.1:9", timeout=5)


def test_vllms_own_client_and_factory_drive_it_too(run):
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from logra_core.engines.plugin import register
    from logra_core.engines.sender import SenderInfo

    register()
    sender = WeightTransferTrainerFactory.trainer_init(SenderInfo(rank=0), client=HTTPVLLMWeightSyncClient(run.url))
    sender.send_weights(next_update(run))
    assert in_step(run)


def test_refusals_come_back_in_the_workers_words(run):
    one, two = next_update(run), next_update(run)
    before = run.sender.client.status("served")
    for message, says in ((two, "an earlier one was dropped"), (flipped(one), "corrupted on the way")):
        with pytest.raises(SyncError, match=says):
            run.sender.send_weights(message)
        assert run.sender.client.status("served") == before and not run.sender.client.asleep()
    run.sender.client.start_weight_update()  # a sender that dies here leaves the session open
    run.sender.send_weights(one)
    run.sender.send_weights(two)
    assert in_step(run)


def test_a_request_in_flight_ends_on_the_old_weights(run):
    prompt, message = prompts(run.tokenizer, 1)[0], next_update(run)
    alone = complete(run, prompt, 200, ignore_eos=True)
    found: dict = {}
    thread = threading.Thread(target=lambda: found.update(complete(run, prompt, 200, ignore_eos=True)))
    thread.start()
    time.sleep(0.5)  # 200 tokens take longer than that
    assert thread.is_alive()
    run.sender.send_weights(message)
    thread.join(120)
    assert found["token_ids"] == alone["token_ids"] and found["finish_reason"] == "length"
    assert found["logprobs"]["token_logprobs"] == alone["logprobs"]["token_logprobs"]
    assert in_step(run)
    assert complete(run, prompt, 200, ignore_eos=True)["logprobs"] != alone["logprobs"]

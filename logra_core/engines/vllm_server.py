"""Rollouts from a vLLM server in another process or on another machine, over its own HTTP routes.

Belongs here: `ServerRollout`, and `serve_command`, which starts such a server with the `logra` backend. The engine in this process is
in vllm_local.py; how weights get in is sender.py.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .policy import embedded_policy
from .rollout import RolloutError
from .vllm_local import SERVING, Answer, _Served, import_vllm, tokenizer_and_ends


def serve_command(path: str | Path, port: int, host: str = "127.0.0.1", **options: Any) -> list[str]:
    """The command line of a vLLM server that `ServerRollout` can use; run it with VLLM_SERVER_DEV_MODE=1 in its environment.

    options: further settings of the server by their long names with underscores (True or False: a switch), such as max_model_len.
    """
    settings = SERVING | {"model": path, "served_model_name": "policy", "host": host, "port": port}
    settings |= {"enable_scale_out": True} | options  # the route that takes and returns tokens
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in settings.items():
        text = [] if isinstance(value, bool) else [json.dumps(value) if isinstance(value, dict) else str(value)]
        command += [f"--{'no-' * (value is False)}{name.replace('_', '-')}", *text]
    return command


class ServerRollout(_Served):
    """A vLLM server at `url`, started by `serve_command`.

    path: the checkpoint folder that it serves, for tokenizer and end tokens (None: the embedded policy). timeout: seconds of one call.
    spool: a folder that the server can read too; full states then go as files. Requests arrive one by one, so how they are batched, and
    with it the last bits of a log-prob, depends on timing: a token that was a near tie may differ between two equal calls.
    """

    def __init__(self, url: str, path: str | Path | None = None, timeout: float = 600, spool: str | None = None) -> None:
        _, sender = import_vllm()
        path = embedded_policy() if path is None else path
        client = sender.HTTPClient(url.rstrip("/"), timeout)
        try:
            card = client._call("GET", "v1/models")["data"][0]
            self.model, self.room = card["id"], card.get("max_model_len")
            self.tokenizer, self.eos_ids = tokenizer_and_ends(path)
            self.vocabulary = len(self.tokenizer)
            self.sender = sender.LoGRASender.trainer_init(sender.SenderInfo(rank=0, spool=spool), client=client)
            self.url, self.timeout = url.rstrip("/"), timeout
            self._status()
        except Exception as error:
            raise RolloutError(f"no vLLM server with the logra backend at {url}: {error}") from error

    def close(self) -> None:
        """Leave the server running: whoever started it stops it."""
        self.sender = None

    def _run(self, prompts: list[list[int]], params: list[dict]) -> list[Answer]:
        if not self.sender.client.reset_prefix_cache():
            raise RolloutError("prefix cache not reset: requests of somebody else are running")
        with ThreadPoolExecutor(max_workers=min(256, len(prompts))) as pool:
            return list(pool.map(self._ask, prompts, params))

    def _ask(self, prompt: list[int], params: dict) -> Answer:
        import requests

        body = {"model": self.model, "token_ids": list(prompt), "sampling_params": params}
        try:
            response = requests.post(f"{self.url}/inference/v1/generate", json=body, timeout=self.timeout)
        except requests.RequestException as error:
            raise RolloutError(f"{self.url} does not answer: {error}") from error
        if not response.ok:
            raise RolloutError(f"{self.url}: HTTP {response.status_code}: {response.text[:500]}")
        (choice,) = response.json()["choices"]
        ids, content = choice["token_ids"], choice["logprobs"]["content"]
        if [c["token_id"] for c in content] != ids:
            raise RolloutError(f"{self.url}: log-probs of other tokens than those returned")
        versions = [v["version"] for v in choice.get("weight_versions") or []]
        return Answer(ids, [c["logprob"] for c in content], choice["finish_reason"], versions)

"""The trainer's side of the `logra` backend: `LoGRASender` sends a message as one session and sees it committed.

Belongs here: the sender on vLLM's own base class, and the clients that carry its calls to an in-process `LLM` (`LLMClient`) or to a
server's RL routes (`HTTPClient`). What the worker does with a message is in backend.py.
"""

from __future__ import annotations

import base64
import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine  # noqa: E402
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient  # noqa: E402

from ..sync import SyncError, message_header
from .backend import KNOWN  # noqa: F401  (its version guard comes first)
from .rollout import LARGEST

if TYPE_CHECKING:
    import vllm


class LLMClient:
    """vLLM's weight-sync client protocol, and what LoGRA needs besides, for an in-process `LLM`.

    timeout: seconds that one call may take. vLLM itself would wait for ever on an engine process that dies in the middle of a call.
    """

    binary = True

    def __init__(self, llm: vllm.LLM, timeout: float = 300) -> None:
        self.llm, self.timeout = llm, timeout

    def _call(self, function: Callable, *args: Any) -> Any:
        done: Future = Future()

        def work() -> None:
            try:
                done.set_result(function(*args))
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=work, daemon=True, name="logra-call").start()
        resources = getattr(self.llm.llm_engine.engine_core, "resources", None)
        deadline = time.monotonic() + self.timeout
        while not wait([done], timeout=0.5).done:
            if getattr(resources, "engine_dead", False):
                raise SyncError("the engine process died during the call: start a new engine and send a full resync")
            if time.monotonic() > deadline:
                raise SyncError(f"the engine did not answer within {self.timeout:g} s; what it serves is unknown")
        return done.result()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call(self.llm.init_weight_transfer_engine, {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._call(self.llm.start_weight_update)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call(self.llm.update_weights, {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call(self.llm.finish_weight_update, weight_version)

    def asleep(self) -> bool:
        return self._call(self.llm.llm_engine.is_sleeping)

    def pause(self) -> None:
        """An in-process engine stands still between calls; requests that wait in it would go on with other weights than they began with."""
        if count := self._call(self.llm.llm_engine.get_num_unfinished_requests):
            raise SyncError(f"{count} request{' is' if count == 1 else 's are'} not finished: wait for completion before an update")

    def resume(self) -> None:
        """Nothing to do."""

    def reset_prefix_cache(self) -> bool:
        return self._call(self.llm.reset_prefix_cache)

    def status(self, digests: str = "") -> list[dict[str, Any]]:
        """One dict a worker (`LoGRAEngine.status`); needs `worker_extension_cls`."""
        return self._call(self.llm.collective_rpc, "logra_status", None, (digests,))


class HTTPClient(HTTPVLLMWeightSyncClient):
    """vLLM's own HTTP client with the server's error texts, and the routes for pausing, sleeping and caches (VLLM_SERVER_DEV_MODE=1).

    pause_mode: of requests in flight; wait lets them end on the old weights, abort ends them, keep lets them span versions (and see keys
    and values of the old weights), which the responses' `weight_versions` show.
    """

    binary = False

    def __init__(self, base_url: str, timeout: float = 300, pause_mode: str = "wait") -> None:
        super().__init__(base_url, timeout)
        self.pause_mode = pause_mode

    def _call(self, method: str, path: str, json: dict[str, Any] | None = None) -> dict[str, Any]:
        import requests

        response = requests.request(method, f"{self.base_url}/{path}", json=json, timeout=self.timeout)
        if not response.ok:
            raise SyncError(f"{path}: HTTP {response.status_code}: {response.text[:1000]}")
        return response.json() if response.content else {}

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        self._call("POST", path, json)

    def asleep(self) -> bool:
        return self._call("GET", "is_sleeping")["is_sleeping"]

    def pause(self) -> None:
        self._post(f"pause?mode={self.pause_mode}")

    def resume(self) -> None:
        self._post("resume")

    def reset_prefix_cache(self) -> bool:
        return self._call("POST", "reset_prefix_cache")["success"]

    def weight_version(self) -> str:
        return self._call("GET", "weight_info")["weight_version"]

    def status(self, digests: str = "") -> list[dict[str, Any]]:
        """One dict a worker (`LoGRAEngine.status`); needs `--worker-extension-cls`."""
        return self._call("POST", "collective_rpc", {"method": "logra_status", "args": [digests]})["results"]


@dataclass
class SenderInfo(TrainerInitInfo):
    """For `WeightTransferTrainerFactory.trainer_init`. spool: folder that the workers can read; full messages then go as a file."""

    backend: ClassVar[str] = "logra"

    spool: str | None = None


class LoGRASender(TrainerWeightTransferEngine[SenderInfo]):
    """Trainer side: one message is one session (start, update, finish, prefix cache); any failure ends it with `SyncError`."""

    init_info_cls = SenderInfo

    def __init__(self, *, client, source=None, is_sender: bool = True, spool: str | None = None) -> None:
        if source is not None:
            raise ValueError("the backend 'logra' takes no WeightSource: pass each message to send_weights")
        if isinstance(client, HTTPVLLMWeightSyncClient) and not isinstance(client, HTTPClient):
            client = HTTPClient(client.base_url, client.timeout)  # vLLM's own, completed by the routes it does not use
        if lacking := [m for m in ("asleep", "pause", "resume", "reset_prefix_cache") if not hasattr(client, m)]:
            raise ValueError(f"client {type(client).__name__} has no {', '.join(lacking)}: without them old keys and values would be served")
        super().__init__(client=client, source=None, is_sender=is_sender)
        self.spool = spool

    @classmethod
    def trainer_init(cls, init_info: SenderInfo, *, client, source=None) -> LoGRASender:
        sender = cls(client=client, source=source, is_sender=init_info.is_sender, spool=init_info.spool)
        if sender.is_sender:
            sender.client.init_weight_transfer_engine({})
        return sender

    def send_weights(self, message: bytes) -> None:
        """Send `SketchUpdate.to_bytes` or `full_state_bytes`, have it committed, and see old keys and values dropped.

        Raises:
            SyncError: refused, with the worker's own words; the engine serves what it served before. Or the prefix cache could not be
                reset: the new weights are served, but prompts seen before would be answered from old ones; reset it before generating.
        """
        if self.is_sender:
            self.stage(message)
            self.commit()

    def stage(self, message: bytes) -> None:
        """First half of `send_weights`: the engine pauses, and its workers check the message. Then call `commit` or `abort`."""
        header = message_header(message)
        with _answered():
            if self.client.asleep():
                raise SyncError("the engine sleeps or is paused: wake it before an update")
            self.client.pause()
        self._label = f"{header['kind']} message {header['run_id']}:{header['version']}"
        with self._refusal():
            self._start()
            self._update(header["kind"], message)

    def commit(self) -> None:
        """Second half: every worker takes what it has staged, the prefix cache is dropped, and requests go on."""
        with self._refusal():
            self.client.finish_weight_update(self._label.rsplit(" ", 1)[1])
        with _answered():
            try:
                if not self.client.reset_prefix_cache():
                    raise SyncError("prefix cache not reset, requests hold its blocks: reset it before the next request")
            finally:
                self.client.resume()

    def abort(self) -> None:
        """End whatever session is open; nothing staged is kept, and requests go on."""
        self._end()
        with contextlib.suppress(Exception):
            self.client.resume()

    @contextlib.contextmanager
    def _refusal(self):
        try:
            yield
        except Exception as error:
            self.abort()
            raise SyncError(f"vLLM refused the {self._label}: {error}") from error

    def _update(self, kind: str, message: bytes) -> None:
        info: dict[str, Any] = {"kind": kind}
        if self.spool is not None and kind == "full":
            path = Path(self.spool) / f"{uuid.uuid4().hex}.full"
            try:
                path.write_bytes(message)
                self.client.update_weights(info | {"path": str(path)})
            finally:
                path.unlink(missing_ok=True)
            return
        if len(message) >= LARGEST:
            raise SyncError(f"{len(message):,} bytes do not fit in one call: give SenderInfo.spool, a folder that the workers can read")
        payload = message if getattr(self.client, "binary", False) else base64.b64encode(message).decode()
        self.client.update_weights(info | {"payload": payload})

    def _start(self) -> None:
        try:
            self.client.start_weight_update()
        except Exception as error:
            if "already active" not in str(error):
                raise
            self._end()  # a sender that died in the middle left its session open
            self.client.start_weight_update()

    def _end(self) -> None:
        with contextlib.suppress(Exception):  # a worker ends a session by raising, and raises as well when none is open
            self.client.update_weights({"kind": "abort"})


@contextlib.contextmanager
def _answered():
    """Whatever a client raises becomes a SyncError."""
    try:
        yield
    except SyncError:
        raise
    except Exception as error:
        raise SyncError(f"vLLM does not answer: {type(error).__name__}: {error}") from error

"""Worker processes that grade untrusted answers: bounded in time and memory, right off the main thread and inside a kernel.

What belongs here: processes, pipes and clocks. What an answer is worth is in answers.py; this file knows only its job functions.
Two levels: a supervisor (a fresh interpreter, so that nothing of the trainer, its threads or its GPU is forked) imports sympy once,
then forks a child that does the work; a hung child is killed and forked again in milliseconds, where a new interpreter takes a second.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque

MEMORY_BYTES = 2 << 30  # address space of a worker child
START_SECONDS = 120.0  # a supervisor's imports, on a loaded machine
GRACE_SECONDS = 10.0  # how late the supervisor's own time-keeping may be before it is replaced whole
_HEAD = struct.Struct(">Id")  # request header: payload bytes, seconds
_BOOT = (
    "import importlib.util as u, sys; s = u.spec_from_file_location('grader_pool', sys.argv[1]); "
    "m = u.module_from_spec(s); s.loader.exec_module(m); m._serve(sys.argv[2])"
)

# ---------------------------------------------------------------- worker side: a a supervisor and the child that it forks


def _wait(fds: list[int], seconds: float) -> list[int]:
    """Those of fds with data or at their end (poll: select fails above descriptor 1023)."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(max(0.0, seconds) * 1000)]


def _read(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = os.read(fd, size - len(data))
        if not chunk:
            return b""
        data += chunk
    return data


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _child(job, inp: int, out: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    while head := _read(inp, _HEAD.size):
        try:
            status = job(*pickle.loads(_read(inp, _HEAD.unpack(head)[0])))
        except BaseException:
            status = "grader_error"
        _write(out, status.encode() + b"\n")
        if status == "grader_error":  # memory may be exhausted: the next one starts clean
            os._exit(0)


def _fork(job) -> tuple[int, int, int]:
    """The supervisor has one thread and clean state, so forking it is safe and takes milliseconds; the trainer is never forked."""
    (inp, to_child), (from_child, out) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for fd in (0, to_child, from_child):
                os.close(fd)
            if sys.platform == "linux":  # PR_SET_PDEATHSIG: not even a hung child outlives its supervisor
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            _child(job, inp, out)
        finally:
            os._exit(1)
    os.close(inp)
    os.close(out)
    return pid, to_child, from_child


def _reap(child: tuple[int, int, int]) -> None:
    os.kill(child[0], signal.SIGKILL)
    os.waitpid(child[0], 0)
    os.close(child[1])
    os.close(child[2])


def _serve(kind: str) -> None:
    """Requests on stdin, one status line each on stdout; ends, with its child, on EOF or when the parent is gone."""
    out, null, parent = os.dup(1), os.open(os.devnull, os.O_RDWR), os.getppid()
    os.dup2(null, 1)  # libraries print
    os.dup2(null, 2)
    spec = importlib.util.spec_from_file_location("answers", os.path.join(os.path.dirname(__file__), "answers.py"))
    answers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(answers)
    job = getattr(answers, kind + "_job")
    job(*answers.WARM_UP[kind])  # the imports, before any fork
    _write(out, b"ready\n")
    child = None
    try:
        while os.getppid() == parent:
            if not _wait([0], 2.0):
                continue
            head = _read(0, _HEAD.size)
            if not head:
                return
            size, seconds = _HEAD.unpack(head)
            payload = _read(0, size)
            child = child or _fork(job)
            status = b"grader_error\n"
            try:
                _write(child[1], head + payload)
                ready = _wait([child[2], 0], seconds)
                if 0 in ready and child[2] not in ready:
                    return
                status = os.read(child[2], 64) if ready else b"timeout\n"
            except BrokenPipeError:
                pass
            if status not in (b"correct\n", b"wrong\n"):
                _reap(child)
                child = None
            _write(out, status or b"grader_error\n")
    finally:
        if child:
            _reap(child)


# ---------------------------------------------------------------- trainer side


class _Worker:
    def __init__(self, kind: str) -> None:
        env = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
        # a fresh interpreter, not multiprocessing: right in a kernel, off the main thread and under `python -m`
        command, pipe = [sys.executable, "-c", _BOOT, __file__, kind], subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env, bufsize=0, start_new_session=True)
        self.ready, self.fd = False, self.process.stdout.fileno()

    def send(self, job: tuple, seconds: float) -> None:
        payload = pickle.dumps(job)
        _write(self.process.stdin.fileno(), _HEAD.pack(len(payload), seconds) + payload)

    def stop(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)  # its own session: supervisor and child only
            self.process.wait()
        self.process.stdout.close()


def _stop_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().stop()


class GraderPool:
    """Worker processes for `kind` "math" or "gym": started at first use, kept, replaced when hung, gone at close or exit.

    run(jobs) -> statuses "correct" | "wrong" | "timeout" | "grader_error". Each job gets `seconds` of wall time at most. A first
    pass gives each a fifth of that, so that good answers never queue behind hostile ones; then the unfinished are tried at full
    length until 2 * seconds per worker were lost to hangs. A batch of n hostile answers so costs at most about
    (n / 5 + 3) * seconds / workers.
    """

    def __init__(self, kind: str, workers: int = 1, seconds: float = 5.0) -> None:
        self.kind, self.count, self.seconds = kind, workers, seconds
        self.workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _stop_all, self.workers)

    def run(self, jobs: list[tuple]) -> list[str]:
        with self._lock:
            try:
                first = self._pass(jobs, self.seconds / 5, float("inf"))
                late = [i for i, status in enumerate(first) if status == "timeout"]
                for i, status in zip(late, self._pass([jobs[i] for i in late], self.seconds, 2 * self.seconds * self.count)):
                    first[i] = status
                return first
            except BaseException:  # an interrupt leaves answers in the pipes: start afresh
                _stop_all(self.workers)
                raise

    def _pass(self, jobs: list[tuple], seconds: float, allowance: float) -> list[str]:
        statuses = ["timeout"] * len(jobs)
        todo, busy = deque(range(len(jobs))), {}  # busy: worker -> (job or None while starting, deadline)
        while todo or busy:
            if allowance <= 0:
                todo.clear()
            while len(self.workers) < min(self.count, len(todo) + len(busy)):
                self.workers.append(_Worker(self.kind))
            for worker in [w for w in self.workers if w not in busy]:
                if not todo:
                    break
                busy[worker] = (None, time.monotonic() + START_SECONDS)
                if worker.ready:
                    i = todo.popleft()
                    busy[worker] = (i, time.monotonic() + seconds + GRACE_SECONDS)
                    try:
                        worker.send(jobs[i], seconds)
                    except BrokenPipeError:  # died while idle; its end of file is seen below
                        pass
            if not busy:
                break
            ready = _wait([w.fd for w in busy], min(deadline for _, deadline in busy.values()) - time.monotonic())
            for worker, (i, deadline) in list(busy.items()):
                if worker.fd not in ready and time.monotonic() < deadline:
                    continue
                status = os.read(worker.fd, 64).decode().strip() if worker.fd in ready else ""
                del busy[worker]
                if not status:
                    self.workers.remove(worker)
                    worker.stop()
                    if i is None:
                        raise RuntimeError(f"a {self.kind} grader process died at its imports or needed over {START_SECONDS:.0f} s")
                    status = "timeout" if time.monotonic() >= deadline else "grader_error"
                worker.ready = True
                if i is not None:
                    statuses[i] = status
                    allowance -= seconds if status == "timeout" else 0
        return statuses

    def close(self) -> None:
        """Stop the workers; a later run starts new ones."""
        with self._lock:
            _stop_all(self.workers)

"""Who simulates the points: processes of this machine, or a Dask cluster. Both hand out concurrent.futures."""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from multiprocessing.connection import wait as wait_for_handles
from typing import Any, Protocol

from simulator.errors import InputError
from simulator.sweep.designs import Point
from simulator.sweep.points import Settings, evaluate_batch

#: The rows of a batch of points, some time later.
Rows = Future[list[dict[str, Any]]]
#: How long to wait for a Dask scheduler to answer, and for its first worker.
_SCHEDULER_TIMEOUT_S = 20


#: A scheduler's address: a protocol (or none), a host and a port.
_ADDRESS = re.compile(r"([a-z]+://)?[^\s/]+:[0-9]{1,5}")


class Workers(Protocol):
    """A place that takes batches of points."""

    def count(self) -> int:
        """Batches that run at the same time."""

    def submit(self, points: list[Point], settings: Settings) -> Rows:
        """A future of the rows of ``points``."""

    def died(self, error: BaseException) -> bool:
        """Whether ``error`` of a future means that a worker went away with its batch."""

    def close(self) -> None:
        """Drop what has not begun and let the workers go."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LocalWorkers:
    """Processes of this machine; a process that dies (memory, a kill) is replaced together with its pool."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None

    def count(self) -> int:
        """Processes."""
        return self._jobs

    def submit(self, points: list[Point], settings: Settings) -> Rows:
        """A future of the rows; a broken pool is replaced first."""
        for _ in range(2):
            if self._pool is None:
                # spawned: a fork would copy the locks of NumPy's and Numba's threads in whatever state they are
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(self._jobs, context, initializer=_end_with_parent)
            try:
                return self._pool.submit(evaluate_batch, points, settings)
            except BrokenProcessPool:
                self._pool.shutdown(wait=False)
                self._pool = None
        raise RuntimeError("worker processes do not start")

    def died(self, error: BaseException) -> bool:
        """A process that ends takes every batch of its pool with it."""
        return isinstance(error, BrokenProcessPool)

    def close(self) -> None:
        """Stop the processes."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def _end_with_parent() -> None:
    """Workers of a sweep that is killed must not stay: they would wait for work for ever."""
    parent = multiprocessing.parent_process()

    def watch(sentinel: int) -> None:
        wait_for_handles([sentinel])
        os._exit(1)

    if parent is not None:
        threading.Thread(target=watch, args=(parent.sentinel,), daemon=True).start()


class DaskWorkers:
    """The workers of a Dask scheduler; what a dead worker had is given to another."""

    def __init__(self, address: str) -> None:
        if find_spec("distributed") is None:
            raise InputError("--scheduler: needs Dask; install 'iosim[cluster]'")
        import distributed

        if not _ADDRESS.fullmatch(address):
            raise InputError(f"--scheduler: {address!r} is no address; write tcp://host:8786")
        self._address = address
        try:
            # Dask has no annotations
            connect: Any = distributed.Client
            self._client = connect(address, timeout=_SCHEDULER_TIMEOUT_S, set_as_default=False)
            self._client.wait_for_workers(1, timeout=_SCHEDULER_TIMEOUT_S)
        except (OSError, TimeoutError, ValueError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(
                f"--scheduler: {address} has no workers to offer ({reason}); start 'dask scheduler' and 'dask worker' "
                "with iosim installed, and write tcp://host:8786"
            ) from None
        self._executor = self._client.get_executor(pure=False)

    def count(self) -> int:
        """Threads of the workers that are there now."""
        threads: int = sum(self._client.nthreads().values())
        return max(1, threads)

    def submit(self, points: list[Point], settings: Settings) -> Rows:
        """A future of the rows."""
        rows: Rows = self._executor.submit(evaluate_batch, points, settings)
        return rows

    def died(self, error: BaseException) -> bool:
        """Dask retries a batch on other workers and gives up after several of them died."""
        from distributed.scheduler import KilledWorker

        if isinstance(error, ModuleNotFoundError):
            raise InputError(f"--scheduler: a worker lacks the module '{error.name}'; install iosim on the workers")
        if isinstance(error, CancelledError) or "Cancelled" in type(error).__name__:
            raise InputError(f"--scheduler: {self._address} went away; start it and run again to go on")
        return isinstance(error, KilledWorker)

    def close(self) -> None:
        """Cancel what is left and disconnect."""
        self._executor.shutdown(wait=False)
        self._client.close()

"""Independent tasks in several processes of this machine, with their results in the order of the tasks.

Workers are forked: they see what the parent has built (model, images), and only results travel. A worker that dies,
from a signal or for want of memory, is replaced and its task is tried again; a task whose workers died `ATTEMPTS` times
is given up, and the others go on. An exception of the work itself is raised in the parent, as if it had been computed
there. (`concurrent.futures` gives up the whole pool when a worker dies, and does not say which task it had.)
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar

ATTEMPTS = 3
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Lost:
    """In place of the result of a task that was given up.

    Attributes:
        reason: how its workers ended, as the end of a sentence about them.
    """

    reason: str

    def left_out(self, names: Iterable[str]) -> str:
        """A line for the user about what the task was of."""
        return f"left out: {', '.join(names)}: the processes that worked on them {self.reason}"


def in_order(tasks: Iterable[T], work: Callable[[T], R], workers: int) -> Iterator[tuple[T, R | Lost]]:
    """(task, result) for each task, in their order.

    Args:
        tasks: read one by one where one worker, this process, does the work; else all at once.
        work: computes a result that can be pickled. In a worker it must use no thread and no lock of the parent's.
        workers: number of processes; with 1 no process is started.

    Raises:
        Exception: what `work` raised on a task, once the results of the tasks before it were handed out.
    """
    if workers == 1:
        for task in tasks:
            yield task, work(task)
        return
    pool = _Pool(list(tasks), work)
    try:
        yield from pool.results(workers)
    finally:
        pool.close()


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    task: int = -1  # what it computes; -1: nothing


class _Raised(Generic[T]):
    """An exception of the work, on its way to the parent."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Pool(Generic[T, R]):
    """The workers of one call of `in_order`."""

    def __init__(self, tasks: Sequence[T], work: Callable[[T], R]) -> None:
        self.tasks, self.work = tasks, work
        self.context = multiprocessing.get_context("fork")
        self.waiting = deque(range(len(tasks)))
        self.deaths = [0] * len(tasks)
        self.done: dict[int, R | Lost | _Raised] = {}
        self.workers: list[_Worker] = []

    def results(self, count: int) -> Iterator[tuple[T, R | Lost]]:
        """See `in_order`."""
        for _ in range(min(count, len(self.tasks))):
            self.workers.append(self._started())
        for number, task in enumerate(self.tasks):
            while number not in self.done:
                self._step()
            result = self.done.pop(number)
            if isinstance(result, _Raised):
                raise result.error
            yield task, result

    def close(self) -> None:
        """End all workers."""
        for worker in self.workers:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()

    def _started(self) -> _Worker:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=self._serve, args=(theirs, ours), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _step(self) -> None:
        """Give every idle worker a task, then wait for one result or one death."""
        for worker in list(self.workers):
            if worker.task < 0 and self.waiting:
                worker.task = self.waiting.popleft()
                try:
                    worker.pipe.send(worker.task)
                except ConnectionError:  # it died while it had nothing to do
                    self._bury(worker)
        ready = wait([worker.pipe for worker in self.workers if worker.task >= 0])
        for worker in [worker for worker in self.workers if worker.pipe in ready]:
            try:
                self.done[worker.task] = worker.pipe.recv()
                worker.task = -1
            except (EOFError, ConnectionError):
                self._bury(worker)

    def _bury(self, worker: _Worker) -> None:
        """Replace a worker that died; its task is the next to be tried again, or is lost."""
        worker.process.join()
        worker.pipe.close()
        self.deaths[worker.task] += 1
        if self.deaths[worker.task] < ATTEMPTS:
            self.waiting.appendleft(worker.task)
        else:
            self.done[worker.task] = Lost(f"ended {ATTEMPTS} times with exit code {worker.process.exitcode}")
        self.workers[self.workers.index(worker)] = self._started()

    def _serve(self, pipe: Connection, parents: Connection) -> None:
        """What a worker does: tasks by number, until the parent closes the pipe or is gone."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
        for inherited in (parents, *(worker.pipe for worker in self.workers)):
            inherited.close()
        while True:
            try:
                number = pipe.recv()
            except EOFError:
                return
            try:
                found: R | _Raised = self.work(self.tasks[number])
            except Exception as error:
                found = _Raised(error)
            pipe.send(found)

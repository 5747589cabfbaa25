"""Tasks in several processes of this machine.

They are forked: they see what the parent has built (model, images, tasks), and only results travel.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from fedmjp.records.lock import leave_to_parent
from fedmjp.workers.schedule import Died, Raised, attempt

IDLE = -1


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    task: int = IDLE


class Processes:
    """See `fedmjp.workers.schedule.Executor`; a process that dies is replaced.

    Args:
        tasks: what is computed.
        work: called with a task.
        count: most processes.
    """

    def __init__(self, tasks: Sequence[Any], work: Callable[[Any], Any], count: int) -> None:
        self.tasks, self.work, self.capacity = tasks, work, min(count, len(tasks))
        self._context = multiprocessing.get_context("fork")
        self._workers: list[_Worker] = []
        for _ in range(self.capacity):
            self._workers.append(self._started())

    def submit(self, number: int) -> None:
        """Give a task to a process that has none."""
        place = next(i for i, worker in enumerate(self._workers) if worker.task == IDLE)
        try:
            self._workers[place].pipe.send(number)
        except ConnectionError:  # it died while it had nothing to do
            self._replace(place)
            self._workers[place].pipe.send(number)
        self._workers[place].task = number

    def wait(self) -> list[tuple[int, Any]]:
        """See `Executor.wait`."""
        ready = wait([worker.pipe for worker in self._workers if worker.task != IDLE])
        ended = []
        for place, worker in enumerate(self._workers):
            if worker.pipe not in ready:
                continue
            try:
                outcome = pickle.loads(worker.pipe.recv_bytes())
                number, worker.task = worker.task, IDLE
            except (EOFError, ConnectionError):
                number, outcome = worker.task, self._replace(place)
            ended.append((number, outcome))
        return ended

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()

    def _replace(self, place: int) -> Died:
        """A new process in the place of one that died; how that one died."""
        worker = self._workers[place]
        worker.process.join()
        worker.pipe.close()
        self._workers[place] = self._started()
        return Died(f"ended with exit code {worker.process.exitcode}")

    def _started(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=self._serve, args=(theirs, ours), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _serve(self, pipe: Connection, parents: Connection) -> None:
        """What a process does: tasks by number, until the parent closes the pipe or is gone."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
        torch.set_num_threads(1)
        leave_to_parent()
        for inherited in (parents, *(worker.pipe for worker in self._workers)):
            if not inherited.closed:
                inherited.close()
        while True:
            try:
                number = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send_bytes(_packed(attempt(self.work, self.tasks[number])))
            except BrokenPipeError:  # the parent is gone
                return


def _packed(outcome: Any) -> bytes:
    """The outcome as bytes: tensors by value, and not through shared memory, which ends with the process."""
    try:
        return pickle.dumps(outcome)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        return pickle.dumps(Raised(TypeError(f"a result cannot be sent to another process: {error}")))

"""Which task is computed when, what is tried again, and the order of results; the same for every executor.

A task whose process dies, from a signal or for want of memory, is tried again. One whose processes died `ATTEMPTS`
times, or whose work raises an exception that is no mistake of usage, is given up (`Lost`), and the others go on.
(`concurrent.futures` gives up the whole pool when a process dies, and does not say which task it had.)
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from attacks.registry import UsageError
from fedmjp.workers.options import WorkerConfig

ATTEMPTS = 3
NOT_ATTACKED = "not attacked: "  # how the line about a task that was given up begins
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Lost:
    """In place of the result of a task that was given up.

    Attributes:
        reason: why, as a clause.
        trace: traceback of the exception that the work raised; "" where its processes died.
    """

    reason: str
    trace: str = ""

    def lines(self, names: Iterable[str]) -> list[str]:
        """A line for the user about what the task was of, and the traceback where there is one."""
        return [f"{NOT_ATTACKED}{', '.join(names)}: {self.reason}", *([self.trace] if self.trace else [])]


@dataclass(frozen=True)
class Died:
    """In place of the result of a task whose process died.

    Attributes:
        how: the end of a sentence about the process.
    """

    how: str


@dataclass(frozen=True)
class Raised:
    """An exception that ends the whole call, on its way to the process that asked."""

    error: Exception


class Executor(Protocol):
    """Computes tasks, which it is given by their number in the sequence that it was made with.

    Attributes:
        capacity: tasks that it computes at the same time.
    """

    capacity: int

    def submit(self, number: int) -> None:
        """Begin one more task; at most `capacity` are under way."""

    def wait(self) -> list[tuple[int, Any]]:
        """Wait until tasks have ended; (number, what `attempt` returned or `Died`) of each of them."""

    def close(self) -> None:
        """End what is under way."""


def attempt(work: Callable[..., R], *task: Any) -> R | Lost | Raised:
    """The result of one task, or what takes its place; every executor computes by this."""
    try:
        return work(*task)
    except (UsageError, OSError) as error:
        return Raised(error)
    except Exception as error:
        words = str(error).splitlines()[:1]
        return Lost(": ".join([type(error).__name__, *words]), traceback.format_exc().rstrip())


def in_order(tasks: Iterable[T], work: Callable[[T], R], config: WorkerConfig) -> Iterator[tuple[T, R | Lost]]:
    """(task, result) for each task, in their order.

    Args:
        tasks: read one by one where this process does the work; else all at once.
        work: computes a result. Results must be picklable; on Ray also `work` and the tasks. In another process it must
            use no thread and no lock of this one's.
        config: where tasks are computed.

    Raises:
        UsageError, OSError: what `work` raised on a task, once the results of the tasks before it were handed out; or
            no Ray cluster at the address, or one with other code.
    """
    if not config.spread:
        for task in tasks:
            yield task, _checked(attempt(work, task))
        return
    listed = list(tasks)
    if not listed:
        return
    executor = _executor(listed, work, config)
    try:
        yield from _results(listed, executor)
    finally:
        executor.close()


def _executor(tasks: Sequence[T], work: Callable[[T], R], config: WorkerConfig) -> Executor:
    if config.ray:
        from fedmjp.workers.ray_tasks import RayTasks

        return RayTasks(tasks, work, config)
    from fedmjp.workers.processes import Processes

    return Processes(tasks, work, config.workers or 1)


def _results(tasks: Sequence[T], executor: Executor) -> Iterator[tuple[T, Any]]:
    waiting, deaths, running = deque(range(len(tasks))), [0] * len(tasks), 0
    ended: dict[int, Any] = {}
    for wanted, task in enumerate(tasks):
        while wanted not in ended:
            while waiting and running < executor.capacity:
                executor.submit(waiting.popleft())
                running += 1
            for number, outcome in executor.wait():
                running -= 1
                deaths[number] += isinstance(outcome, Died)
                if not isinstance(outcome, Died):
                    ended[number] = outcome
                elif deaths[number] < ATTEMPTS:
                    waiting.appendleft(number)
                else:
                    ended[number] = Lost(f"{ATTEMPTS} processes that worked on it {outcome.how}")
        yield task, _checked(ended.pop(wanted))


def _checked(outcome: Any) -> Any:
    """A result, or what takes its place; raises what ends the call."""
    if isinstance(outcome, Raised):
        raise outcome.error
    return outcome

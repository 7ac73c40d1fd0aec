"""Runners of tasks at times that no machine shows by itself: as late as possible, and in orders of a seed."""

import random

from zeroshard.memory.transfers import Task


class Latest:
    """Runs a task as late as possible: inside of the wait for it, or for a task after it."""

    def begin(self, task: Task) -> None:
        """Do nothing yet."""

    def finish(self, task: Task) -> None:
        """Run the tasks before it, then the task."""
        for before in task.after:
            self.finish(before)
        if not task.done:
            task.run()


class Shuffled:
    """Runs tasks in an order drawn from a seed, some of them in every call."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._pending: list[Task] = []

    def begin(self, task: Task) -> None:
        """Queue the task, and run some pending ones."""
        self._pending.append(task)
        self._run_some()

    def finish(self, task: Task) -> None:
        """Run pending tasks until this one has run."""
        while not task.done:
            self._run_some(least=1)

    def _run_some(self, least: int = 0) -> None:
        for _ in range(self._random.randint(least, 2)):
            ready = [task for task in self._pending if all(before.done for before in task.after)]
            if ready:
                task = self._random.choice(ready)
                self._pending.remove(task)
                task.run()

"""The progress bar of long commands."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["ProgressBar"]


class ProgressBar:
    """A rich progress bar; ``with`` gives the function ``update(done, all, text)``."""

    def __enter__(self) -> Callable[[int, int, str], None]:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self.bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.bar.start()
        task = self.bar.add_task("starting", total=None)

        def update(step: int, steps: int, text: str) -> None:
            self.bar.update(task, total=steps, completed=step, description=text)

        return update

    def __exit__(self, *exc: object) -> None:
        self.bar.stop()

"""Files that are whole or not there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to; what was written is at `path` afterwards, or nothing has changed.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     with replacing(Path(folder, "x.txt")) as part:
    ...         _ = part.write_text("whole")
    ...     Path(folder, "x.txt").read_text()
    'whole'
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())  # a rename must not outrun the content
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)

"""Files that are either the old one or the new one, never half of it."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes | str) -> None:
    """Put `data` (text as UTF-8) at `path`; whoever dies whenever, the old or the new content lies there.

    Written to a temporary sibling, forced to disk, then renamed over `path`; the folder is forced to disk as
    well, or a power cut could undo the rename after a later file already relies on it.

    Raises OSError; the old file is then untouched and no temporary is left.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Force a folder's entries (renames, new files) to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Files that appear complete or not at all, whatever happens while they are written."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import BinaryIO

from .errors import UserError


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a small file; it appears complete or not at all."""
    beside = temporary(path)
    try:
        with beside.open("wb") as file:
            file.write(data)
            publish(file, beside, path)
    finally:
        beside.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """A folder for results, its parents too, unless it is there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as wrong:
        raise UserError(f"cannot make the folder {path}: {wrong.strerror or wrong}") from None


def temporary(path: Path) -> Path:
    """The name a file has until it is complete."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def publish(file: BinaryIO, beside: Path, path: Path) -> None:
    """Flushes to the disk before the rename, and the rename after it: a power cut tears nothing either."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(beside, path)
    sync_folder(path.parent)


def by_umask(path: Path) -> None:
    """The permissions that any new file has; some libraries write for their owner alone."""
    mask = os.umask(0o077)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def sync_folder(folder: Path) -> None:
    """Makes names in a folder last; Windows cannot."""
    if sys.platform != "win32":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

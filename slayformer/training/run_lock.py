"""One process at a time trains in a run directory."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from slayformer.errors import ConfigError, UserError

FILE = ".lock"
# file systems without locks, or whose lock service is down
WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class RunLock:
    """Holds a run directory from `take` to `release`, or until its process has died.

    The system drops the lock of a process that ends in whatever way, so none is ever left behind.
    """

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def take(self, directory: Path) -> str | None:
        """Lock `directory`; return a warning where its file system knows no locks.

        Raises ConfigError if another process trains there, UserError if it cannot be written to.
        """
        path = directory / FILE
        try:
            file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise UserError(f"run_directory={directory}: {error.strerror}: {path}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read(200).strip() or "another process"
            file.close()
            if error.errno in WITHOUT_LOCKS:
                return f"{directory} is on a file system without locks: start no second run there"
            hint = f"{holder} trains in it; wait until that has ended, or name another folder"
            raise ConfigError("run_directory", directory, hint) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self._file = file
        return None

    @property
    def held(self) -> bool:
        """Whether a directory is held."""
        return self._file is not None

    def release(self) -> None:
        """Let others in; does nothing if nothing is held."""
        if self._file is not None:
            self._file.close()
            self._file = None

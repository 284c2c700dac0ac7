"""LiveKeys: the accepted API keys, read again when their file has changed."""

import asyncio
import logging
import os
from pathlib import Path

from deployments.http.api_keys import ApiKeysError, KeyIdentity, read_api_keys
from deployments.http.config import HttpConfig

log = logging.getLogger("orchard.http")

_Stamp = tuple[int, ...] | None
"""Metadata that changes when a file is written or replaced; None: the file cannot be read."""


class LiveKeys:
    """The keys in force. A file that cannot be read any more keeps those of its last valid state.

    Raises:
        ApiKeysError: See read_api_keys.
    """

    def __init__(self, config: HttpConfig):
        self._config = config
        self._path = None if config.api_keys_file is None else Path(config.api_keys_file).expanduser()
        self._stamp = self._look()
        self._ring = read_api_keys(config)
        self._reading = asyncio.Lock()

    def find(self, sent: str) -> KeyIdentity | None:
        """Return the identity of a key; None if it is unknown."""
        return self._ring.find(sent)

    @property
    def identities(self) -> tuple[KeyIdentity, ...]:
        return self._ring.identities

    async def refresh(self) -> bool:
        """Read the file again if it has changed; return whether other keys are in force now.

        Each request calls it, so that a revoked key ends with the next request: looking at the file takes microseconds.
        A changed file is read in a thread, as token streams must not wait for it.
        """
        if self._path is None or self._look() == self._stamp:
            return False
        async with self._reading:
            stamp = self._look()  # before reading: what is written meanwhile is found by the next request
            if stamp == self._stamp:
                return False
            try:
                self._ring = await asyncio.to_thread(read_api_keys, self._config, may_be_empty=True)
            except ApiKeysError as error:
                log.error("%s; the keys that were read before stay in force", error.message)
                return False
            finally:
                self._stamp = stamp  # behind the reading, which all requests wait for
            log.info("http.api_keys_file has changed: %d keys are in force", len(self._ring))
            return True

    def _look(self) -> _Stamp:
        if self._path is None:
            return None
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mode, found.st_mtime_ns, found.st_ctime_ns

"""Which path of a hard-linked file came first, for as long as others of its links are to come."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from sqlite3 import Connection

_MOST = 50_000
"""Inodes remembered in memory, which takes about 12 MiB. More of them go into a temporary database on disk."""


class Links:
    """The inodes of a walk that have more links than were met so far."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[bytes, int]] = {}
        self._database: Connection | None = None

    def first(self, found: os.stat_result, path: bytes) -> bytes | None:
        """The first path of an inode, or None if it is this one, which is then remembered."""
        key = (found.st_dev, found.st_ino)
        known = self._known.pop(key, None)
        if known is not None:
            if known[1] > 1:
                self._known[key] = known[0], known[1] - 1
            return known[0]
        if self._database is not None:
            stored = self._take(key)
            if stored is not None:
                return stored
        if len(self._known) < _MOST:
            self._known[key] = path, found.st_nlink - 1
        else:
            self._store(key, path, found.st_nlink - 1)
        return None

    def _store(self, key: tuple[int, int], path: bytes, left: int) -> None:
        if self._database is None:
            import sqlite3

            # A database without a name is a temporary file, deleted when it is closed or the process dies.
            self._database = sqlite3.connect("", isolation_level=None)
            self._database.execute("PRAGMA journal_mode = OFF")
            self._database.execute("CREATE TABLE links (inode TEXT PRIMARY KEY, path BLOB, left INT) WITHOUT ROWID")
        self._database.execute("INSERT INTO links VALUES (?, ?, ?)", (f"{key[0]}:{key[1]}", path, left))

    def _take(self, key: tuple[int, int]) -> bytes | None:
        assert self._database is not None
        inode = f"{key[0]}:{key[1]}"
        row = self._database.execute("SELECT path, left FROM links WHERE inode = ?", (inode,)).fetchone()
        if row is None:
            return None
        if row[1] > 1:
            self._database.execute("UPDATE links SET left = left - 1 WHERE inode = ?", (inode,))
        else:
            self._database.execute("DELETE FROM links WHERE inode = ?", (inode,))
        return bytes(row[0])

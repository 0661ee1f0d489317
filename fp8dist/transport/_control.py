"""Control plane: small named values that ranks leave for each other. No call here waits for a peer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch.distributed import DistError, Store

from ..errors import TransportError


def _broken(error: Exception) -> TransportError:
    return TransportError(
        f"the store that the ranks talk through is gone ({type(error).__name__}: {error}); the process that hosts "
        "it (usually rank 0 or the launcher's agent) has probably died: look at its log first"
    )


class Control:
    """`set`, `get` and `check` under a prefix of a torch `Store`.

    The store's own `get` blocks on a missing key and holds the client's lock meanwhile, so only keys that
    exist are fetched. A clone of the store keeps this traffic apart from other users of the client.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store.clone() if hasattr(store, "clone") else store
        self.prefix = prefix

    def under(self, prefix: str) -> Control:
        """The same store below a longer prefix."""
        child = Control.__new__(Control)
        child._store = self._store
        child.prefix = f"{self.prefix}/{prefix}"
        return child

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def set(self, key: str, value: bytes | str) -> None:
        """Leave a value; overwrites."""
        try:
            self._store.set(self._key(key), cast(str, value))  # takes bytes, too; its stub does not say so
        except DistError as error:
            raise _broken(error) from error

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""
        try:
            return bool(self._store.check([self._key(key) for key in keys]))
        except DistError as error:
            raise _broken(error) from error

    def get(self, key: str) -> bytes | None:
        """The value, or None if there is none."""
        try:
            if not self._store.check([self._key(key)]):
                return None
            return bytes(self._store.get(self._key(key)))
        except DistError as error:
            raise _broken(error) from error

    def get_many(self, keys: Sequence[str]) -> list[bytes] | None:
        """All values, or None if any is missing."""
        try:
            full = [self._key(key) for key in keys]
            if not self._store.check(full):
                return None
            return [bytes(value) for value in self._store.multi_get(full)]
        except DistError as error:
            raise _broken(error) from error

    def count(self, key: str, increment: int = 0) -> int:
        """Add to a counter and return it."""
        try:
            return int(self._store.add(self._key(key), increment))
        except DistError as error:
            raise _broken(error) from error

    def delete(self, key: str) -> None:
        """Remove a value; quiet where the store cannot or is gone."""
        try:
            self._store.delete_key(self._key(key))
        except (DistError, RuntimeError, NotImplementedError):
            return

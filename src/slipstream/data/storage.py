"""Object storage: files at an address such as s3://bucket/folder, by obstore (Rust's object_store)."""

from datetime import timedelta
from pathlib import Path
from typing import Any

from slipstream.data.checks import first_line, need_extra

SCHEMES = ("s3://", "gs://", "az://", "http://", "https://")
PATIENCE = 60.0
"""Seconds for which a storage that does not answer is asked again, ever more rarely."""
_SLOWEST = timedelta(seconds=8)
"""Between two tries."""
_PIECE = 8 * 2**20
"""Bytes of a large file that are held at a time."""


class StorageGone(OSError):
    """The storage has not answered for too long, or does not have what it should."""


class StorageLacks(StorageGone):
    """It has answered, and does not have it."""


def is_remote(address: str) -> bool:
    """Whether this is an address in object storage, and not a path."""
    return address.startswith(SCHEMES)


class Storage:
    """One folder there. Who one is, and where the storage is if not at the cloud's own address, the environment says
    (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, …)."""

    def __init__(self, address: str, patience: float = PATIENCE) -> None:
        need_extra("obstore", "obstore", "cloud", address)
        from obstore.store import from_url

        self.address = address.rstrip("/")
        retry = {
            "max_retries": 10_000,
            "retry_timeout": timedelta(seconds=patience),
            "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": _SLOWEST, "base": 2},
        }
        options: dict[str, Any] = {"allow_http": True, "connect_timeout": "5s", "timeout": "30s"}
        try:
            self._store: Any = from_url(self.address, client_options=options, retry_config=retry)  # type: ignore[call-overload]
        except Exception as error:  # obstore's own, of which there are many
            raise ValueError(f"{self.address}: {_said(error, self.address)}") from None

    def read(self, name: str, start: int = 0, end: int | None = None) -> memoryview:
        """A file, or the part of it from `start` to `end`."""
        import obstore

        try:
            if end is None:
                return memoryview(obstore.get(self._store, name).bytes())
            return memoryview(obstore.get_range(self._store, name, start=start, end=end))
        except FileNotFoundError:
            raise StorageLacks(f"{self.address}/{name} is missing") from None
        except Exception as error:
            raise self._gone(f"/{name} cannot be read", error) from None

    def fetch(self, name: str, place: Path) -> None:
        """A file of any size onto this machine's disk, where it appears when all of it is there."""
        import obstore

        place.parent.mkdir(parents=True, exist_ok=True)
        draft = place.with_name(place.name + ".draft")
        try:
            with draft.open("wb") as file:
                for piece in obstore.get(self._store, name).stream(min_chunk_size=_PIECE):
                    file.write(piece)
        except FileNotFoundError:
            raise StorageLacks(f"{self.address}/{name} is missing") from None
        except Exception as error:
            raise self._gone(f"/{name} cannot be read", error) from None
        draft.replace(place)

    def find(self, name: str) -> tuple[str, int, str] | None:
        """Name, size and stamp of a file, if it is there."""
        import obstore

        try:
            return _described(obstore.head(self._store, name))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._gone(f"/{name} cannot be read", error) from None

    def listed(self) -> list[tuple[str, int, str]]:
        """Name, size and stamp of all files here and below, sorted."""
        import obstore

        try:
            return sorted(_described(file) for some in obstore.list(self._store) for file in some)
        except Exception as error:
            raise self._gone(" cannot be listed", error) from None

    def write(self, name: str, data: bytes | Path) -> None:
        """A whole file, from memory or from this machine's disk: it appears when all of it is there."""
        import obstore

        try:
            obstore.put(self._store, name, data)
        except Exception as error:
            raise self._gone(f"/{name} cannot be written", error) from None

    def delete(self, name: str) -> None:
        """A file, if it is there."""
        import obstore

        try:
            obstore.delete(self._store, name)
        except FileNotFoundError:
            return
        except Exception as error:
            raise self._gone(f"/{name} cannot be removed", error) from None

    def _gone(self, what: str, error: Exception) -> StorageGone:
        return StorageGone(f"{self.address}{what}: {_said(error, self.address)}")


_NOBODY = ("/latest/api/token", "/latest/meta-data", "metadata.google.internal", "token request", "Account must be")
"""Told nothing by the environment, obstore asks the machine who it is, as if it were the cloud's."""
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for what is public",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


def _said(error: Exception, address: str) -> str:
    """What went wrong, and what to do where it is that nobody said who asks."""
    needed = _CREDENTIALS.get(address.partition(":")[0])
    nobody = needed and any(mark in str(error) for mark in _NOBODY)
    return first_line(error) + (f"; the environment does not say who you are: set {needed}" if nobody else "")


def _described(file: Any) -> tuple[str, int, str]:
    return file["path"], file["size"], file["e_tag"] or str(file["last_modified"])

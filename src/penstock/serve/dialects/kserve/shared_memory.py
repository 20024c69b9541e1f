"""System shared memory: tensors in POSIX shared memory objects instead of in requests and responses.

Source: KServe's system shared memory extension, with Triton's error messages. Objects are read and written as files in
``/dev/shm``, not mapped: a client that truncates its object gets an error, where a mapping would crash this process
(SIGBUS).
"""

from __future__ import annotations

import copy
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from penstock.config.options import ServerOptions
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .shared_state import Region, SharedState

FOLDER = Path("/dev/shm")
KEY_PATTERN = re.compile(r"/?(?!penstock-)([A-Za-z0-9_.-]{1,255})")
"""A valid name for ``shm_open``, without slashes; excludes the names of Penstock's own objects."""
MAX_REGIONS = 1024
MAX_NAME_LENGTH = 255
REGION, SIZE, OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
"""Parameters of a tensor in shared memory."""
NOT_ALLOWED = (
    "shared memory requires clients on the same machine: the server must listen on a loopback address, or be started "
    "with --allow-shared-memory"
)
NO_CUDA = "CUDA shared memory is not supported; use system shared memory, or send tensors in requests"


class SharedMemory:
    """The shared memory regions registered by clients. Each region belongs to the API key that registered it.

    Args:
        max_size: returns the maximum size of an input, bytes.
    """

    def __init__(self, shared: SharedState, options: ServerOptions, max_size: Callable[[], int]) -> None:
        self._shared = shared
        self._allowed = options.allow_shared_memory or is_loopback(options.host)
        self._max_size = max_size
        self._tenant = ""
        self._check: Callable[[], None] = lambda: None

    def of_client(self, tenant: str, check: Callable[[], None]) -> SharedMemory:
        """The regions of one client.

        Args:
            tenant: tenant of the client (``RequestRecord.tenant``).
            check: called before a region is used; raises ``PenstockError`` if the client may not use shared memory.
        """
        result = copy.copy(self)
        result._tenant, result._check = tenant, check
        return result

    def register(self, name: Any, key: Any, offset: Any, byte_size: Any) -> None:
        """Register a region of a shared memory object.

        Raises ``PenstockError``: ``unsupported`` if shared memory is not allowed, ``invalid`` if the object does not
        exist or is too small, or the name is taken.
        """
        self._check()
        if not self._allowed:
            raise PenstockError(Code.UNSUPPORTED, NOT_ALLOWED, "allow_shared_memory")
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_LENGTH:
            message = f"must have from 1 to {MAX_NAME_LENGTH} characters, is {str(name)[:50]!r}"
            raise invalid("name", message, MAX_NAME_LENGTH)
        if not isinstance(key, str) or not (match := KEY_PATTERN.fullmatch(key)) or match[1] in (".", ".."):
            message = "must be the name of a POSIX shared memory object (/input_data) and not begin with penstock-"
            raise invalid("key", f"{message}, is {str(key)[:50]!r}")
        region = Region(name, self._tenant, match[1], _count("offset", offset, 0), _count("byte_size", byte_size, 1))
        with _opened(region, os.O_RDWR):
            pass
        with self._shared.update() as state:
            if self._full_name(name) in state.regions:
                raise invalid("name", f"shared memory region '{name}' already in manager")
            if any(other.key == region.key and other.tenant != self._tenant for other in state.regions.values()):
                raise invalid("key", f"the shared memory object '/{region.key}' is registered by another API key")
            if len(state.regions) >= MAX_REGIONS:
                message = f"{MAX_REGIONS} regions are registered, which is the maximum; unregister some first"
                raise invalid("name", message, MAX_REGIONS)
            state.regions[self._full_name(name)] = region

    def unregister(self, name: str = "") -> None:
        """Unregister a region of the client, or all if ``name`` is empty. Unknown names are ignored, as in Triton."""
        self._check()
        if self._regions(name):
            with self._shared.update() as state:
                for each in self._regions(name):
                    state.regions.pop(each, None)

    def status(self, name: str = "") -> list[dict[str, Any]]:
        """Status of a region of the client, or all if ``name`` is empty. Raises ``PenstockError`` (``not_found``)."""
        regions = self._regions(name)
        if name and not regions:
            message = f"Unable to find system shared memory region: '{name[:100]}'"
            raise PenstockError(Code.NOT_FOUND, message, "name")
        return [
            {"name": result.name, "key": f"/{result.key}", "offset": result.offset, "byte_size": result.byte_size}
            for result in regions.values()
        ]

    def read(self, tensor: str, parameters: Mapping[str, Any]) -> bytes:
        """Read an input. Raises ``PenstockError`` (``invalid``) if its region or range is invalid."""
        region, offset, size = self._locate(tensor, parameters)
        if size > (maximum := self._max_size()):
            raise invalid(tensor, f"has {size} bytes of shared memory; the maximum is {maximum}", maximum)
        with _opened(region, os.O_RDONLY) as file:
            raw = os.pread(file, size, region.offset + offset)
        if len(raw) != size:
            message = f"the shared memory object was truncated while it was read ({len(raw)} of {size} bytes read)"
            raise invalid(tensor, message)
        return raw

    def write(self, tensor: str, parameters: Mapping[str, Any], raw: bytes) -> dict[str, Any]:
        """Write an output to its region; returns the output's parameters for the response.

        Raises ``PenstockError`` (``invalid``) if the region or range is invalid or too small.
        """
        region, offset, size = self._locate(tensor, parameters)
        if len(raw) > size:
            message = (
                f"shared memory size specified with the request ({size} bytes) should be at least {len(raw)} bytes"
            )
            raise invalid(tensor, message, size)
        with _opened(region, os.O_RDWR) as file:
            os.pwrite(file, raw, region.offset + offset)
        return {REGION: parameters[REGION], SIZE: len(raw), **({OFFSET: offset} if offset else {})}

    def _full_name(self, name: str) -> str:
        return f"{self._tenant}\0{name}"

    def _regions(self, name: str) -> dict[str, Region]:
        """Full name → region, for the region ``name`` of the client, or for all its regions if ``name`` is empty."""
        return {
            each: region
            for each, region in self._shared.read().regions.items()
            if region.tenant == self._tenant and name in ("", region.name)
        }

    def _locate(self, tensor: str, parameters: Mapping[str, Any]) -> tuple[Region, int, int]:
        """The region, and the offset and size in bytes, from the parameters of a tensor."""
        self._check()
        name = parameters.get(REGION)
        region = self._shared.read().regions.get(self._full_name(name)) if isinstance(name, str) else None
        if region is None:
            raise invalid(tensor, f"Unable to find shared memory region: '{str(name)[:100]}'")
        offset, size = _count(tensor, parameters.get(OFFSET, 0), 0), _count(tensor, parameters.get(SIZE), 0)
        if offset + size > region.byte_size:
            message = (
                f"Invalid offset + byte size for shared memory region: '{name}', which has {region.byte_size} bytes"
            )
            raise invalid(tensor, message, region.byte_size)
        return region, offset, size


def in_memory(tensor: str, parameters: Mapping[str, Any]) -> bool:
    """True if a tensor is in shared memory. Raises ``PenstockError`` (``invalid``) if only size or offset is given."""
    if REGION not in parameters and (SIZE in parameters or OFFSET in parameters):
        raise invalid(tensor, f"{SIZE} and {OFFSET} require {REGION}")
    return REGION in parameters


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def _opened(region: Region, how: int) -> Iterator[int]:
    """Open the shared memory object of a region; yields the file descriptor. Raises ``PenstockError`` (``invalid``) if
    the object is missing, or smaller than the region."""
    try:
        file = os.open(FOLDER / region.key, how | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        message = f"Unable to open shared memory region: '/{region.key}': {error.strerror}"
        raise invalid("key", message) from error
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise invalid("key", f"Unable to open shared memory region: '/{region.key}': not a shared memory object")
        if region.offset + region.byte_size > status.st_size:
            message = (
                f"Invalid offset + byte size for shared memory region '/{region.key}', which has {status.st_size} bytes"
            )
            raise invalid("byte_size", message, status.st_size)
        yield file
    finally:
        os.close(file)


def _count(name: str, value: Any, minimum: int) -> int:
    if type(value) is not int or not minimum <= value < 2**63:
        raise invalid(name, f"must be a number of bytes, at least {minimum}, is {str(value)[:50]}")
    return value

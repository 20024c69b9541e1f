"""The transport over NIXL (the extra ``nixl``): D reads P's transfer buffer by UCX, with RDMA where the network has it.

NIXL carries bytes alone: messages go over the connection of the two engines, and a piece counts as read only with the
right checksum, whatever NIXL says.
"""

from __future__ import annotations

import logging
from typing import Any, Generic, TypeVar
from uuid import uuid4

import msgspec

from penstock.core.errors import invalid

from .buffer import TransferBuffer

logger = logging.getLogger(__name__)

Job = TypeVar("Job")

MEMORY = "DRAM"
IN_PROGRESS, DONE = "PROC", "DONE"
"""States of NIXL."""


class NixlAddress(msgspec.Struct, frozen=True, array_like=True):
    """A transfer buffer that is registered with an agent."""

    metadata: bytes
    """Of the agent."""
    address: int
    """Of the first slot in its process."""
    slot_bytes: int


class NixlAgent:
    """The agent of an engine, with its transfer buffer registered. Use it in one thread.

    Raises ``PenstockError`` (``invalid``) where NIXL is not installed, or has no UCX here.
    """

    def __init__(self, buffer: TransferBuffer) -> None:
        try:
            from nixl_cu12._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            words = f"nixl needs the extra nixl, pip install 'penstock-llm[nixl]' ({error})"
            raise invalid("kv_transport", words) from error
        logging.getLogger("nixl").setLevel(logging.WARNING)
        try:
            self._agent: Any = nixl_agent(uuid4().hex, nixl_agent_config(backends=["UCX"]))
            self._buffer = buffer
            self._first = int(buffer.data.ctypes.data)
            self._registered = self._agent.register_memory([(self._first, buffer.data.nbytes, 0, "")], MEMORY)
        except Exception as error:  # NIXL's own, of many kinds
            raise invalid("kv_transport", f"nixl cannot be used here: {error}") from error

    @property
    def address(self) -> NixlAddress:
        """For other engines."""
        return NixlAddress(self._agent.get_agent_metadata(), self._first, self._buffer.slot_bytes)

    def connect(self, address: NixlAddress) -> NixlPeer[Any]:
        """The buffer of another engine. Raises ``OSError`` where NIXL cannot reach it."""
        try:
            return NixlPeer(self._agent, self._first, address, self._agent.add_remote_agent(address.metadata))
        except Exception as error:
            raise OSError(f"NIXL cannot connect: {error}") from error

    def close(self) -> None:
        self._agent.deregister_memory(self._registered)


class NixlPeer(Generic[Job]):
    """Reads pieces from another engine's buffer into this one's."""

    def __init__(self, agent: Any, first: int, address: NixlAddress, name: str) -> None:
        self._agent = agent
        self._first = first
        self._address = address
        self._name = name
        self._reading: list[tuple[Job, Any]] = []

    @property
    def busy(self) -> bool:
        """Whether pieces are being read: their places in the buffer may be written at any time."""
        return bool(self._reading)

    def read(self, job: Job, slot: int, into: int, first_byte: int, size: int) -> None:
        """Begin to read bytes of the other engine's ``slot`` into this one's slot ``into``; ``finished`` will have
        ``job``. Raises ``OSError``."""
        size_of_slot = self._address.slot_bytes
        own = self._first + into * size_of_slot + first_byte
        other = self._address.address + slot * size_of_slot + first_byte
        try:
            local = self._agent.get_xfer_descs([(own, size, 0)], MEMORY)
            remote = self._agent.get_xfer_descs([(other, size, 0)], MEMORY)
            handle = self._agent.initialize_xfer("READ", local, remote, self._name)
            self._agent.transfer(handle)
        except Exception as error:
            raise OSError(f"NIXL cannot read: {error}") from error
        self._reading.append((job, handle))

    def finished(self) -> list[tuple[Job, bool]]:
        """What is not being read any more, and whether it was read."""
        found, left = [], []
        for job, handle in self._reading:
            try:
                state = self._agent.check_xfer_state(handle)
            except Exception as error:
                logger.error("NIXL has failed: %s", error)
                state = ""
            if state == IN_PROGRESS:
                left.append((job, handle))
                continue
            self._agent.release_xfer_handle(handle)
            found.append((job, state == DONE))
        self._reading = left
        return found

    def close(self) -> None:
        """Forget the other engine, of which nothing is being read."""
        try:
            self._agent.remove_remote_agent(self._name)
        except Exception as error:
            logger.warning("NIXL keeps a connection: %s", error)

"""The NIXL transport (optional dependency ``nixl``): the decode engine reads the transfer buffer of the prefill engine
with UCX, which uses RDMA if available.

NIXL transfers only the bytes of pieces. Messages use the engines' TCP connection. A piece that NIXL reports as read is
accepted only if its checksum is right.
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
"""NIXL's name of host memory."""
IN_PROGRESS, DONE = "PROC", "DONE"
"""NIXL's transfer states."""


class NixlAddress(msgspec.Struct, frozen=True, array_like=True):
    """Address of a transfer buffer registered with a NIXL agent."""

    metadata: bytes
    """Metadata of the agent."""
    address: int
    """Virtual address of the first slot in the agent's process."""
    slot_bytes: int
    """Bytes per slot."""


class NixlAgent:
    """An engine's NIXL agent with its registered transfer buffer. Not thread-safe.

    Raises ``PenstockError`` (``invalid``) if NIXL is not installed or its UCX backend does not work.
    """

    def __init__(self, buffer: TransferBuffer) -> None:
        try:
            from nixl_cu12._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            message = f"nixl is not installed ({error}): pip install 'penstock-llm[nixl]'"
            raise invalid("kv_transport", message) from error
        logging.getLogger("nixl").setLevel(logging.WARNING)
        try:
            self._agent: Any = nixl_agent(uuid4().hex, nixl_agent_config(backends=["UCX"]))
            self._buffer = buffer
            self._first = int(buffer.data.ctypes.data)
            self._registered = self._agent.register_memory([(self._first, buffer.data.nbytes, 0, "")], MEMORY)
        except Exception as error:  # NIXL has no common error class
            raise invalid("kv_transport", f"nixl does not work on this machine ({error}): set auto or tcp") from error

    @property
    def address(self) -> NixlAddress:
        """Address of this engine's buffer, for other engines."""
        return NixlAddress(self._agent.get_agent_metadata(), self._first, self._buffer.slot_bytes)

    def connect(self, address: NixlAddress) -> NixlPeer[Any]:
        """Connect to another engine's buffer. Raises ``OSError`` if NIXL cannot reach it."""
        try:
            return NixlPeer(self._agent, self._first, address, self._agent.add_remote_agent(address.metadata))
        except Exception as error:
            raise OSError(f"NIXL cannot connect: {error}") from error

    def close(self) -> None:
        self._agent.deregister_memory(self._registered)


class NixlPeer(Generic[Job]):
    """Reads pieces from another engine's buffer into this engine's buffer.

    Args:
        first: address of the first slot of this engine's buffer.
        name: name of the peer's agent.
    """

    def __init__(self, agent: Any, first: int, address: NixlAddress, name: str) -> None:
        self._agent = agent
        self._first = first
        self._address = address
        self._name = name
        self._reading: list[tuple[Job, Any]] = []
        """Reads in progress, each with its NIXL handle."""

    @property
    def busy(self) -> bool:
        """True while pieces are being read: NIXL may then write to their slots of this engine's buffer."""
        return bool(self._reading)

    def read(self, job: Job, slot: int, into: int, first_byte: int, size: int) -> None:
        """Start to read ``size`` bytes from offset ``first_byte`` of the peer's ``slot`` into this engine's slot
        ``into``. ``finished`` returns ``job`` afterwards. Raises ``OSError``."""
        slot_bytes = self._address.slot_bytes
        local_address = self._first + into * slot_bytes + first_byte
        remote_address = self._address.address + slot * slot_bytes + first_byte
        try:
            local = self._agent.get_xfer_descs([(local_address, size, 0)], MEMORY)
            remote = self._agent.get_xfer_descs([(remote_address, size, 0)], MEMORY)
            handle = self._agent.initialize_xfer("READ", local, remote, self._name)
            self._agent.transfer(handle)
        except Exception as error:
            raise OSError(f"NIXL cannot read: {error}") from error
        self._reading.append((job, handle))

    def finished(self) -> list[tuple[Job, bool]]:
        """Remove and return the reads that have ended. The bool of each read is True if it succeeded."""
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
        """Disconnect from the peer. No read may be in progress."""
        try:
            self._agent.remove_remote_agent(self._name)
        except Exception as error:
            logger.warning("NIXL could not disconnect: %s", error)

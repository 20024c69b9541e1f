"""A group of ranks with one GPU each, on one machine. NCCL gathers outputs; in tests on CPUs, Gloo gathers them.

Outputs are split among ranks as in other groups, so results have the same bits for every number of ranks. Failed steps
are reported over shared memory, as in a group on CPUs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from .group import CombineFn, ComputeFn, Group, Shard, SingleRank, shard_outputs

# PyTorch before 2.13 names this function ``all_gather_into_tensor``.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

MAX_GATHERED_BYTES = 2**16
"""Maximum total size of rows, in bytes, that ``combine_rows`` gathers; larger rows are exchanged by all-to-all."""


class DeviceGroup(Group):
    """A ``Group`` for tensors on GPUs (CPUs in tests).

    Args:
        control: group of the same ranks in shared memory, used by ``step``.
        device: device of this rank.
        rendezvous: file through which the ranks find each other (``FileStore``). The file must not exist.
    """

    def __init__(self, control: Group, device: torch.device, rendezvous: Path) -> None:
        super().__init__(control.rank, control.size)
        self._control = control
        self._device = device
        store = dist.FileStore(str(rendezvous), control.size)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=control.rank, world_size=control.size)
        self._shards: dict[Shard, list[Shard]] = {}
        """Shards of all ranks, by the shard of this rank."""

    def all_gather(
        self, compute: ComputeFn, rows: int, shard: Shard, dtype: torch.dtype, rows_per_token: int = 1
    ) -> Tensor:
        shards = self._shards_of_all(shard)
        widest = max(each.size for each in shards)
        outputs = compute(None)
        if shard.size < widest:
            outputs = torch.nn.functional.pad(outputs, (0, widest - shard.size))
        gathered = self._gather(outputs.contiguous())
        if all(each.size == widest for each in shards):
            return gathered.transpose(0, 1).reshape(rows, shard.total)
        return torch.cat([part[:, : each.size] for part, each in zip(gathered, shards, strict=True)], 1)

    def gather_rows(
        self, compute: ComputeFn, ids: Tensor, shard: Shard, width: int, dtype: torch.dtype, rows_per_token: int = 1
    ) -> Tensor:
        merged = torch.zeros(len(ids), width, dtype=dtype, device=ids.device)
        compute(merged)
        gathered = self._gather(merged)
        for each, part in zip(self._shards_of_all(shard), gathered, strict=True):  # no copies from the host
            is_in_shard = ((ids >= each.first) & (ids < each.end))[:, None]
            merged = torch.where(is_in_shard, part, merged)
        return merged

    def combine_rows(
        self,
        compute: ComputeFn,
        ids: Tensor,
        shard: Shard,
        width: int,
        dtype: torch.dtype,
        rows_per_token: int,
        combine: CombineFn,
    ) -> Tensor:
        """See ``Group.combine_rows``. Each rank receives some columns of all rows (all-to-all) and combines them. With
        k rows per token and R ranks, a rank receives (k + 1) (R - 1) / R vectors per token, and k (R - 1) in a gather.
        A small number of rows is gathered: a second collective would take longer than the additional bytes."""
        if len(ids) * width * dtype.itemsize <= MAX_GATHERED_BYTES:
            return super().combine_rows(compute, ids, shard, width, dtype, rows_per_token, combine)
        columns = [shard_outputs(SingleRank(rank, self.size), width) for rank in range(self.size)]
        rank_columns, rows = columns[self.rank], len(ids)
        computed = torch.zeros(rows, width, dtype=dtype, device=ids.device)
        compute(computed)
        sent = computed.new_zeros(self.size, rows, max(each.size for each in columns))
        for part, each in zip(sent, columns, strict=True):
            part[:, : each.size] = computed[:, each.first : each.end]
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.flatten(0, 1), sent.flatten(0, 1))
        is_after = [ids >= each.end for each in self._shards_of_all(shard)]
        owners = torch.stack(is_after).sum(0)  # rank of each row: shards of ids are in the order of ranks
        merged = received[owners, torch.arange(rows, device=ids.device), : rank_columns.size].contiguous()
        result = combine(merged, rank_columns)
        return self.all_gather(lambda _: result, rows // rows_per_token, rank_columns, dtype)

    def step(self) -> AbstractContextManager[None]:
        """See ``Group.step``. If a rank fails while other ranks wait for its outputs, these wait in NCCL until the
        executor terminates them."""
        return self._control.step()

    def _gather(self, tensor: Tensor) -> Tensor:
        """Gather tensors of the same shape: ``[*shape]`` of each rank to ``[ranks, *shape]``."""
        gathered = torch.empty((self.size * len(tensor), *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
        all_gather_single(gathered, tensor)
        return gathered.view(self.size, *tensor.shape)

    def _shards_of_all(self, shard: Shard) -> list[Shard]:
        """Shards of all ranks, gathered at the first call with this shard. All ranks make the same calls."""
        if shard not in self._shards:
            bounds = torch.tensor([shard.first, shard.end], device=self._device)
            self._shards[shard] = [Shard(first, end, shard.total) for first, end in self._gather(bounds).tolist()]
        return self._shards[shard]

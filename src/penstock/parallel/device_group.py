"""A group of ranks that have a GPU of one machine each. What they gather travels by NCCL; on CPUs, for tests, by Gloo.

Outputs are split among ranks as everywhere, so that results have the same bits at every size. What the ranks tell each
other about failed steps goes over shared memory, as in a group on CPUs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from .group import CombineFn, ComputeFn, Group, Shard, SingleRank, shard_outputs

all_gather_single = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # its name before PyTorch 2.13

FEW_BYTES = 2**16
"""Of all rows that ``combine_rows`` gathers as they are."""


class DeviceGroup(Group):
    """A ``Group`` whose tensors are on devices.

    Args:
        control: of the same ranks, for ``step``.
        device: of this rank.
        meeting_point: a file that does not exist yet, by which the ranks find each other.
    """

    def __init__(self, control: Group, device: torch.device, meeting_point: Path) -> None:
        super().__init__(control.rank, control.size)
        self._control = control
        self._device = device
        store = dist.FileStore(str(meeting_point), control.size)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=control.rank, world_size=control.size)
        self._shards: dict[Shard, list[Shard]] = {}
        """The shards of all ranks, by this rank's."""

    def all_gather(
        self, compute: ComputeFn, rows: int, shard: Shard, dtype: torch.dtype, rows_per_token: int = 1
    ) -> Tensor:
        shards = self._shards_of_all(shard)
        widest = max(each.size for each in shards)
        own = compute(None)
        if shard.size < widest:
            own = torch.nn.functional.pad(own, (0, widest - shard.size))
        gathered = self._gather(own.contiguous())
        if all(each.size == widest for each in shards):
            return gathered.transpose(0, 1).reshape(rows, shard.total)
        return torch.cat([part[:, : each.size] for part, each in zip(gathered, shards, strict=True)], 1)

    def gather_rows(
        self, compute: ComputeFn, ids: Tensor, shard: Shard, width: int, dtype: torch.dtype, rows_per_token: int = 1
    ) -> Tensor:
        rows = len(ids)
        own = torch.zeros(rows, width, dtype=dtype, device=ids.device)
        compute(own)
        gathered, merged = self._gather(own), own
        for each, part in zip(self._shards_of_all(shard), gathered, strict=True):  # without copies from the host
            is_its = ((ids >= each.first) & (ids < each.end))[:, None]
            merged = torch.where(is_its, part, merged)
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
        """Each rank gets its columns of all rows (all-to-all), and combines these. A rank receives (k + 1) (R - 1) / R
        vectors a token, with k rows a token and R ranks, where all rows would be k (R - 1). Few rows are gathered,
        as two collectives then take longer than the bytes."""
        if len(ids) * width * dtype.itemsize <= FEW_BYTES:
            return super().combine_rows(compute, ids, shard, width, dtype, rows_per_token, combine)
        columns = [shard_outputs(SingleRank(rank, self.size), width) for rank in range(self.size)]
        mine, rows = columns[self.rank], len(ids)
        own = torch.zeros(rows, width, dtype=dtype, device=ids.device)
        compute(own)
        sent = own.new_zeros(self.size, rows, max(each.size for each in columns))
        for part, each in zip(sent, columns, strict=True):
            part[:, : each.size] = own[:, each.first : each.end]
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.flatten(0, 1), sent.flatten(0, 1))
        places = [ids >= each.end for each in self._shards_of_all(shard)]
        owners = torch.stack(places).sum(0)  # of each row: ranks' ids lie behind each other
        merged = received[owners, torch.arange(rows, device=ids.device), : mine.size].contiguous()
        result = combine(merged, mine)
        return self.all_gather(lambda _: result, rows // rows_per_token, mine, dtype)

    def step(self) -> AbstractContextManager[None]:
        """As of the control group. A rank that fails while others wait for its outputs leaves them waiting in NCCL,
        until the executor ends them."""
        return self._control.step()

    def _gather(self, own: Tensor) -> Tensor:
        """``[ranks, *shape]`` of every rank's tensor of one shape."""
        gathered = torch.empty((self.size * len(own), *own.shape[1:]), dtype=own.dtype, device=own.device)
        all_gather_single(gathered, own)
        return gathered.view(self.size, *own.shape)

    def _shards_of_all(self, shard: Shard) -> list[Shard]:
        """Each rank's shard; asked for once, since ranks make the same calls."""
        if shard not in self._shards:
            mine = torch.tensor([shard.first, shard.end], device=self._device)
            self._shards[shard] = [Shard(first, end, shard.total) for first, end in self._gather(mine).tolist()]
        return self._shards[shard]

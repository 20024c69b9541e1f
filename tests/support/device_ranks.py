"""Check the collective operations of ``DeviceGroup`` in one rank, started by ``test_device_group.py``:

python device_ranks.py DESCRIPTOR RANK SIZE RENDEZVOUS_FILE
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.parallel import Shard, shard_outputs
from penstock.parallel.device_group import DeviceGroup
from penstock.parallel.shared_memory import SharedMemoryGroup


def main() -> None:
    descriptor, rank, size = map(int, sys.argv[1:4])
    control = SharedMemoryGroup(descriptor, rank, size)
    group = DeviceGroup(control, torch.device("cpu"), Path(sys.argv[4]))
    for rows in (1, 7):
        for total, dtype in ((size, torch.float32), (130, torch.bfloat16), (64 * size, torch.float64)):
            whole = torch.randn(rows, total, generator=torch.Generator().manual_seed(total)).to(dtype)
            shard = shard_outputs(group, total)

            def part(out: Tensor | None, whole: Tensor = whole, shard: Shard = shard) -> Tensor:
                columns = whole[:, shard.first : shard.end]
                return columns if out is None else out.copy_(columns)

            with group.step():
                assert torch.equal(group.all_gather(part, rows, shard, dtype), whole)
            table = torch.randn(total, 5, generator=torch.Generator().manual_seed(rows)).to(dtype)
            table[0] = -0.0
            ids = torch.randint(total, (rows,), generator=torch.Generator().manual_seed(3))
            ids[0] = 0

            def write(out: Tensor | None, table: Tensor = table, ids: Tensor = ids, shard: Shard = shard) -> Tensor:
                assert out is not None
                local = (ids >= shard.first) & (ids < shard.end)
                out[local] = table[ids[local]]
                return out

            with group.step():
                found = group.gather_rows(write, ids, shard, 5, dtype)
                assert torch.equal(found, table[ids]) and torch.equal(found.signbit(), table[ids].signbit())
            tokens = rows if rows == 1 else 100  # small and large messages
            ids = torch.randint(total, (3 * tokens,), generator=torch.Generator().manual_seed(4))
            wide = torch.randn(total, 130, generator=torch.Generator().manual_seed(rows)).to(dtype)

            def write_wide(out: Tensor | None, wide: Tensor = wide, ids: Tensor = ids, shard: Shard = shard) -> Tensor:
                return write(out, wide, ids, shard)

            def combine(found: Tensor, columns: Shard, wide: Tensor = wide, ids: Tensor = ids) -> Tensor:
                assert torch.equal(found, wide[ids][:, columns.first : columns.end])
                return found.unflatten(0, (-1, 3)).sum(1)

            with group.step():
                found = group.combine_rows(write_wide, ids, shard, 130, dtype, 3, combine)
                assert torch.equal(found, wide[ids].unflatten(0, (-1, 3)).sum(1))
    dist.destroy_process_group()  # the group's threads must end before the interpreter
    print("gathered")


if __name__ == "__main__":
    main()

"""Run a Ray cluster with several nodes that are processes on this machine.

``python ray_nodes.py CORES...`` takes the number of cores of the head and of each other node. The program prints the
cluster's address, and ends at the end of its standard input.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster


def main(cores: list[int]) -> None:
    store = 80 * 2**20
    head = {"num_cpus": cores[0], "include_dashboard": False, "object_store_memory": store}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for number in cores[1:]:
        cluster.add_node(wait=False, num_cpus=number, object_store_memory=store)
    cluster.wait_for_nodes()
    print(f"cluster at {cluster.address}", file=sys.stderr, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])

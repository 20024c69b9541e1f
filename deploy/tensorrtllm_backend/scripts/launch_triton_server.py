"""``python scripts/launch_triton_server.py`` starts Penstock."""

from penstock.cli.entry import tritonserver

raise SystemExit(tritonserver())

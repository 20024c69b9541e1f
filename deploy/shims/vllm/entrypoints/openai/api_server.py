"""``python -m vllm.entrypoints.openai.api_server`` starts Penstock where ``deploy/shims`` is on PYTHONPATH."""

from penstock.cli.entry import vllm_api_server

raise SystemExit(vllm_api_server())

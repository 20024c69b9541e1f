"""``python -m fastdeploy.entrypoints.openai.api_server`` starts Penstock where ``deploy/shims`` is on PYTHONPATH."""

from penstock.cli.entry import fastdeploy_api_server

raise SystemExit(fastdeploy_api_server())

"""``python tools/fill_template.py`` in a folder laid out as TensorRT-LLM's backend is."""

from penstock.cli.entry import fill_template

raise SystemExit(fill_template())

"""``python pd_ranktable_tools.py --mode gen …``, as Ascend's document has it, is ``penstock ranktable``."""

import sys

from penstock.cli.main import main

raise SystemExit(main(["ranktable", *sys.argv[1:]]))

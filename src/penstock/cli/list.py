"""``penstock list``: models in the caches."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .flags import add_options, configure
from .screen import print_json
from .table import table

if TYPE_CHECKING:
    from penstock.frontend.downloads.stored_models import StoredModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print as JSON, sizes in bytes")
    add_options(parser, (), ("download_dir",))


def run(args: argparse.Namespace) -> int:
    from penstock.frontend.downloads.stored_models import stored_models

    folder = configure(args).configuration.model.download_dir
    models = stored_models(Path(folder) if folder else None)
    if args.json:
        fields = ("name", "size", "modified", "complete")
        print_json([{name: getattr(one, name) for name in fields} | {"folder": str(one.folder)} for one in models])
        return 0
    if not models:
        print("no downloaded models; penstock download NAME gets one, and the built-in model needs no download")
        return 0
    print(*table(("NAME", "SIZE", "MODIFIED", "FOLDER"), [_row(one) for one in models], right=("SIZE",)), sep="\n")
    return 0


def _row(model: StoredModel) -> tuple[str, ...]:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.modified))
    state = "" if model.complete else "  (incomplete: penstock download resumes it)"
    return model.name, f"{model.size / 1e9:.2f} GB", when, f"{model.folder}{state}"

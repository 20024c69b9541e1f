"""``penstock rm``: delete downloaded models."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.core.errors import invalid
from penstock.core.spelling import did_you_mean

from .flags import add_options, configure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="name of a model, as penstock list shows it")
    add_options(parser, (), ("download_dir",))


def run(args: argparse.Namespace) -> int:
    """Delete all versions of the models. Deletes none if a name is unknown."""
    from penstock.frontend.downloads.stored_models import stored_models

    folder = configure(args).configuration.model.download_dir
    models = stored_models(Path(folder) if folder else None)
    known = [one.name for one in models]
    for name in args.names:
        if name not in known:
            hint = did_you_mean(name, known) or "; penstock list shows the downloaded models"
            raise invalid("NAME", f"{name} is not a downloaded model{hint}")
    for one in models:
        if one.name in args.names:
            try:
                one.delete()
            except OSError as error:
                raise invalid(
                    "NAME", f"{one.folder} cannot be deleted: {(error.strerror or str(error)).lower()}"
                ) from error
            print(f"deleted {one.name} ({one.size / 1e9:.2f} GB)")
    return 0

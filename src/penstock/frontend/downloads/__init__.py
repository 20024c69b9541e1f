"""Downloads of models: from the hubs of Hugging Face and ModelScope, object stores, web servers and package indexes."""

from .names import ModelName, parse
from .node_part import NEEDED_FIRST, weight_files_of_node
from .resolving import DownloadOptions, download, resolve_name
from .selection import Selection
from .state import missing_files

__all__ = [
    "NEEDED_FIRST",
    "DownloadOptions",
    "ModelName",
    "Selection",
    "download",
    "missing_files",
    "parse",
    "resolve_name",
    "weight_files_of_node",
]

"""Downloads of models: from the hubs of Hugging Face and ModelScope, object stores and web servers."""

from .names import ModelName, parse
from .resolving import DownloadOptions, download, resolve_name
from .selection import Selection
from .state import missing_files

__all__ = ["DownloadOptions", "ModelName", "Selection", "download", "missing_files", "parse", "resolve_name"]

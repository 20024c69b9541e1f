"""Downloads of models from Hugging Face, ModelScope, object stores, web servers and package indexes.

``huggingface_hub`` lists a model's files, finds tokens, and defines the cache and its settings. It is not used to fetch
files: it supports only its own hub, checks sizes but no hashes over HTTP, and after a restart fetches an interrupted
file from the beginning. ``downloader.py`` fetches parts of files in parallel, records written ranges in a journal, and
checks SHA-256 or git hashes, for all sources; ``hub_cache.py`` puts the files into the hub's cache.
"""

from .names import ModelName, parse
from .node_part import NEEDED_FIRST, weight_files_of_node
from .resolving import DownloadOptions, download, resolve_name
from .selection import Selection
from .state import missing_files

"""Downloads of models: from the hubs of Hugging Face and ModelScope, object stores, web servers and package indexes.

``huggingface_hub`` lists a model's files, finds tokens, and defines the cache and its settings. It does not fetch them:
it knows its own hub alone; over HTTP it compares what arrives with the announced size, but with no hash; and a program
that is started again fetches an interrupted file from its start. ``downloader.py`` fetches parts of files in parallel,
notes in a journal what is on the disk, and checks SHA-256 or git hashes, the same for all sources; ``hub_cache.py``
puts the files into the hub's cache.
"""

from .names import ModelName, parse
from .node_part import NEEDED_FIRST, weight_files_of_node
from .resolving import DownloadOptions, download, resolve_name
from .selection import Selection
from .state import missing_files

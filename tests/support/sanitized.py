"""``python sanitized.py FOLDER TESTS``: run tests with the package in a folder instead of the installed one."""

import sys

import pytest

folder, *tests = sys.argv[1:]
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable")]
sys.path.insert(0, folder)

if __name__ == "__main__":
    import torch

    from penstock.ops import pages

    assert folder in pages.__file__, pages.__file__
    # torch.zeros uses malloc, so that ASan checks bounds.
    pages.zeros = lambda size, huge=False: torch.zeros(size, dtype=torch.uint8)
    sys.exit(pytest.main(["-p", "no:cacheprovider", *tests]))

"""``python sanitized.py FOLDER TESTS``: run tests with the package in a folder, not with the one that is installed."""

import sys

import pytest

folder, *tests = sys.argv[1:]
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable")]
sys.path.insert(0, folder)

if __name__ == "__main__":
    import penstock.ops

    assert folder in penstock.ops.__file__, penstock.ops.__file__
    sys.exit(pytest.main(["-p", "no:cacheprovider", *tests]))

"""Import the sanitized attn_dispatch._cuda in the processes that tests/scripts/sanitize.py starts.

Python runs this module at its start, since its folder is on their PYTHONPATH.
"""

import os
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import spec_from_file_location


class _Sanitized:
    @staticmethod
    def find_spec(name, path=None, target=None):
        file = os.environ.get("ATTN_DISPATCH_SANITIZED_CUDA")
        if name != "attn_dispatch._cuda" or not file:
            return None
        return spec_from_file_location(name, file, loader=ExtensionFileLoader(name, file))


sys.meta_path.insert(0, _Sanitized)

"""A build hook that names a wheel after the Python and the platform of its compiled library."""

import os

from hatchling.builders.hooks.plugin.interface import BuildHookInterface  # pyright: ignore


class CompiledElsewhere(BuildHookInterface):
    def initialize(self, version, build_data):
        build_data["pure_python"] = False
        build_data["tag"] = os.environ["ATTN_RELEASE_TAG"]

"""ucx-gaudi: Gaudi memory for stock UCX. This package contains the plugin and the tool `ucx-gaudi`."""

import os


def plugin_path():
    """The folder for UCX_PLUGIN_PATH."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib", "ucx-gaudi", "plugins")

"""ucx-gaudi: Gaudi memory for stock UCX. This package contains the plugin and the tool `ucx-gaudi`."""

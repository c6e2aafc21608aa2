"""Gaudi memory from Python, through the libucp that NIXL brings.

A framework has memory of its own, and hands NIXL its addresses. Without one, stock UCX allocates on the
card for whoever asks: `ucp_mem_map` with the memory type of a Gaudi. Nothing of ucx-gaudi is called there; its own
Python module, `ucx_gaudi()`, also copies between the card and this process, without NIXL.
"""

import ctypes as c
import glob
import importlib
import os
import sys

GAUDI = 9  # UCS_MEMORY_TYPE_GAUDI
FEATURE_RMA = 1 << 1
ALLOCATE = 1 << 1  # UCP_MEM_MAP_ALLOCATE


class Params(c.Structure):
    """The beginning of ucp_params_t; what follows is not read without its bit in the mask."""

    _fields_ = [("field_mask", c.c_uint64), ("features", c.c_uint64), ("rest", c.c_uint64 * 16)]


class MapParams(c.Structure):
    """ucp_mem_map_params_t"""

    _fields_ = [
        ("field_mask", c.c_uint64),
        ("address", c.c_void_p),
        ("length", c.c_size_t),
        ("flags", c.c_uint),
        ("prot", c.c_uint),
        ("memory_type", c.c_uint),
        ("exported", c.c_void_p),
    ]


class MemAttributes(c.Structure):
    """ucp_mem_attr_t"""

    _fields_ = [
        ("field_mask", c.c_uint64),
        ("address", c.c_void_p),
        ("length", c.c_size_t),
        ("memory_type", c.c_uint),
    ]


def libucp():
    """The libucp of the NIXL package: the same that its UCX backend uses."""
    import nixl_cu12

    root = os.path.join(os.path.dirname(nixl_cu12.__file__), "..", "nixl_cu12.libs")
    return c.CDLL(glob.glob(os.path.join(root, "libucp-*"))[0])


def ucx_gaudi():
    """The Python module: of the environment, or of the installation whose plugin UCX loads."""
    installed = os.path.join(os.environ.get("UCX_PLUGIN_PATH", ""), "..", "python")
    if installed not in sys.path:
        sys.path.append(installed)
    try:
        return importlib.import_module("ucx_gaudi")
    except ModuleNotFoundError:
        raise SystemExit("Python has no module ucx_gaudi: start this with `ucx-gaudi run --`") from None


def card_words():
    """What copies here: figures of a software card say nothing about hardware."""
    with open("/proc/self/maps") as maps:
        paths = {line[line.index("/") :].strip() for line in maps if "/libhl-thunk.so" in line}
    for path in paths:
        version = getattr(c.CDLL(path), "hlthunk_get_version", None)
        if version:
            version.restype = c.c_char_p
        if version and b"soft" in (version() or b""):
            return "software card"
    return "card"


def check(status, what):
    """`ucs_status_t` is one byte."""
    status = c.c_int8(status).value
    if status != 0:
        raise RuntimeError(f"{what}: UCX status {status}")


class GaudiMemory:
    """Allocations on a card, all freed together."""

    def __init__(self, ucp):
        self.ucp, self.context, self.handles = ucp, c.c_void_p(), []
        config = c.c_void_p()
        check(ucp.ucp_config_read(None, None, c.byref(config)), "ucp_config_read")
        params = Params(field_mask=1, features=FEATURE_RMA)
        version = ucp.ucp_init_version(1, 21, c.byref(params), config, c.byref(self.context))
        check(version, "ucp_init")
        ucp.ucp_config_release(config)

    def allocate(self, length):
        """The address of so many bytes on the card. The CPU cannot use it."""
        params = MapParams(field_mask=2 | 4 | 16, length=length, flags=ALLOCATE, memory_type=GAUDI)
        handle = c.c_void_p()
        if self.ucp.ucp_mem_map(self.context, c.byref(params), c.byref(handle)):
            raise SystemExit(
                f"UCX has no {length} bytes of Gaudi memory for this process. Lines above say why; without any, UCX does not load "
                "the plugin: start this with `ucx-gaudi run --` (without a card: `ucx-gaudi run --soft=2 --`), and unset UCX_TLS"
            )
        self.handles.append(handle)
        attributes = MemAttributes(field_mask=1)
        check(self.ucp.ucp_mem_query(handle, c.byref(attributes)), "ucp_mem_query")
        return attributes.address

    def free(self):
        """Frees everything, and closes the card."""
        for handle in self.handles:
            check(self.ucp.ucp_mem_unmap(self.context, handle), "ucp_mem_unmap")
        self.handles.clear()
        self.ucp.ucp_cleanup(self.context)

    @staticmethod
    def address_of(buffer):
        """Where a bytearray is."""
        return c.addressof(c.c_char.from_buffer(buffer))

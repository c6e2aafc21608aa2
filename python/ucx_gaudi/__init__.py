"""Gaudi memory from Python: allocate, fill, copy, free, export, import, lend.

>>> import ucx_gaudi
>>> with ucx_gaudi.alloc(1 << 20) as memory:
...     memory.fill(0)
...     memory.write(b"hello", offset=3)
...     memory.read(5, offset=3)
b'hello'

The memory is Gaudi memory to every UCX in the process: hand `memory.address` and `len(memory)` to NIXL, UCXX,
mpi4py (`MPI.buffer.fromaddress`; in mpi4py 3 `MPI.memory`) or UCP. The CPU cannot access it by its address.

There is no `__cuda_array_interface__` and no DLPack export: DLPack has no device type for a Gaudi, and whoever takes
the address for CUDA's or the CPU's would touch it and crash. What other drivers can take is a dma-buf: `export()`; what
they give is one, too: `import_dmabuf()`.

The functions are those of `ucx_gaudi.h`, in libucx_gaudi.so. It is looked for where UCX_PLUGIN_PATH says, then in this
module's installation, then on the loader path.
"""

from __future__ import annotations

import ctypes
import enum
import json
import operator
import os
import shutil
import subprocess
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, List, NamedTuple, Optional, Protocol, Union

if TYPE_CHECKING:
    from typing_extensions import Buffer

    class _Array(Protocol):
        """An array of numpy, which has a buffer; its types say so only from Python 3.12 on."""

        @property
        def __array_interface__(self) -> Any: ...

    # bytes, memoryview, array, mmap, numpy: whatever has a buffer.
    AnyBuffer = Union[Buffer, _Array]

__version__ = "0.1.0"

__all__ = [
    "Card",
    "DmaBuf",
    "ErrorCode",
    "GaudiError",
    "Imported",
    "Memory",
    "alloc",
    "cards",
    "error_string",
    "flush_peer_writes",
    "import_dmabuf",
    "is_device_memory",
    "lend",
    "take_back",
]

_LIBRARY = "libucx_gaudi.so"
_API_VERSION = 3

# "0", "module:2" or a PCI address; a number is an index.
CardName = Union[str, int, None]


class ErrorCode(enum.IntEnum):
    """The codes of share/doc/ucx-gaudi/docs/errors.md; `error_string()` says what they mean."""

    DEVICE_NOT_FOUND = -1
    OUT_OF_MEMORY = -2
    INVALID_PARAMS = -3
    DEVICE_BUSY = -4
    DMA_FAILED = -5
    TIMEOUT = -6
    PERMISSION_DENIED = -7
    CHANNEL_FAILED = -8


class GaudiError(RuntimeError):
    """A call failed. `code` and `name` are those of `ErrorCode`; the text says what to do."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.name = ErrorCode(code).name if code in set(ErrorCode) else str(code)


class DmaBuf(NamedTuple):
    """A descriptor, which the caller closes, and where the memory begins in it."""

    fd: int
    offset: int


@dataclass(frozen=True)
class Card:
    """A card of this machine, free or not; `index` is what `alloc` takes."""

    index: int
    module_id: int
    bus_id: str
    generation: str
    memory: Optional[int]
    software: bool


def _folders() -> List[Path]:
    """Where the library may be: PREFIX/lib/ucx-gaudi."""
    plugins = [Path(folder) for folder in os.environ.get("UCX_PLUGIN_PATH", "").split(":") if folder]
    here = Path(__file__).resolve()
    # An installation's folder, and a wheel's.
    return [folder.parent for folder in plugins] + [here.parents[2], here.parent / "lib" / "ucx-gaudi"]


def _load() -> ctypes.CDLL:
    paths = [folder / _LIBRARY for folder in _folders()]
    library = ctypes.CDLL(str(next((path for path in paths if path.exists()), _LIBRARY)))
    library.ucx_gaudi_error.restype = ctypes.c_char_p
    if library.ucx_gaudi_api_version() < _API_VERSION:
        raise ImportError(f"{_LIBRARY} is older than this module")
    library.ucx_gaudi_error_string.restype = ctypes.c_char_p
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for name, arguments in {
        "alloc": [ctypes.c_char_p, size, ctypes.POINTER(pointer)],
        "free": [pointer],
        "copy": [pointer, pointer, size],
        "fill": [pointer, number, size],
        "flush_peer_writes": [pointer],
        "is_device_memory": [pointer, size],
        "export_dmabuf": [pointer, size, ctypes.POINTER(number), ctypes.POINTER(ctypes.c_uint64)],
        "import_dmabuf": [ctypes.c_char_p, number, ctypes.c_uint64, size, ctypes.POINTER(pointer)],
        "unmap_dmabuf": [pointer],
        "lend": [number],
        "take_back": [number],
    }.items():
        function = getattr(library, "ucx_gaudi_" + name)
        function.argtypes, function.restype = arguments, number
    return library


_library: Optional[ctypes.CDLL] = None


def _loaded() -> ctypes.CDLL:
    global _library
    if _library is None:
        _library = _load()
    return _library


def _call(name: str, *arguments: object) -> int:
    library = _loaded()
    result: int = getattr(library, "ucx_gaudi_" + name)(*arguments)
    if result < 0:
        raise GaudiError(result, library.ucx_gaudi_error().decode(errors="replace"))
    return result


def _length(number: int, what: str = "length") -> int:
    """A whole number that is not negative; ctypes would take others for something else."""
    number = operator.index(number)
    if number < 0:
        raise ValueError(f"{what} is {number}: it cannot be negative")
    return number


def _card(card: CardName) -> Optional[bytes]:
    if card is None or isinstance(card, str):
        return None if card is None else card.encode()
    return str(_length(card, "card")).encode()


def _bytes(data: AnyBuffer) -> memoryview:
    view = memoryview(data)  # type: ignore[arg-type, unused-ignore]
    # One without bytes cannot be cast if it has several dimensions.
    return view.cast("B") if view.nbytes else memoryview(b"")


class Memory:
    """Memory of a Gaudi, freed by `free()`, at the end of a `with` block, or with the object."""

    def __init__(self, length: int, card: CardName = None) -> None:
        length = _length(length)
        address = ctypes.c_void_p()
        _call("alloc", _card(card), length, ctypes.byref(address))
        self._address: int = address.value or 0
        self._length = length
        self._free = weakref.finalize(self, _call, "free", self._address)

    @property
    def address(self) -> int:
        """Its address, for UCX."""
        return self._address

    def __len__(self) -> int:
        return self._length

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def __repr__(self) -> str:
        return f"<Gaudi memory at {self._address:#x}, {self._length} bytes>"

    def free(self) -> None:
        """Frees it; a second call does nothing."""
        self._free()

    def _at(self, offset: int, length: int) -> int:
        offset, length = operator.index(offset), operator.index(length)
        if not self._free.alive:
            raise ValueError("this memory was freed")
        if offset < 0 or length < 0 or offset + length > self._length:
            raise ValueError(f"{length} bytes at {offset} are not inside {self._length} bytes")
        return self._address + offset

    def write(self, data: AnyBuffer, offset: int = 0) -> None:
        """Copies `data` into it: bytes, an array of numpy, or whatever else has a contiguous buffer."""
        view = _bytes(data)
        there = self._at(offset, len(view))
        if isinstance(data, bytes):
            _call("copy", there, ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p), len(view))
            return
        host = bytearray(view) if view.readonly else view
        _call("copy", there, ctypes.addressof(ctypes.c_char.from_buffer(host)) if len(view) else None, len(view))

    def read(self, length: Optional[int] = None, offset: int = 0) -> bytes:
        """A copy of its bytes; all from `offset` on, if no length is given."""
        data = bytearray(_length(self._length - offset if length is None else length))
        self.read_into(data, offset)
        return bytes(data)

    def read_into(self, data: AnyBuffer, offset: int = 0) -> None:
        """Copies as many bytes as `data` has into it: a bytearray, an array of numpy, what can be written."""
        view = _bytes(data)
        here = self._at(offset, len(view))
        if len(view):
            _call("copy", ctypes.addressof(ctypes.c_char.from_buffer(view)), here, len(view))

    def copy_from(self, other: Memory, length: Optional[int] = None, offset: int = 0, other_offset: int = 0) -> None:
        """Copies from other Gaudi memory, of the same card or of another."""
        count = min(self._length - offset, len(other) - other_offset) if length is None else length
        _call("copy", self._at(offset, count), other._at(other_offset, count), count)

    def fill(self, byte: int, offset: int = 0, length: Optional[int] = None) -> None:
        """Sets bytes to a value from 0 to 255; all from `offset` on, if no length is given."""
        count = self._length - offset if length is None else length
        if not 0 <= operator.index(byte) <= 255:
            raise ValueError(f"{byte} is no byte: give 0 to 255")
        _call("fill", self._at(offset, count), byte, count)

    def export(self, offset: int = 0, length: Optional[int] = None) -> DmaBuf:
        """A dma-buf for other drivers. It keeps the memory in use until it is closed."""
        count = self._length - offset if length is None else length
        fd, at = ctypes.c_int(), ctypes.c_uint64()
        _call("export_dmabuf", self._at(offset, count), count, ctypes.byref(fd), ctypes.byref(at))
        return DmaBuf(fd.value, at.value)


class Imported(Memory):
    """A part of a dma-buf, mapped for a card; unmapped by `free()`, at the end of a `with` block, or with the object.

    It is copied like memory of that card, from and to host memory or other memory of the card. It is not Gaudi memory to
    UCX, and cannot be filled or exported.
    """

    def __init__(self, fd: int, offset: int = 0, length: Optional[int] = None, card: CardName = None) -> None:
        count = os.fstat(fd).st_size - offset if length is None else length
        if offset < 0 or count < 0:
            raise ValueError(f"{count} bytes at {offset} are not inside the dma-buf")
        address = ctypes.c_void_p()
        _call("import_dmabuf", _card(card), fd, offset, count, ctypes.byref(address))
        self._address = address.value or 0
        self._length = count
        self._free = weakref.finalize(self, _call, "unmap_dmabuf", self._address)

    def __repr__(self) -> str:
        return f"<dma-buf mapped at {self._address:#x}, {self._length} bytes>"


def import_dmabuf(fd: int, offset: int = 0, length: Optional[int] = None, card: CardName = None) -> Imported:
    """Maps a dma-buf, whoever exported it, for a card, where the driver imports dma-bufs; all of it from `offset` on, if no
    length is given. The descriptor stays the caller's, who may close it."""
    return Imported(fd, offset, length, card)


def cards() -> List[Card]:
    """The cards that `ucx-gaudi info` shows; none is opened. No driver library, or no card, is a GaudiError."""
    tools = [folder.parents[1] / "bin" / "ucx-gaudi" for folder in _folders()]
    tool = next((str(path) for path in tools if path.exists()), None) or shutil.which("ucx-gaudi")
    if tool is None:
        raise FileNotFoundError("ucx-gaudi is not beside this module, and not on PATH: install all of it")
    said = subprocess.run([tool, "info", "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    report = json.loads(said.stdout)
    if "error" in report:
        error = report["error"]
        raise GaudiError(ErrorCode.DEVICE_NOT_FOUND, f"{error['what']}: {error['remedy']}")
    keys = ("index", "module_id", "bus_id", "generation", "memory_bytes", "software")
    return [Card(*(card[key] for key in keys)) for card in report["cards"]]


def alloc(length: int, card: CardName = None) -> Memory:
    """Allocates on a card: by index (0 or "0"), "module:2" or PCI address; by default as UCX_GAUDI_COPY_DEVICE says."""
    return Memory(length, card)


def is_device_memory(address: int, length: int = 1) -> bool:
    """Whether all of this is Gaudi memory of this process."""
    return _call("is_device_memory", address, length) == 1


def flush_peer_writes(address: int) -> bool:
    """To be called after a transfer into Gaudi memory and before a kernel, a graph or a copy of your own reads it: a network
    card's write may be acknowledged before the card's engines see it. `address` is any of that card's memory; one call
    serves for all that was transferred before it. False if the driver has no such call, and acknowledges no write early."""
    return _call("flush_peer_writes", address) == 0


def error_string(code: int) -> str:
    """What a code means and what to do, in general; the text of a `GaudiError` says more."""
    text: bytes = _loaded().ucx_gaudi_error_string(code)
    return text.decode()


def lend(fd: int) -> None:
    """Lends UCX a card that this program has opened (the descriptor of hlthunk_open)."""
    _call("lend", fd)


def take_back(fd: int) -> None:
    """Ends the loan; to be called before the card is closed."""
    _call("take_back", fd)

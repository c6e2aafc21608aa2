"""Gaudi memory through UCXX: host → card → card → host over a listener, every byte checked (docs/nixl.md)."""

import asyncio
import ctypes

import ucxx

from gaudi_memory import GaudiMemory

LENGTH = (1 << 20) + 3


class Array:
    """What UCXX takes for memory of a device: an address that the CPU cannot use."""

    def __init__(self, address):
        data = {"shape": (LENGTH,), "strides": None, "typestr": "|u1", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = data


async def main():
    # The libucp that UCXX has loaded.
    gaudi = GaudiMemory(ctypes.CDLL("libucp.so.0"))
    one, two = (Array(gaudi.allocate(LENGTH)) for _ in range(2))
    pattern = bytearray((i * 7 + (i >> 8)) & 0xFF for i in range(LENGTH))
    back, ended = bytearray(LENGTH), asyncio.Event()

    async def serve(endpoint):
        await endpoint.recv(one)
        await endpoint.send(one)
        await endpoint.recv(back)
        ended.set()

    listener = ucxx.create_listener(serve)
    endpoint = await ucxx.create_endpoint("127.0.0.1", listener.port)
    await endpoint.send(pattern)
    await endpoint.recv(two)
    await endpoint.send(two)
    await ended.wait()
    await endpoint.close()
    assert back == pattern, "wrong bytes"
    version = ".".join(map(str, ucxx.get_ucx_version()))
    print(f"{LENGTH} bytes through UCXX {ucxx.__version__} on UCX {version}: every byte is right")


asyncio.run(main())

"""The ring of mpi_ring.c in Python: Gaudi memory through mpi4py, every byte checked (docs/mpi.md)."""

import ctypes

from mpi4py import MPI

from gaudi_memory import GaudiMemory

LENGTH = (1 << 20) + 3

world = MPI.COMM_WORLD
rank, size = world.rank, world.size
# The libucp that Open MPI has loaded already.
gaudi = GaudiMemory(ctypes.CDLL("libucp.so.0"))
# mpi4py 4 calls it buffer, mpi4py 3 memory.
buffer = MPI.buffer if hasattr(MPI, "buffer") else MPI.memory
mine, other = (buffer.fromaddress(gaudi.allocate(LENGTH), LENGTH) for _ in range(2))


def pattern(seed):
    return bytearray((seed * 31 + i * 7) & 0xFF for i in range(LENGTH))


def copy(to, source):
    """To and from the card: a message to myself."""
    world.Sendrecv([source, MPI.BYTE], rank, recvbuf=[to, MPI.BYTE], source=rank)


copy(mine, pattern(rank))
world.Sendrecv([mine, MPI.BYTE], (rank + 1) % size, recvbuf=[other, MPI.BYTE], source=(rank - 1) % size)
back = bytearray(LENGTH)
copy(back, other)
assert back == pattern((rank - 1) % size), f"rank {rank}: wrong bytes"
if rank == 0:
    print(f"{size} ranks: every byte is right")

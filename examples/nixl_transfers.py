#!/usr/bin/env python3
"""Every kind of NIXL transfer between two processes, or two agents of one: READ and WRITE, host and Gaudi memory on either side, many sizes.

Every byte is compared, also between and around the places that transfers write. The last line counts the transfers, and
those that went wrong; the lines before it say how.

    python3 nixl_transfers.py --sizes 8,4096,46081,1048576,67108864

Environment: as for kv_cache.py. With UCX_PROTO_EMULATION_ENABLE=n, UCX carries out nothing by messages to the peer's
program: what has no lane fails. With --one-process, transfers between two host memories are left out: UCX emulates these.
"""

import argparse
import os
import random
import socket
import sys
import threading
from typing import NamedTuple

from gaudi_memory import GaudiMemory, libucp
from kv_cache import Channel, descriptors, going_on

GUARD = 4096


class Transfer(NamedTuple):
    """What process 0 asks for; `source` and `target` are offsets into the regions of either side."""

    operation: str
    here: str
    there: str
    size: int
    source: int
    target: int

    @property
    def receiver(self):
        """Which process, and which of its memories."""
        return (1, self.there) if self.operation == "WRITE" else (0, self.here)

    def __str__(self):
        return f"{self.operation}, {self.here} here, {self.there} there, {self.size} bytes"


def plan(sizes, one_process):
    """All transfers, each with a place of its own at the receiver; and the bytes that a region needs."""
    longest = max(sizes) + 64
    transfers, free = [], {}
    for operation in ("WRITE", "READ"):
        for here in ("DRAM", "VRAM"):
            for there in ("DRAM", "VRAM"):
                if one_process and here == there == "DRAM":
                    continue
                for size in sizes:
                    transfer = Transfer(operation, here, there, size, len(transfers), 0)
                    target = free.get(transfer.receiver, longest + GUARD)
                    free[transfer.receiver] = target + size + GUARD
                    transfers.append(transfer._replace(target=target))
    return transfers, max(free.values())


def content(rank, length):
    return random.Random(rank).randbytes(length)


def move(agent, operation, local, remote, length, peer):
    """One transfer; both sides are (memory, address)."""
    sides = [descriptors("transfer", memory, [(at, length, 0)]) for memory, at in (local, remote)]
    handle = agent.initialize_xfer(operation, *sides, peer)
    moving = going_on(agent.transfer(handle))
    while moving:
        moving = going_on(agent.check_xfer_state(handle))
    agent.release_xfer_handle(handle)


class End:
    """An agent with a region in host and one in Gaudi memory, both with the content of its process."""

    def __init__(self, rank, length):
        from nixl_cu12 import nixl_agent, nixl_agent_config

        self.rank, self.length = rank, length
        self.agent = nixl_agent(f"end {rank}", nixl_agent_config(backends=["UCX"]))
        self.memory = GaudiMemory(libucp())
        self.host, self.read_back = bytearray(content(rank, length)), bytearray(length)
        host, self.read_back_at = (GaudiMemory.address_of(each) for each in (self.host, self.read_back))
        self.regions = {"DRAM": host, "VRAM": self.memory.allocate(length)}
        all_host = [(host, length, 0, ""), (self.read_back_at, length, 0, "")]
        gaudi = [(self.regions["VRAM"], length, 0, "")]
        self.registered = [
            self.agent.register_memory(descriptors("registration", memory, those))
            for memory, those in (("DRAM", all_host), ("VRAM", gaudi))
        ]
        self.copy("WRITE", host)

    def copy(self, operation, host):
        """Between host memory and the region on the card, all of it: a transfer to the agent itself."""
        move(self.agent, operation, ("DRAM", host), ("VRAM", self.regions["VRAM"]), self.length, self.agent.name)

    def wrong(self, transfers):
        """What arrived here, and is not what was sent."""
        self.copy("READ", self.read_back_at)
        regions = {"DRAM": memoryview(self.host), "VRAM": memoryview(self.read_back)}
        mine, theirs = (memoryview(content(rank, self.length)) for rank in (self.rank, 1 - self.rank))
        problems = []
        for memory, region in regions.items():
            end = 0
            for each in transfers:
                if each.receiver != (self.rank, memory):
                    continue
                if region[end : each.target] != mine[end : each.target]:
                    problems.append(f"{each}: bytes before its target have changed")
                end = each.target + each.size
                if region[each.target : end] != theirs[each.source : each.source + each.size]:
                    problems.append(f"{each}: wrong bytes")
            if region[end:] != mine[end:]:
                problems.append(f"{memory} of process {self.rank}: bytes behind the last target have changed")
        return problems

    def close(self, peer):
        self.agent.remove_remote_agent(peer)
        for registered in self.registered:
            self.agent.deregister_memory(registered)
        self.memory.free()


def side(rank, sock, options):
    sizes = [int(size) for size in options.sizes.split(",")]
    transfers, length = plan(sizes, options.one_process)
    channel, end = Channel(sock), End(rank, length)
    channel.send(metadata=end.agent.get_agent_metadata().hex(), regions=end.regions)
    other = channel.receive_any()
    peer = end.agent.add_remote_agent(bytes.fromhex(other["metadata"]))
    peer = peer.decode() if isinstance(peer, bytes) else peer
    if rank == 1:
        # It does nothing meanwhile.
        channel.receive("moved")
        channel.send(problems=end.wrong(transfers))
        end.close(peer)
        return 0
    problems = []
    for each in transfers:
        mine, theirs = (each.source, each.target) if each.operation == "WRITE" else (each.target, each.source)
        local, remote = (each.here, end.regions[each.here] + mine), (each.there, other["regions"][each.there] + theirs)
        try:
            move(end.agent, each.operation, local, remote, each.size, peer)
        except Exception as error:  # NIXL's have nothing else in common
            problems.append(f"{each}: {error!r}")
    channel.send(moved=True)
    problems += end.wrong(transfers) + channel.receive("problems")
    for problem in problems:
        print(problem)
    print(f"{len(transfers)} transfers, {len(problems)} problems", flush=True)
    end.close(peer)
    return 1 if problems else 0


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--sizes", default="8,4096,46081,1048576,67108864", help="bytes, separated by commas")
    arguments.add_argument("--one-process", action="store_true", help="two agents in one process")
    options = arguments.parse_args()
    ends = socket.socketpair()
    if options.one_process:
        other = threading.Thread(target=side, args=(1, ends[1], options), daemon=True)
        other.start()
        code = side(0, ends[0], options)
        other.join()  # its agent has threads of its own
        return code
    # Before anything of UCX is loaded.
    child = os.fork()
    rank = 0 if child else 1
    ends[1 - rank].close()
    code = side(rank, ends[rank], options)
    if child:
        _, status = os.waitpid(child, 0)
        code = code or int(status != 0)
    return code


if __name__ == "__main__":
    sys.exit(main())

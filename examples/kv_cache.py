#!/usr/bin/env python3
"""Hands a KV cache in Gaudi memory from a prefill to a decode process, as vLLM does it with NIXL.

Each process has, for every layer, one allocation that holds all blocks, and registers it with its NIXL
agent as VRAM. The receiver (READ) or the sender (WRITE) then moves a list of blocks of each layer to
other places of the peer's cache, and a notification says when a layer is complete. Every byte is checked.

    python3 kv_cache.py --layers 4 --blocks 64 --block-bytes 46080 --operation READ

With --framework each process also plays the framework (synapse_memory.py): it acquires a card through Synapse, the cache
is memory of Synapse's, and Synapse fills it and reads it back; NIXL is only told the addresses (docs/frameworks.md).

With --replay the calls of vLLM's connector are replayed at the size of a real model, by every way (kv_replay.py).

Environment: UCX_PLUGIN_PATH and a driver library as for every use of ucx-gaudi (docs/rdma.md), NIXL on
PYTHONPATH. Which way the bytes go is up to UCX: UCX_TLS=rc,gaudi_cpy for InfiniBand alone.
"""

import argparse
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import types

from gaudi_memory import GaudiMemory, card_words, libucp, ucx_gaudi
from synapse_memory import Synapse, SynapseMemory, load_synapse

try:
    import numpy  # noqa: F401
except ImportError:
    # NIXL imports it to recognise its arrays, and needs it for nothing else if it gets lists of its own.
    sys.modules["numpy"] = types.SimpleNamespace(ndarray=type("ndarray", (), {}))


def descriptors(kind, memory, tuples):
    """A list of NIXL's own: for registration with a fourth element in each tuple, a text."""
    from nixl_cu12 import _bindings as nixl

    memory = {"VRAM": nixl.VRAM_SEG, "DRAM": nixl.DRAM_SEG}[memory]
    made = {"registration": nixl.nixlRegDList, "transfer": nixl.nixlXferDList}[kind](memory)
    for each in tuples:
        made.addDesc(each)
    return made


class Channel:
    """Messages between the two processes, a line of JSON each; metadata as hexadecimal."""

    def __init__(self, sock):
        self.source, self.target = sock.makefile("r"), sock.makefile("w")

    def send(self, **message):
        self.target.write(json.dumps(message) + "\n")
        self.target.flush()

    def receive_any(self):
        """The next message; nothing if the other process has ended."""
        try:
            line = self.source.readline()
        except ConnectionError:
            line = ""
        return json.loads(line) if line else {}

    def receive(self, name):
        message = self.receive_any()
        if not message:
            raise SystemExit(f"the other process ended before it said `{name}`")
        return message[name]


class Node:
    """An agent with a cache in Gaudi memory."""

    def __init__(self, name, options):
        from nixl_cu12 import nixl_agent, nixl_agent_config

        self.name, self.options = name, options
        self.layer_bytes = options.blocks * options.block_bytes
        self.synapse = Synapse() if options.framework == "acquired" else None
        if options.framework == "loaded":
            load_synapse()
        self.agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        if options.framework:
            self.synapse = self.synapse or Synapse()
            # An odd place for the first layer: tensors begin anywhere in the pool.
            self.memory = SynapseMemory(self.synapse, options.layers * (self.layer_bytes + 128) + 640)
            self.memory.allocate(513)
            print(f"{name}: {self.synapse.version()}, {self.synapse.name} in slot {self.synapse.module()}", flush=True)
        else:
            self.memory = GaudiMemory(libucp())
        self.layers = [self.memory.allocate(self.layer_bytes) for _ in range(options.layers)]
        started = time.perf_counter()
        regions = [(address, self.layer_bytes, 0, "") for address in self.layers]
        self.registered = self.agent.register_memory(descriptors("registration", "VRAM", regions))
        self.registration_us = (time.perf_counter() - started) * 1e6 / options.layers
        # Host memory, by which the cache is filled and read back.
        self.host = bytearray(self.layer_bytes)
        self.host_address = GaudiMemory.address_of(self.host)
        host = [(self.host_address, self.layer_bytes, 0, "")]
        self.host_registered = self.agent.register_memory(descriptors("registration", "DRAM", host))

    def wait(self, handle):
        """Drives a transfer to its end."""
        moving = going_on(self.agent.transfer(handle))
        while moving:
            moving = going_on(self.agent.check_xfer_state(handle))

    def copy(self, operation, layer):
        """Between our own host memory and a layer."""
        agent = self.agent
        host = descriptors("transfer", "DRAM", [(self.host_address, self.layer_bytes, 0)])
        cache = descriptors("transfer", "VRAM", [(self.layers[layer], self.layer_bytes, 0)])
        handle = agent.initialize_xfer(operation, host, cache, self.name)
        self.wait(handle)
        agent.release_xfer_handle(handle)

    def fill(self, seed):
        for layer in range(self.options.layers):
            data = content(seed, layer, self.layer_bytes)
            if self.synapse:
                self.memory.write(self.layers[layer], data)
                continue
            self.host[:] = data
            self.copy("WRITE", layer)

    def arrived(self):
        """What peers have written is to be read by the card itself: by a kernel, or a copy of the framework's."""
        if self.synapse and not self.options.no_flush:
            # With the plugin's own copies, as NIXL makes them, this is not needed.
            ucx_gaudi().flush_peer_writes(self.layers[0])

    def read(self, layer):
        if self.synapse:
            return self.memory.read(self.layers[layer], self.layer_bytes)
        self.host[:] = bytes(self.layer_bytes)
        self.copy("READ", layer)
        return self.host

    def notifications(self, count, deadline):
        """Waits for so many messages of peers."""
        messages = []
        while len(messages) < count:
            if time.monotonic() > deadline:
                raise SystemExit(f"{len(messages)} of {count} notifications")
            for some in self.agent.get_new_notifs().values():
                messages += some
            # NIXL has a thread that polls; one more would take the processor from others.
            time.sleep(0.001)
        return messages


def content(seed, layer, length):
    return random.Random(f"{seed} {layer}").randbytes(length)


def places(options):
    """Which block of the sender goes to which of the receiver, `descriptors` of them per layer."""
    there = list(range(options.blocks))
    random.Random(7).shuffle(there)
    here = [index % options.blocks for index in range(options.descriptors or options.blocks)]
    return here, [there[index] for index in here]


def going_on(state):
    if state not in ("PROC", "DONE"):
        raise RuntimeError(f"the transfer is in state {state}")
    return state == "PROC"


def move(node, peer, remote_layers, options, begin=None, until=0):
    """Moves all layers, in so many rounds and until then; returns the seconds of the quickest round and of its preparation.

    `begin` is called when all is prepared. For the seconds of a transfer that fails: None and the error.
    """
    agent, size = node.agent, options.block_bytes
    source, target = places(options)
    mine, theirs = (target, source) if options.operation == "READ" else (source, target)
    handles = []
    started = time.perf_counter()
    for layer in range(options.layers):
        here, there = node.layers[layer], remote_layers[layer]
        near = [(here + block * size, size, 0) for block in mine]
        far = [(there + block * size, size, 0) for block in theirs]
        near, far = (descriptors("transfer", "VRAM", side) for side in (near, far))
        notice = f"layer {layer}".encode()
        handles.append(agent.initialize_xfer(options.operation, near, far, peer, notice))
    prepared = time.perf_counter() - started
    if begin:
        begin()
    moved = []
    try:
        while len(moved) < options.rounds or time.monotonic() < until:
            started = time.perf_counter()
            waiting = [handle for handle in handles if going_on(agent.transfer(handle))]
            while waiting:
                waiting = [handle for handle in waiting if going_on(agent.check_xfer_state(handle))]
            moved.append(time.perf_counter() - started)
    except Exception as error:  # NIXL's have nothing else in common
        return None, error
    for handle in handles:
        agent.release_xfer_handle(handle)
    return min(moved), prepared


def verify(node, options):
    """The receiver's cache holds the sender's blocks where they should be, and its own elsewhere."""
    size = options.block_bytes
    source, target = places(options)
    for layer in range(options.layers):
        expected = bytearray(content("decode", layer, node.layer_bytes))
        sent = content("prefill", layer, node.layer_bytes)
        for here, there in zip(source, target):
            expected[there * size : (there + 1) * size] = sent[here * size : (here + 1) * size]
        if node.read(layer) != expected:
            raise SystemExit(f"layer {layer}: wrong bytes arrived")


def meet(file, seconds):
    """The socket to the other run, and our rank: who comes first makes the file and is 0."""
    sock, deadline = socket.socket(socket.AF_UNIX), time.monotonic() + seconds
    try:
        sock.bind(file)
    except OSError:
        while True:
            try:
                sock.connect(file)
                return sock, 1
            except OSError as error:
                if time.monotonic() > deadline:
                    raise SystemExit(f"{file}: nobody listens there; remove it ({error})")
                time.sleep(0.02)
    sock.listen(1)
    sock.settimeout(seconds)
    other = sock.accept()[0]
    os.unlink(file)
    return other, 0


def side(options):
    if options.meet:
        sock, options.rank = meet(options.meet, options.timeout)
    else:
        sock = socket.socket(fileno=options.channel)
    channel = Channel(sock)
    name = ["prefill", "decode"][options.rank]
    node = Node(name, options)
    node.fill(name)
    channel.send(metadata=node.agent.get_agent_metadata().hex())
    peer = node.agent.add_remote_agent(bytes.fromhex(channel.receive("metadata")))
    peer = peer.decode() if isinstance(peer, bytes) else peer
    channel.send(layers=node.layers)
    remote_layers = channel.receive("layers")
    active = 1 if options.operation == "READ" else 0
    deadline = time.monotonic() + options.timeout
    if options.rank == active:
        killing = {"begin": lambda: channel.send(moving=True), "until": deadline}
        seconds, extra = move(node, peer, remote_layers, options, **(killing if options.kill else {}))
        if options.kill:
            assert seconds is None, "transfers went on although the peer was dead"
            print(f"the peer died: NIXL reports {extra!r}", flush=True)
            # What is left of the transfer keeps the memory registered: nothing to clean up with.
            os._exit(0)
        count = options.layers * (options.descriptors or options.blocks)
        total = count * options.block_bytes
        print(
            f"{options.operation} {count} blocks of {options.block_bytes} bytes: "
            f"{seconds * 1e6 / count:.2f} us a block, {total / seconds / 1e9:.2f} GB/s ({card_words()}), "
            f"preparation {extra * 1e6 / count:.2f} us a block, "
            f"registration {node.registration_us:.0f} us a layer",
            flush=True,
        )
    elif options.kill:
        channel.receive("moving")
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        expected = sorted(options.rounds * [f"layer {layer}".encode() for layer in range(options.layers)])
        said = sorted(node.notifications(len(expected), deadline))
        assert said == expected, said
    channel.send(moved=True)
    channel.receive("moved")
    if options.rank == 1:
        node.arrived()
        verify(node, options)
        print("every byte is right", flush=True)
    channel.send(done=True)
    channel.receive("done")
    node.agent.remove_remote_agent(peer)
    node.agent.deregister_memory(node.registered)
    node.agent.deregister_memory(node.host_registered)
    node.memory.free()
    if node.synapse:
        node.synapse.destroy()


def main():
    if importlib.util.find_spec("nixl_cu12") is None:
        raise SystemExit("NIXL is not installed: pip install --no-deps nixl-cu12==1.5.1 numpy")
    if "--replay" in sys.argv:
        return importlib.import_module("kv_replay").main()
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--blocks", type=int, default=64, help="blocks of a layer")
    arguments.add_argument("--block-bytes", type=int, default=46080)
    arguments.add_argument("--descriptors", type=int, help="blocks to move per layer, if not each once")
    arguments.add_argument("--rounds", type=int, default=1, help="how often to move all; the quickest counts")
    arguments.add_argument("--operation", choices=["READ", "WRITE"], default="READ")
    arguments.add_argument("--framework", choices=["acquired", "loaded", "late"], help="what Synapse did before NIXL starts")
    arguments.add_argument("--no-flush", action="store_true", help="read without ucx_gaudi.flush_peer_writes()")
    arguments.add_argument("--timeout", type=float, default=120, help="seconds")
    arguments.add_argument("--kill", action="store_true", help="the passive process dies in between")
    arguments.add_argument("--via", help="RANK:COMMAND that starts this process, 1:nsenter -t PID -n")
    arguments.add_argument("--env", action="append", default=[], help="RANK:NAME=VALUE")
    arguments.add_argument("--meet", metavar="FILE", help="be one of the two: the other is a second run, which meets us at this socket")
    arguments.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments.add_argument("--channel", type=int, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.meet or options.rank is not None:
        return side(options)
    ends = socket.socketpair()
    children = []
    for rank, end in enumerate(ends):
        command = [sys.executable, *sys.argv, f"--rank={rank}", f"--channel={end.fileno()}"]
        if options.via and options.via.startswith(f"{rank}:"):
            command = options.via.split(":", 1)[1].split() + command
        mine = [it.split(":", 1)[1].split("=", 1) for it in options.env if it.startswith(f"{rank}:")]
        environment = {**os.environ, **dict(mine)}
        children.append(subprocess.Popen(command, env=environment, pass_fds=[end.fileno()]))
    for end in ends:
        end.close()
    codes = [child.wait() for child in children]
    if options.kill:
        passive = 0 if options.operation == "READ" else 1
        codes[passive] = 0 if codes[passive] == -signal.SIGKILL else 1
    if codes != [0, 0]:
        print(f"prefill ended with {codes[0]}, decode with {codes[1]}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

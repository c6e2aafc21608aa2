"""What vLLM's NIXL connector does with a KV cache, replayed at the size of a real model: `kv_cache.py --replay`.

A prefill engine holds the keys and values of all requests in Gaudi memory, K and V of each layer in a region of its own, blocks in
the order heads × tokens × head dimension. Decode engines read their requests, all at once, as vLLM has them do it:

1. each worker registers its regions (`register_memory`), and prepares one descriptor for each block of each region
   (`prep_xfer_dlist`), of its own memory once and of the peer's after the handshake;
2. for a request it picks descriptors by number (`make_prepped_xfer`), starts a READ with a notification, and polls;
3. the prefill engine frees the blocks of a request when all workers that read parts of it have notified.

With tensor parallelism of 1 for prefill and 2 for decode, each decode worker reads its half of the heads: half of each block. With --kill
the prefill engine dies in the middle of transfers and another one takes its place; the decode engines get errors, forget the old agent and
read everything from the new one. In the end every byte of every decode worker's cache is compared, also of blocks that nobody asked for.

    ucx-gaudi run --soft=3 --soft-rdma -- python3 examples/kv_cache.py --replay              # 2 GB by each way
    ucx-gaudi run --soft=3 -- python3 examples/kv_cache.py --replay --layers 2 --requests 4 --ways relay --kill
"""

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import time

from gaudi_memory import card_words, ucx_gaudi
from kv_cache import Channel, descriptors, going_on

BF16 = 2  # bytes
# Blocks beyond those of requests, which nobody may touch.
SPARE = 2

# How UCX is made to take a way. The software card's driver imports dma-bufs if told so; a real one does or does not.
WAYS = {
    "import": {"UCX_TLS": "^ib", "SOFT_GAUDI_LENIENT": "import"},
    "relay": {"UCX_TLS": "^ib", "SOFT_GAUDI_LENIENT": ""},
    "ipc": {"UCX_TLS": "^ib"},
    "hca": {"UCX_TLS": "rc,gaudi_cpy"},
    "staged": {"UCX_TLS": "^ib,gaudi_ipc"},
}

RANDOM = random.Random("cache").randbytes(4 << 20)


def content(seed, region, block, at, length):
    """Bytes of a block, from a place in it on: no two blocks have the same, nor two places of one."""
    start = random.Random(f"{seed} {region} {block}").randrange(len(RANDOM)) + at
    start %= len(RANDOM)
    found = RANDOM[start : start + length]
    while len(found) < length:
        found += RANDOM[: length - len(found)]
    return found


def pause():
    """NIXL has a thread that polls; one more would take the processor from others. vLLM looks once in a step."""
    time.sleep(0.0002)


class Worker:
    """One process of an engine: an agent, and its part of the cache."""

    def __init__(self, options):
        from nixl_cu12 import nixl_agent, nixl_agent_config

        self.options = options
        self.tp = {"prefill": options.prefill_tp, "decode": options.decode_tp}[options.role]
        heads = options.heads // self.tp
        self.block_bytes = heads * options.block_tokens * options.head_dim * BF16
        self.part = options.rank * self.block_bytes  # where it begins in a block of all heads
        self.blocks = options.blocks
        # An engine that is started again is another one: vLLM's names are random.
        self.agent = nixl_agent(f"{options.role}-{options.rank}-{os.getpid()}", nixl_agent_config(backends=["UCX"]))
        size = self.blocks * self.block_bytes
        try:
            self.memory = [ucx_gaudi().alloc(size) for _ in range(2 * options.layers)]
        except ucx_gaudi().GaudiError as error:
            raise SystemExit(f"{options.role} worker {options.rank}: {error}") from None
        self.regions = [memory.address for memory in self.memory]
        regions = [(address, size, 0, "") for address in self.regions]
        self.registered = self.agent.register_memory(descriptors("registration", "VRAM", regions))
        self.host = bytearray(size)
        self.mine = self.prepare("NIXL_INIT_AGENT", self.regions, self.block_bytes, 0, self.blocks)
        self.peer = self.theirs = None
        self.fill(options.seed)

    def prepare(self, agent, regions, block_bytes, part, blocks):
        """A descriptor for our part of each block; number of a block's: region × blocks + block."""
        each = ((base + block * block_bytes + part) for base in regions for block in range(blocks))
        listed = descriptors("transfer", "VRAM", [(address, self.block_bytes, 0) for address in each])
        return self.agent.prep_xfer_dlist(agent, listed)

    def finish(self, handle):
        """Drives a transfer to its end."""
        moving = going_on(self.agent.transfer(handle))
        while moving:
            moving = going_on(self.agent.check_xfer_state(handle))
        self.agent.release_xfer_handle(handle)

    def fill(self, seed):
        for region, memory in enumerate(self.memory):
            memory.write(self.expected(region, [(seed, block) for block in range(self.blocks)]))

    def expected(self, region, blocks):
        """What a region holds if its blocks are these: seed and number of each."""
        return b"".join(content(seed, region, block, self.part, self.block_bytes) for seed, block in blocks)

    def handshake(self):
        return {
            "metadata": self.agent.get_agent_metadata().hex(),
            "regions": self.regions,
            "block_bytes": self.block_bytes,
            "blocks": self.blocks,
            "card": card_words(),
        }

    def connect(self, peers, first):
        """Takes the place of an earlier peer, if any. Returns milliseconds until one block was there."""
        started = time.perf_counter()
        self.disconnect()
        there = peers[self.options.rank * len(peers) // self.tp]
        name = self.agent.add_remote_agent(bytes.fromhex(there["metadata"]))
        self.peer = name.decode() if isinstance(name, bytes) else name
        self.peer_blocks = there["blocks"]
        part = self.part % there["block_bytes"]
        self.theirs = self.prepare(self.peer, there["regions"], there["block_bytes"], part, self.peer_blocks)
        remote, local = first
        self.finish(self.agent.make_prepped_xfer("READ", self.mine, [local], self.theirs, [remote]))
        return (time.perf_counter() - started) * 1e3

    def disconnect(self):
        if self.theirs:
            self.agent.release_dlist_handle(self.theirs)
            self.agent.remove_remote_agent(self.peer)
            self.peer = self.theirs = None

    def start(self, number, remote, local):
        regions = range(len(self.regions))
        mine = [region * self.blocks + block for region in regions for block in local]
        theirs = [region * self.peer_blocks + block for region in regions for block in remote]
        notice = f"{number}:{self.tp}".encode()
        return self.agent.make_prepped_xfer("READ", self.mine, mine, self.theirs, theirs, notice)

    def read(self, requests):
        """All requests at once. Returns when it began and ended, and milliseconds of each request."""
        handles = [self.start(*request) for request in requests]
        began, waiting, times = time.monotonic(), [], []
        for handle in handles:
            waiting.append((handle, time.monotonic()))
            self.agent.transfer(handle)
        while waiting:
            still = []
            for handle, posted in waiting:
                if going_on(self.agent.check_xfer_state(handle)):
                    still.append((handle, posted))
                else:
                    times.append((time.monotonic() - posted) * 1e3)
                    self.agent.release_xfer_handle(handle)
            waiting = still
            pause()
        return {"began": began, "ended": time.monotonic(), "times": times}

    def read_until_failure(self, requests, deadline):
        """Reads again and again, until the peer is dead."""
        handles = [self.start(*request) for request in requests]
        error = None
        while not error:
            if time.monotonic() > deadline:
                raise SystemExit("transfers went on although the peer was dead")
            try:
                moving = [handle for handle in handles if going_on(self.agent.transfer(handle))]
                while moving:
                    pause()
                    moving = [handle for handle in moving if going_on(self.agent.check_xfer_state(handle))]
            except Exception as caught:  # NIXL's have nothing else in common
                error = caught
        for handle in handles:
            try:
                self.agent.release_xfer_handle(handle)
            except Exception as refused:
                print(f"a transfer that failed is not released: {refused!r}", file=sys.stderr)
        return repr(error)

    def notified(self, count, deadline):
        """Waits for so many notifications; returns them, sorted."""
        found = []
        while len(found) < count:
            if time.monotonic() > deadline:
                raise SystemExit(f"{len(found)} of {count} notifications")
            for some in self.agent.get_new_notifs().values():
                found += [notice.decode() for notice in some]
            pause()
        return sorted(found)

    def verify(self, moved, seed):
        """Compares every byte: `moved` has what was read to which block."""
        blocks = [(self.options.seed, block) for block in range(self.blocks)]
        for _, remotes, locals_ in moved:
            for remote, local in zip(remotes, locals_):
                blocks[local] = (seed, remote)
        for region, memory in enumerate(self.memory):
            memory.read_into(self.host)
            expected = self.expected(region, blocks)
            if self.host != expected:
                wrong = next(at for at, (here, there) in enumerate(zip(self.host, expected)) if here != there)
                raise SystemExit(f"region {region}, block {wrong // self.block_bytes}: wrong bytes")
        return len(self.memory) * len(self.host)

    def close(self):
        self.disconnect()
        self.agent.release_dlist_handle(self.mine)
        self.agent.deregister_memory(self.registered)
        for memory in self.memory:
            memory.free()


def serve(options):
    """A worker: does what the parent says, a line each."""
    channel = Channel(socket.socket(fileno=options.channel))
    worker = Worker(options)
    channel.send(ready=worker.handshake())
    while message := channel.receive_any():
        deadline = time.monotonic() + options.timeout
        for name, given in message.items():
            if name == "connect":
                channel.send(connected=worker.connect(*given))
            elif name == "read":
                channel.send(done=worker.read(given))
            elif name == "read_until_failure":
                channel.send(moving=True)
                channel.send(failed=worker.read_until_failure(given, deadline))
            elif name == "notified":
                channel.send(notices=worker.notified(given, deadline))
            elif name == "verify":
                channel.send(verified=worker.verify(*given))
            elif name == "close":
                worker.close()
                return 0
    return 0


class Engine:
    """The workers of a prefill or decode engine, and what we say to them."""

    def __init__(self, role, tp, blocks, seed, environment, options):
        self.children, self.channels = [], []
        for rank in range(tp):
            ours, theirs = socket.socketpair()
            words = [f"--role={role}", f"--rank={rank}", f"--blocks={blocks}", f"--seed={seed}"]
            command = [sys.executable, *sys.argv, *words, f"--channel={theirs.fileno()}"]
            self.children.append(subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()]))
            theirs.close()
            self.channels.append(Channel(ours))

    def ready(self):
        return self.hear("ready")

    def say(self, **message):
        for channel in self.channels:
            channel.send(**message)

    def hear(self, name):
        return [channel.receive(name) for channel in self.channels]

    def kill(self):
        for child in self.children:
            child.send_signal(signal.SIGKILL)
            child.wait()

    def close(self):
        self.say(close=True)
        codes = [child.wait() for child in self.children]
        if any(codes):
            raise SystemExit(f"workers ended with {codes}")


def plan(options):
    """For each decode engine its requests: number, blocks of the prefill engine, blocks of its own."""
    order = list(range(options.requests * options.blocks_per_request))
    random.Random(7).shuffle(order)
    engines = [[] for _ in range(options.decoders)]
    for number in range(options.requests):
        own = engines[number % options.decoders]
        remote = [order.pop() for _ in range(options.blocks_per_request)]
        first = len(own) * options.blocks_per_request
        own.append((number, remote, list(range(first, first + options.blocks_per_request))))
    for own in engines:
        # Blocks of an engine that has run for a while lie anywhere.
        places = list(range(sum(len(local) for _, _, local in own) + SPARE))
        random.Random(8).shuffle(places)
        own[:] = [(number, remote, [places[block] for block in local]) for number, remote, local in own]
    return engines


def replay(way, options):
    """All of it by one way; returns the row of the table."""
    environment = {**os.environ, **WAYS[way]}
    if options.kill:
        # A dead peer's memory may still be there: the keep-alive finds out.
        environment.setdefault("UCX_KEEPALIVE_INTERVAL", "1s")
    requests = plan(options)
    blocks = options.requests * options.blocks_per_request + SPARE

    def prefill_engine(seed):
        return Engine("prefill", options.prefill_tp, blocks, seed, environment, options)

    prefill = prefill_engine("prefill 1")
    decode = []
    for number, own in enumerate(requests):
        size = len(own) * options.blocks_per_request + SPARE
        decode.append(Engine("decode", options.decode_tp, size, f"decode {number}", environment, options))
    peers, seed = prefill.ready(), "prefill 1"
    for engine in decode:
        engine.ready()

    def connect():
        for engine, own in zip(decode, requests):
            engine.say(connect=[peers, [own[0][1][0], own[0][2][0]]])
        return [ms for engine in decode for ms in engine.hear("connected")]

    first = connect()
    if options.kill:
        for engine, own in zip(decode, requests):
            engine.say(read_until_failure=own)
        for engine in decode:
            engine.hear("moving")
        prefill.kill()
        errors = {error for engine in decode for error in engine.hear("failed")}
        print(f"{way}: the prefill engine was killed, NIXL reports {', '.join(sorted(errors))}", flush=True)
        seed = "prefill 2"
        prefill = prefill_engine(seed)
        peers = prefill.ready()
        first = connect()
    for engine, own in zip(decode, requests):
        engine.say(read=own)
    done = [one for engine in decode for one in engine.hear("done")]
    # Each prefill worker serves its share of each decode engine's workers.
    readers = options.decode_tp // options.prefill_tp
    prefill.say(notified=options.requests * readers)
    expected = sorted(readers * [f"{number}:{options.decode_tp}" for number in range(options.requests)])
    for notices in prefill.hear("notices"):
        assert notices == expected, notices
    for engine, own in zip(decode, requests):
        engine.say(verify=[own, seed])
    compared = sum(size for engine in decode for size in engine.hear("verified"))
    for engine in [*decode, prefill]:
        engine.close()
    seconds = max(one["ended"] for one in done) - min(one["began"] for one in done)
    times = sorted(ms for one in done for ms in one["times"])
    moved = options.requests * options.blocks_per_request * block_bytes(options) * 2 * options.layers
    return {
        "way": way,
        "first block ms": f"{max(first):.1f}",
        "request ms (median, most)": f"{times[len(times) // 2]:.0f}, {times[-1]:.0f}",
        "GB/s": f"{moved / seconds / 1e9:.2f}",
        "card": peers[0]["card"],
        "bytes compared": str(compared),
    }


def block_bytes(options):
    return options.heads * options.block_tokens * options.head_dim * BF16


def print_table(rows):
    names = list(rows[0])
    widths = [max(len(row[name]) for row in [*rows, {name: name for name in names}]) for name in names]
    for row in [{name: name for name in names}, *rows]:
        print("  ".join(row[name].ljust(width) for name, width in zip(names, widths)).rstrip())


def has_hca():
    software = "libibverbs" in os.environ.get("LD_PRELOAD", "")
    return software or (os.path.isdir("/sys/class/infiniband") and bool(os.listdir("/sys/class/infiniband")))


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--replay", action="store_true", help="this")
    arguments.add_argument("--layers", type=int, default=32)
    arguments.add_argument("--heads", type=int, default=8, help="KV heads")
    arguments.add_argument("--head-dim", type=int, default=128)
    arguments.add_argument("--block-tokens", type=int, default=128)
    arguments.add_argument("--requests", type=int, default=64)
    arguments.add_argument("--blocks-per-request", type=int, default=2)
    arguments.add_argument("--prefill-tp", type=int, default=1, help="workers of the prefill engine, a card each")
    arguments.add_argument("--decode-tp", type=int, default=2, help="workers of a decode engine, a card each")
    arguments.add_argument("--decoders", type=int, default=1, help="decode engines")
    arguments.add_argument("--ways", help="import, relay (software cards), ipc (real cards), hca, staged; default: all there are")
    arguments.add_argument("--kill", action="store_true", help="the prefill engine dies and is started again")
    arguments.add_argument("--timeout", type=float, default=120, help="seconds")
    for internal, kind in [("role", str), ("rank", int), ("blocks", int), ("seed", str), ("channel", int)]:
        arguments.add_argument(f"--{internal}", type=kind, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.decode_tp % options.prefill_tp or options.heads % options.decode_tp:
        arguments.error("--decode-tp is a multiple of --prefill-tp and divides --heads")
    if options.requests < options.decoders:
        arguments.error("--requests: at least one for each decode engine")
    if options.role:
        try:
            return serve(options)
        except ConnectionError:
            return 1  # another worker has failed, and said why
    if not hasattr(sys.modules["numpy"], "__version__"):
        raise SystemExit("NIXL's make_prepped_xfer needs numpy: pip install numpy")
    cards = options.prefill_tp + options.decoders * options.decode_tp
    ipc = ["import", "relay"] if "SOFT_GAUDI_NODE" in os.environ else ["ipc"]
    ways = options.ways.split(",") if options.ways else [*ipc, "hca", "staged"]
    for way in ways:
        if way not in WAYS:
            arguments.error(f"--ways: {way} is none of {', '.join(WAYS)}")
    size = block_bytes(options)
    print(
        f"{options.layers} layers × {options.heads} KV heads × {options.head_dim}, bf16, blocks of {options.block_tokens} tokens "
        f"({size} bytes of K and of V in a layer); {options.requests} requests of {options.blocks_per_request} blocks; "
        f"prefill TP {options.prefill_tp}, {options.decoders} decode TP {options.decode_tp}: {cards} cards",
        flush=True,
    )
    rows = []
    for way in ways:
        if way == "hca" and not has_hca():
            print("hca: not tried, there is no HCA here (ucx-gaudi run --soft-rdma has one)", flush=True)
            continue
        rows.append(replay(way, options))
    if rows:
        print_table(rows)
        print("every byte is right")
    return 0

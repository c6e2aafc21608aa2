"""Plays a framework on Gaudi, as PyTorch does it: acquires a card through Synapse and allocates on it.

Only Synapse's C interface is called, through ctypes; nothing of ucx-gaudi, UCX or NIXL. The same calls work on
the vendor's libSynapse.so and on the software one (docs/frameworks.md). The addresses are what a framework hands
to NIXL; in PyTorch they come from `habana_frameworks.torch.utils.experimental._data_ptr(tensor)`.
"""

import ctypes as c

TO_DEVICE, TO_HOST = 0, 1  # synDmaDir
TYPES = {"gaudi2": 4, "gaudi3": 5}  # synDeviceType
FAIL, BUSY = 26, 22  # what Synapse says when memory is exhausted, and when an event has not happened

u32, u64, handle = c.c_uint32, c.c_uint64, c.c_void_p


def load_synapse():
    """What `import habana_frameworks.torch` does; a card is acquired when one is first used."""
    return c.CDLL("libSynapse.so", mode=c.RTLD_GLOBAL)


class Synapse:
    """The card of this process: there is one at most."""

    def __init__(self):
        self.library = load_synapse()
        self.call("synInitialize")
        device = u32()
        statuses = {name: self.try_call("synDeviceAcquireByDeviceType", c.byref(device), kind) for name, kind in TYPES.items()}
        acquired = [name for name, status in statuses.items() if status == 0]
        if not acquired:
            raise SystemExit(f"no card: synDeviceAcquireByDeviceType gives {statuses}")
        self.name = acquired[0]
        self.stream, self.event = handle(), handle()
        self.call("synStreamCreateGeneric", c.byref(self.stream), 0, 0)
        self.call("synEventCreate", c.byref(self.event), 0, 0)

    def try_call(self, name, *arguments):
        return getattr(self.library, name)(*arguments)

    def call(self, name, *arguments):
        status = self.try_call(name, *arguments)
        if status != 0:
            raise RuntimeError(f"{name}: status {status}")

    def version(self):
        text = c.create_string_buffer(256)
        self.call("synDriverGetVersion", text, len(text))
        return text.value.decode()

    def module(self):
        """The slot of the card: `deviceId` of synDeviceInfo."""
        info = c.create_string_buffer(56)
        self.call("synDeviceGetInfo", 0, info)
        return int.from_bytes(info.raw[44:48], "little")

    def free_bytes(self):
        free, total = u64(), u64()
        self.call("synDeviceGetMemoryInfo", 0, c.byref(free), c.byref(total))
        return free.value

    def release(self):
        self.call("synDeviceRelease", 0)

    def destroy(self):
        self.call("synDestroy")


class SynapseMemory:
    """One pool, as PyTorch's allocator has it, with tensors inside; and host memory to fill and read them."""

    ALIGNMENT = 128

    def __init__(self, synapse, pool_bytes):
        self.synapse, self.used, self.size = synapse, 0, pool_bytes
        pool = u64()
        synapse.call("synDeviceMalloc", 0, u64(pool_bytes), u64(0), 0, c.byref(pool))
        self.pool = pool.value
        self.host, self.host_bytes = None, 0

    def allocate(self, length):
        """The address of a tensor. It is aligned to 128 bytes and no more."""
        begin = -(-self.used // self.ALIGNMENT) * self.ALIGNMENT
        if begin + length > self.size:
            raise MemoryError(f"{length} bytes of {self.size - begin}")
        self.used = begin + length
        return self.pool + begin

    def staging(self, length):
        if length > self.host_bytes:
            if self.host:
                self.synapse.call("synHostFree", 0, self.host, 0)
            self.host, self.host_bytes = handle(), length
            self.synapse.call("synHostMalloc", 0, u64(length), 0, c.byref(self.host))
        return (c.c_ubyte * length).from_address(self.host.value)

    def copy(self, source, length, target, direction):
        synapse = self.synapse
        synapse.call("synMemCopyAsync", synapse.stream, u64(source), u64(length), u64(target), direction)
        synapse.call("synEventRecord", synapse.event, synapse.stream)
        while (status := synapse.try_call("synEventQuery", synapse.event)) == BUSY:
            pass
        if status != 0:
            raise RuntimeError(f"synEventQuery: status {status}")

    def write(self, address, data):
        staging = self.staging(len(data))
        staging[:] = data
        self.copy(self.host.value, len(data), address, TO_DEVICE)

    def read(self, address, length):
        staging = self.staging(length)
        c.memset(staging, 0, length)
        self.copy(address, length, self.host.value, TO_HOST)
        return bytes(staging)

    def free(self):
        if self.host:
            self.synapse.call("synHostFree", 0, self.host, 0)
        self.synapse.call("synDeviceFree", 0, u64(self.pool), 0)

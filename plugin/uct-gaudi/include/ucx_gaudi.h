/*
 * ucx-gaudi for programs: Gaudi memory without UCP (docs/memory.md), and cards that a program opens
 * by itself (docs/hooks.md). The pages are installed to share/doc/ucx-gaudi.
 *
 * The functions are in libucx_gaudi.so, one folder above the one that UCX_PLUGIN_PATH names. Load it with
 * dlopen(path, RTLD_NOW) and find them with dlsym, or link with it (pkg-config ucx-gaudi); UCX will find the
 * same copy.
 *
 * Each returns 0, or a negative code (see below, and docs/errors.md); ucx_gaudi_error() then says why.
 * All may be called from any thread.
 */
#ifndef UCX_GAUDI_H
#define UCX_GAUDI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What functions return. */
enum {
    UCX_GAUDI_OK                    = 0,
    UCX_GAUDI_ERR_DEVICE_NOT_FOUND  = -1, /* no driver library, no card, or the card went away */
    UCX_GAUDI_ERR_OUT_OF_MEMORY     = -2, /* device memory, lockable host memory or descriptors */
    UCX_GAUDI_ERR_INVALID_PARAMS    = -3, /* an invalid request, or one that this card cannot do */
    UCX_GAUDI_ERR_DEVICE_BUSY       = -4, /* another process owns the card, or it is in reset */
    UCX_GAUDI_ERR_DMA_FAILED        = -5, /* the card failed to execute a copy, or was reset */
    UCX_GAUDI_ERR_TIMEOUT           = -6, /* the card or a peer did not answer in time */
    UCX_GAUDI_ERR_PERMISSION_DENIED = -7, /* the driver or the system forbids it */
    UCX_GAUDI_ERR_CHANNEL_FAILED    = -8  /* sharing with another device or process failed */
};

/*
 * Gaudi memory without a UCP context. To every UCX in the process it is Gaudi memory, as if UCX had
 * allocated it: addresses may be handed to UCP, MPI, NIXL. The CPU cannot access them.
 */

/* Version of this header; one more when a function is added. None is changed or removed. */
#define UCX_GAUDI_API_VERSION 4

/* The version that the library has: compare it with the above before using functions added later. */
int ucx_gaudi_api_version(void);

/*
 * Allocates length bytes and stores their address. card: "0" (index), "module:2", a PCI address,
 * "local-rank" or "numa"; NULL: as UCX_GAUDI_COPY_DEVICE says. The card stays open as long as there is
 * memory of it.
 */
int ucx_gaudi_alloc(const char *card, size_t length, void **address);

/* Frees what ucx_gaudi_alloc() gave. No operation may be using it. */
int ucx_gaudi_free(void *address);

/*
 * Copies length bytes and returns when they have arrived. One of the two is Gaudi memory of this
 * process or an imported dma-buf, the other may be host memory; host memory must be allocated.
 */
int ucx_gaudi_copy(void *destination, const void *source, size_t length);

/*
 * The same without waiting: stores the copy, which ucx_gaudi_copy_wait() takes, once, on any thread. Until then
 * neither side may be freed, the source not be written, the destination not be used. Copies are not ordered among
 * themselves. Where the card cannot take one more, or of an imported dma-buf, it copies at once. Since version 4.
 */
int ucx_gaudi_copy_start(void *destination, const void *source, size_t length, void **copy);

/* Waits until the bytes have arrived, or the copy has failed; the copy is then gone. Since version 4. */
int ucx_gaudi_copy_wait(void *copy);

/*
 * Says that copies will use this host memory often: it is pinned as soon as that pays, and copies that were started run
 * by themselves. Not needed for single copies: large ones pin what they need. Unregister it before it is freed. Since
 * version 4.
 */
int ucx_gaudi_host_register(void *address, size_t length);
int ucx_gaudi_host_unregister(void *address);

/* Sets length bytes of Gaudi memory to a value from 0 to 255. */
int ucx_gaudi_fill(void *address, int byte, size_t length);

/* 1 if all of it is Gaudi memory of this process, else 0. */
int ucx_gaudi_is_device_memory(const void *address, size_t length);

/*
 * To be called after a transfer into Gaudi memory has completed, and before a kernel, a graph or a copy of
 * your own on that card reads it: a network card's write may be acknowledged before the card's engines see
 * it (early write response, Gaudi3). address: any of that card's memory; what any device wrote to the card
 * before the call is visible to its engines after it, so call it once for a batch. ucx_gaudi_copy() and UCX
 * do it for themselves. 1 if the driver has no such call; it acknowledges no write early. Since version 3.
 */
int ucx_gaudi_flush_peer_writes(const void *address);

/*
 * A dma-buf of Gaudi memory for other drivers: the descriptor, which the caller closes, and where the
 * memory begins in it. It keeps the memory in use until all its importers have let go.
 */
int ucx_gaudi_export_dmabuf(const void *address, size_t length, int *fd, uint64_t *offset);

/*
 * Maps length bytes from offset of a dma-buf, whoever exported it, for a card (as ucx_gaudi_alloc()
 * names it), where the driver imports dma-bufs, and stores the address at which the card sees them.
 * The descriptor stays the caller's, who may close it. The address is for ucx_gaudi_copy(), with host
 * memory or memory of that card on the other side, and for work of your own on a card that you lent.
 * It is not Gaudi memory to UCX, and the CPU cannot access it. Since version 2.
 */
int ucx_gaudi_import_dmabuf(const char *card, int fd, uint64_t offset, size_t length, void **address);

/* Unmaps what ucx_gaudi_import_dmabuf() gave. No operation may be using it. Since version 2. */
int ucx_gaudi_unmap_dmabuf(void *address);

/*
 * Lends a card: fd is the compute node, as hlthunk_open() returned it. From now on UCX allocates
 * and copies on this card, through a duplicate of the descriptor. The program may go on using the
 * card; it shares the driver's 64 submission slots with UCX.
 */
int ucx_gaudi_lend(int fd);

/*
 * Ends the loan, to be called before the card is closed. Memory of the program is forgotten; what
 * UCX itself has allocated on the card keeps it open until it is freed.
 */
int ucx_gaudi_take_back(int fd);

/*
 * Device memory of the program: length bytes at address, which hlthunk_device_memory_map() has
 * returned. UCX then recognises pointers into it. Needed only for calls that are not noticed:
 * made before UCX was there, or through function pointers from dlsym(). The card need not be lent,
 * but then the memory can only be recognised and exported as dma-buf, not copied.
 */
int ucx_gaudi_memory_mapped(int fd, uint64_t address, uint64_t length);

/*
 * To be called before hlthunk_memory_unmap(): returns when UCX has let go of the memory.
 */
int ucx_gaudi_memory_unmapping(int fd, uint64_t address);

/*
 * Why the last call on this thread failed: card, operation, the driver's errno, what to do; an empty
 * string if it did not. The text is good until the thread's next call of a function of this header
 * (other than ucx_gaudi_error() and ucx_gaudi_error_string()), which writes to the same place; the
 * place, until the thread ends. Copy it to keep it, and to print two of them at once.
 */
const char *ucx_gaudi_error(void);

/*
 * What a code means and what to do, in general: "DEVICE_BUSY: another process owns the card, ...".
 * For 0 and unknown codes, too. The text is constant and good for ever. Since version 2.
 */
const char *ucx_gaudi_error_string(int code);

#ifdef __cplusplus
}
#endif

#endif

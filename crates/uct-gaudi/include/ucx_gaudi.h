/*
 * ucx-gaudi for programs that open a Gaudi by themselves (docs/hooks.md).
 *
 * The functions are in libucx_gaudi.so, beside the folder that UCX_PLUGIN_PATH names. Load it with
 * dlopen(path, RTLD_NOW) and find them with dlsym, or link with it; UCX will find the same copy.
 *
 * Each returns 0, or a negative code of docs/errors.md; ucx_gaudi_error() then says why.
 * All may be called from any thread.
 */
#ifndef UCX_GAUDI_H
#define UCX_GAUDI_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

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

/* Why the last call on this thread failed; an empty string if it did not. */
const char *ucx_gaudi_error(void);

#ifdef __cplusplus
}
#endif

#endif

/* Gaudi memory in C, without UCP:
 *
 *   cc -I PREFIX/include gaudi_memory.c -L PREFIX/lib/ucx-gaudi -lucx_gaudi
 *   LD_LIBRARY_PATH=PREFIX/lib/ucx-gaudi ./a.out
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <ucx_gaudi.h>

#define CHECK(call)                                              \
    do {                                                         \
        int code = (call);                                       \
        if (code < 0) {                                          \
            fprintf(stderr, #call ": %s\n", ucx_gaudi_error());  \
            return 1;                                            \
        }                                                        \
    } while (0)

int main(void)
{
    enum { LENGTH = 1 << 20 };
    static char host[LENGTH], back[LENGTH];
    void *one, *two, *mapped;
    uint64_t offset;
    int fd;

    if (ucx_gaudi_api_version() < UCX_GAUDI_API_VERSION) {
        fprintf(stderr, "the library is older than the header\n");
        return 1;
    }
    for (int i = 0; i < LENGTH; ++i) {
        host[i] = (char)(i * 7);
    }
    CHECK(ucx_gaudi_alloc(NULL, LENGTH, &one));
    CHECK(ucx_gaudi_alloc(NULL, LENGTH, &two));
    CHECK(ucx_gaudi_fill(two, 0x5a, LENGTH));
    CHECK(ucx_gaudi_copy(one, host, LENGTH));
    CHECK(ucx_gaudi_copy((char *)two + 1, one, LENGTH - 2));
    CHECK(ucx_gaudi_copy(back, two, LENGTH));
    if (back[0] != 0x5a || back[LENGTH - 1] != 0x5a || memcmp(back + 1, host, LENGTH - 2)) {
        fprintf(stderr, "bytes are wrong\n");
        return 1;
    }
    /* Two copies at once, and work of your own meanwhile; of host memory that copies use often. */
    void *first, *second;
    CHECK(ucx_gaudi_host_register(back, LENGTH));
    CHECK(ucx_gaudi_copy_start(back, (char *)one + 3, LENGTH / 2, &first));
    CHECK(ucx_gaudi_copy_start(two, host + 1, LENGTH / 2, &second));
    CHECK(ucx_gaudi_copy_wait(first));
    CHECK(ucx_gaudi_copy_wait(second));
    CHECK(ucx_gaudi_copy(back + LENGTH / 2, two, LENGTH / 2));
    if (memcmp(back, host + 3, LENGTH / 2) || memcmp(back + LENGTH / 2, host + 1, LENGTH / 2) ||
        ucx_gaudi_copy_start(back, host, 8, &first) != UCX_GAUDI_ERR_INVALID_PARAMS) {
        fprintf(stderr, "copies that were started are wrong\n");
        return 1;
    }
    CHECK(ucx_gaudi_host_unregister(back));
    if (ucx_gaudi_host_unregister(back) != UCX_GAUDI_ERR_INVALID_PARAMS ||
        ucx_gaudi_host_register(one, LENGTH) != UCX_GAUDI_ERR_INVALID_PARAMS) {
        fprintf(stderr, "what is no host memory was registered, or unregistered twice\n");
        return 1;
    }
    if (!ucx_gaudi_is_device_memory(one, LENGTH) || ucx_gaudi_is_device_memory(host, 1)) {
        fprintf(stderr, "memory is not recognised\n");
        return 1;
    }
    CHECK(ucx_gaudi_export_dmabuf(one, LENGTH, &fd, &offset));
    /* After a NIC has written to it, and before a kernel of yours reads it. */
    if (ucx_gaudi_flush_peer_writes(one) < 0 || ucx_gaudi_flush_peer_writes(host) != -3) {
        fprintf(stderr, "not flushed: %s\n", ucx_gaudi_error());
        return 1;
    }
    /* A dma-buf of another device comes in the same way. Most drivers do not import. */
    if (ucx_gaudi_import_dmabuf(NULL, fd, offset + 1, LENGTH - 1, &mapped) == 0) {
        close(fd);
        CHECK(ucx_gaudi_fill(two, 0, LENGTH));
        CHECK(ucx_gaudi_copy(two, mapped, 1000));
        CHECK(ucx_gaudi_copy_start((char *)two + 1000, (char *)mapped + 1000, LENGTH - 1001, &first));
        CHECK(ucx_gaudi_copy_wait(first));
        CHECK(ucx_gaudi_copy(back, two, LENGTH));
        if (memcmp(back, host + 1, LENGTH - 1) || back[LENGTH - 1] != 0) {
            fprintf(stderr, "bytes of the dma-buf are wrong\n");
            return 1;
        }
        CHECK(ucx_gaudi_unmap_dmabuf(mapped));
        if (ucx_gaudi_unmap_dmabuf(mapped) != -3 || ucx_gaudi_copy(back, mapped, 8) != -3) {
            fprintf(stderr, "it was unmapped twice\n");
            return 1;
        }
        printf("the dma-buf was imported\n");
    } else {
        printf("the dma-buf was not imported: %s\n", ucx_gaudi_error());
        close(fd);
    }
    CHECK(ucx_gaudi_free(one));
    CHECK(ucx_gaudi_free(two));
    if (ucx_gaudi_free(two) != UCX_GAUDI_ERR_INVALID_PARAMS ||
        ucx_gaudi_copy(back, host, 8) != UCX_GAUDI_ERR_INVALID_PARAMS) {
        fprintf(stderr, "a mistake was not refused\n");
        return 1;
    }
    printf("%d bytes there and back; a mistake is refused: %s\n", LENGTH, ucx_gaudi_error());
    return 0;
}

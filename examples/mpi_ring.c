/*
 * Gaudi memory in MPI: a ring of ranks, a broadcast and a window, every byte checked.
 *
 *     mpicc -I$UCX/include mpi_ring.c -o mpi_ring -L$UCX/lib -lucp -lucs
 *     mpirun -np 2 … ./mpi_ring        (the options: docs/mpi.md)
 *
 * MPI does not allocate on a card, and the CPU cannot touch what is there. So the memory comes from
 * ucp_mem_map of the same UCX that Open MPI uses, and a rank fills and reads it by messages to itself.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucp/api/ucp.h>

static int rank, size;

static void check(ucs_status_t status, const char *what)
{
    if (status != UCS_OK) {
        fprintf(stderr, "rank %d: %s: %s\n", rank, what, ucs_status_string(status));
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

/* Never freed: the card is given back when the process ends. */
static void *gaudi_memory(size_t length)
{
    static ucp_context_h context;
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_RMA};
    ucp_mem_map_params_t map = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .length = length, .flags = UCP_MEM_MAP_ALLOCATE, .memory_type = UCS_MEMORY_TYPE_GAUDI};
    ucp_mem_attr_t attr = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS};
    ucp_mem_h handle;

    if (context == NULL) {
        check(ucp_init(&params, NULL, &context), "ucp_init");
    }
    check(ucp_mem_map(context, &map, &handle), "Gaudi memory");
    check(ucp_mem_query(handle, &attr), "ucp_mem_query");
    return attr.address;
}

/* To and from the card: a message to myself. */
static void copy(void *to, const void *from, int length)
{
    MPI_Sendrecv(from, length, MPI_BYTE, rank, 1, to, length, MPI_BYTE, rank, 1, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
}

static void fill(unsigned char *bytes, int length, int seed)
{
    for (int i = 0; i < length; ++i) {
        bytes[i] = (unsigned char)(seed * 31 + i * 7 + (i >> 8));
    }
}

static void expect(void *device, unsigned char *host, unsigned char *wanted, int length, int seed, const char *what)
{
    memset(host, 0, length);
    copy(host, device, length);
    fill(wanted, length, seed);
    if (memcmp(host, wanted, length) != 0) {
        fprintf(stderr, "rank %d: %s of %d bytes: wrong\n", rank, what, length);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

int main(int argc, char **argv)
{
    static const int lengths[] = {1, 8, 4097, 65536, 1 << 20, (4 << 20) + 3};
    enum { MAX = (4 << 20) + 3 };

    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    int next = (rank + 1) % size, previous = (rank + size - 1) % size;
    unsigned char *host = malloc(MAX), *wanted = malloc(MAX);
    void *mine = gaudi_memory(MAX), *other = gaudi_memory(MAX);

    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); ++i) {
        int length = lengths[i];
        fill(host, length, rank);
        copy(mine, host, length);
        MPI_Sendrecv(mine, length, MPI_BYTE, next, 2, other, length, MPI_BYTE, previous, 2,
                     MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        expect(other, host, wanted, length, previous, "ring");

        MPI_Bcast(mine, length, MPI_BYTE, 0, MPI_COMM_WORLD);
        expect(mine, host, wanted, length, 0, "broadcast");
    }

    if (argc > 1 && strcmp(argv[1], "window") == 0) {
        MPI_Win window;
        MPI_Win_create(other, MAX, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &window);
        for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); ++i) {
            int length = lengths[i];
            fill(host, length, rank + 100);
            copy(mine, host, length);
            MPI_Win_fence(0, window);
            MPI_Put(mine, length, MPI_BYTE, next, 0, length, MPI_BYTE, window);
            MPI_Win_fence(0, window);
            expect(other, host, wanted, length, previous + 100, "put");
            MPI_Win_fence(0, window);
            MPI_Get(mine, length, MPI_BYTE, next, 0, length, MPI_BYTE, window);
            MPI_Win_fence(0, window);
            expect(mine, host, wanted, length, rank + 100, "get");
        }
        for (int get = 0; get < 2; ++get) {
            enum { ROUNDS = 20 };
            double start = MPI_Wtime();
            for (int round = 0; round < ROUNDS; ++round) {
                if (get) {
                    MPI_Get(mine, MAX, MPI_BYTE, next, 0, MAX, MPI_BYTE, window);
                } else {
                    MPI_Put(mine, MAX, MPI_BYTE, next, 0, MAX, MPI_BYTE, window);
                }
                MPI_Win_fence(0, window);
            }
            double seconds = (MPI_Wtime() - start) / ROUNDS;
            if (rank == 0) {
                printf("%s of 4 MiB, all ranks at once: %.2f GB/s each\n", get ? "get" : "put", MAX / seconds / 1e9);
            }
        }
        MPI_Win_free(&window);
    }
    if (rank == 0) {
        printf("%d ranks: every byte is right\n", size);
    }
    MPI_Finalize();
    return 0;
}

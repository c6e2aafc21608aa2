/*
 * What Allreduce and Alltoall cost with Gaudi buffers, and by hand: copy to host memory, the collective, copy back.
 *
 *     mpicc -O2 -I$PREFIX/include mpi_bench.c -o mpi_bench -L$PREFIX/lib/ucx-gaudi -lucx_gaudi -Wl,-rpath,$PREFIX/lib/ucx-gaudi
 *     ucx-gaudi run -- mpirun -np 2 ./mpi_bench [BYTES [ROUNDS]]          (docs/mpi.md)
 *
 * For each size of a rank's buffer up to BYTES (67108864): the collective, the size, µs with Gaudi buffers, µs by hand. Both take
 * turns; each is the best of ROUNDS (9), of which each is the mean of some calls on the slowest rank. Results are compared.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucx_gaudi.h>

static int rank, ranks;
static char *gaudi_in, *gaudi_out, *host_in, *host_out, *check;

static void must(int status)
{
    if (status != UCX_GAUDI_OK) {
        fprintf(stderr, "rank %d: %s\n", rank, ucx_gaudi_error());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

typedef void (*collective_t)(const void *in, void *out, size_t bytes);

static void allreduce(const void *in, void *out, size_t bytes)
{
    MPI_Allreduce(in, out, (int)(bytes / sizeof(float)), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void alltoall(const void *in, void *out, size_t bytes)
{
    MPI_Alltoall(in, (int)(bytes / ranks), MPI_BYTE, out, (int)(bytes / ranks), MPI_BYTE, MPI_COMM_WORLD);
}

static void by_hand(collective_t run, size_t bytes)
{
    must(ucx_gaudi_copy(host_in, gaudi_in, bytes));
    run(host_in, host_out, bytes);
    must(ucx_gaudi_copy(gaudi_out, host_out, bytes));
}

/* µs of a call on the slowest rank. */
static double timed(collective_t run, size_t bytes, int calls, int hand)
{
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    for (int i = 0; i < calls; ++i) {
        if (hand) {
            by_hand(run, bytes);
        } else {
            run(gaudi_in, gaudi_out, bytes);
        }
    }
    double took = (MPI_Wtime() - start) / calls * 1e6, slowest;
    MPI_Allreduce(&took, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return slowest;
}

static void measure(const char *name, collective_t run, size_t bytes, int rounds)
{
    double best[2] = {1e18, 1e18};
    for (size_t i = 0; i < bytes / sizeof(float); ++i) {
        ((float *)host_in)[i] = (float)((i * 7 + rank) % 1000);
    }
    must(ucx_gaudi_copy(gaudi_in, host_in, bytes));
    by_hand(run, bytes);
    must(ucx_gaudi_fill(gaudi_out, 0x5a, bytes));
    run(gaudi_in, gaudi_out, bytes);
    must(ucx_gaudi_copy(check, gaudi_out, bytes));
    if (memcmp(check, host_out, bytes) != 0) {
        fprintf(stderr, "rank %d: %s of %zu bytes: the results differ\n", rank, name, bytes);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    int calls = (int)(timed(run, bytes, 1, 1) > 20000 ? 1 : 20000 / timed(run, bytes, 2, 1));
    calls = calls < 1 ? 1 : calls > 200 ? 200 : calls;
    MPI_Bcast(&calls, 1, MPI_INT, 0, MPI_COMM_WORLD);
    for (int round = 0; round < rounds; ++round) {
        for (int hand = 0; hand < 2; ++hand) {
            double took = timed(run, bytes, calls, hand);
            best[hand] = took < best[hand] ? took : best[hand];
        }
    }
    if (rank == 0) {
        printf("%s %zu %.2f %.2f\n", name, bytes, best[0], best[1]);
        fflush(stdout);
    }
}

int main(int argc, char **argv)
{
    size_t most = argc > 1 ? strtoul(argv[1], NULL, 0) : 64 << 20;
    int rounds = argc > 2 ? atoi(argv[2]) : 9;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    must(ucx_gaudi_alloc(NULL, most, (void **)&gaudi_in));
    must(ucx_gaudi_alloc(NULL, most, (void **)&gaudi_out));
    host_in = aligned_alloc(4096, most), host_out = aligned_alloc(4096, most), check = malloc(most);
    for (size_t bytes = 64; bytes <= most; bytes *= 4) {
        measure("allreduce", allreduce, bytes, rounds);
        measure("alltoall", alltoall, bytes, rounds);
    }
    must(ucx_gaudi_free(gaudi_in));
    must(ucx_gaudi_free(gaudi_out));
    MPI_Finalize();
    return 0;
}

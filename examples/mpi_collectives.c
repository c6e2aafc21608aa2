/*
 * Every collective of MPI on Gaudi memory, compared to the byte with the same on host memory.
 *
 *     mpicc -I$PREFIX/include mpi_collectives.c -o mpi_collectives -L$PREFIX/lib/ucx-gaudi -lucx_gaudi
 *     ucx-gaudi run -- mpirun -np 2 ./mpi_collectives [BYTES]        (docs/mpi.md)
 *
 * Each case runs with all operands in host memory, then with the source, the result, or both in Gaudi memory, and with both on
 * every other rank. BYTES is the largest size of a block: 65536, of which above that only some collectives. Needs Open MPI 5
 * or later.
 */
#include <mpi.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucx_gaudi.h>
#include <unistd.h>

enum { MARGIN = 64, POISON = 0xa5, MAX_RANKS = 64 };
enum { SOURCE = 1, RESULT = 2, MIXED = 4 }; /* which are in Gaudi memory; both on every other rank */

static int rank, ranks;
static MPI_Comm ring; /* a topology for neighbourhood collectives: two neighbours each */
static long cases, failures;

static void must(int status, const char *what)
{
    if (status != UCX_GAUDI_OK) {
        fprintf(stderr, "rank %d: %s: %s\n", rank, what, ucx_gaudi_error());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

/* What a case is run with. The count is of one block; many collectives have one for each rank. */
typedef struct {
    int count;
    MPI_Datatype type;
    MPI_Op op;
} with_t;

typedef void (*run_t)(const void *s, void *r, with_t w);

static int extent(MPI_Datatype type)
{
    MPI_Aint low, extent;
    MPI_Type_get_extent(type, &low, &extent);
    return (int)extent;
}

/* Arrays for the collectives that want one: each is good for the call that it is made for. */
static int *ints(int first, int step)
{
    static int arrays[4][MAX_RANKS], next;
    int *array = arrays[next++ % 4];
    for (int i = 0; i < ranks; ++i) {
        array[i] = first + i * step;
    }
    return array;
}

static int *all_to_root(int count)
{
    static int array[MAX_RANKS];
    memset(array, 0, sizeof array);
    array[ranks - 1] = count;
    return array;
}

static MPI_Datatype *types(MPI_Datatype type)
{
    static MPI_Datatype array[MAX_RANKS];
    for (int i = 0; i < ranks; ++i) {
        array[i] = type;
    }
    return array;
}

static MPI_Aint *offsets(with_t w)
{
    static MPI_Aint array[MAX_RANKS];
    for (int i = 0; i < ranks; ++i) {
        array[i] = (MPI_Aint)i * w.count * extent(w.type);
    }
    return array;
}

#define WORLD MPI_COMM_WORLD
#define ROOT (ranks - 1)
#define BLOCK w.count, w.type
#define BLOCKS ints(w.count, 0), ints(0, w.count), w.type
#define BYTES ints(w.count, 0), ints(0, w.count * extent(w.type)), types(w.type)
#define AT_ROOT(x) (rank == ROOT ? MPI_IN_PLACE : (x))
#define ARGS(...) __VA_ARGS__

/* A collective, the same without blocking, and the same as a persistent one that is started twice. */
#define BOTH(name, call, icall, args)                                        \
    static void p##name(const void *s, void *r, with_t w)                    \
    {                                                                        \
        MPI_Request request;                                                 \
        call##_init(args, MPI_INFO_NULL, &request);                          \
        for (int i = 0; i < 2; ++i) {                                        \
            MPI_Start(&request);                                             \
            MPI_Wait(&request, MPI_STATUS_IGNORE);                           \
        }                                                                    \
        MPI_Request_free(&request);                                          \
        (void)s, (void)r, (void)w;                                           \
    }                                                                        \
    static void name(const void *s, void *r, with_t w) { call(args); (void)s, (void)r, (void)w; } \
    static void i##name(const void *s, void *r, with_t w)                    \
    {                                                                        \
        MPI_Request request;                                                 \
        icall(args, &request);                                               \
        MPI_Wait(&request, MPI_STATUS_IGNORE);                               \
        (void)s, (void)r, (void)w;                                           \
    }

BOTH(bcast, MPI_Bcast, MPI_Ibcast, ARGS(r, BLOCK, ROOT, WORLD))
BOTH(gather, MPI_Gather, MPI_Igather, ARGS(s, BLOCK, r, BLOCK, ROOT, WORLD))
BOTH(gatherv, MPI_Gatherv, MPI_Igatherv, ARGS(s, BLOCK, r, BLOCKS, ROOT, WORLD))
BOTH(scatter, MPI_Scatter, MPI_Iscatter, ARGS(s, BLOCK, r, BLOCK, ROOT, WORLD))
BOTH(scatterv, MPI_Scatterv, MPI_Iscatterv, ARGS(s, BLOCKS, r, BLOCK, ROOT, WORLD))
BOTH(allgather, MPI_Allgather, MPI_Iallgather, ARGS(s, BLOCK, r, BLOCK, WORLD))
BOTH(allgather_in, MPI_Allgather, MPI_Iallgather, ARGS(MPI_IN_PLACE, BLOCK, r, BLOCK, WORLD))
BOTH(allgatherv, MPI_Allgatherv, MPI_Iallgatherv, ARGS(s, BLOCK, r, BLOCKS, WORLD))
BOTH(alltoall, MPI_Alltoall, MPI_Ialltoall, ARGS(s, BLOCK, r, BLOCK, WORLD))
BOTH(alltoall_in, MPI_Alltoall, MPI_Ialltoall, ARGS(MPI_IN_PLACE, BLOCK, r, BLOCK, WORLD))
BOTH(alltoallv, MPI_Alltoallv, MPI_Ialltoallv, ARGS(s, BLOCKS, r, BLOCKS, WORLD))
BOTH(alltoallw, MPI_Alltoallw, MPI_Ialltoallw, ARGS(s, BYTES, r, BYTES, WORLD))
BOTH(reduce, MPI_Reduce, MPI_Ireduce, ARGS(s, r, BLOCK, w.op, ROOT, WORLD))
BOTH(reduce_in, MPI_Reduce, MPI_Ireduce, ARGS(AT_ROOT(s), r, BLOCK, w.op, ROOT, WORLD))
BOTH(allreduce, MPI_Allreduce, MPI_Iallreduce, ARGS(s, r, BLOCK, w.op, WORLD))
BOTH(allreduce_in, MPI_Allreduce, MPI_Iallreduce, ARGS(MPI_IN_PLACE, r, BLOCK, w.op, WORLD))
BOTH(reduce_scatter, MPI_Reduce_scatter, MPI_Ireduce_scatter, ARGS(s, r, ints(w.count, 0), w.type, w.op, WORLD))
BOTH(reduce_scatter_root, MPI_Reduce_scatter, MPI_Ireduce_scatter, ARGS(s, r, all_to_root(w.count), w.type, w.op, WORLD))
BOTH(reduce_scatter_block, MPI_Reduce_scatter_block, MPI_Ireduce_scatter_block, ARGS(s, r, BLOCK, w.op, WORLD))
BOTH(scan, MPI_Scan, MPI_Iscan, ARGS(s, r, BLOCK, w.op, WORLD))
BOTH(scan_in, MPI_Scan, MPI_Iscan, ARGS(MPI_IN_PLACE, r, BLOCK, w.op, WORLD))
BOTH(exscan, MPI_Exscan, MPI_Iexscan, ARGS(s, r, BLOCK, w.op, WORLD))
BOTH(neighbor_allgather, MPI_Neighbor_allgather, MPI_Ineighbor_allgather, ARGS(s, BLOCK, r, BLOCK, ring))
BOTH(neighbor_allgatherv, MPI_Neighbor_allgatherv, MPI_Ineighbor_allgatherv, ARGS(s, BLOCK, r, BLOCKS, ring))
BOTH(neighbor_alltoall, MPI_Neighbor_alltoall, MPI_Ineighbor_alltoall, ARGS(s, BLOCK, r, BLOCK, ring))
BOTH(neighbor_alltoallv, MPI_Neighbor_alltoallv, MPI_Ineighbor_alltoallv, ARGS(s, BLOCKS, r, BLOCKS, ring))
BOTH(neighbor_alltoallw, MPI_Neighbor_alltoallw, MPI_Ineighbor_alltoallw,
     ARGS(s, ints(w.count, 0), offsets(w), types(w.type), r, ints(w.count, 0), offsets(w), types(w.type), ring))

static void reduce_local(const void *s, void *r, with_t w)
{
    MPI_Reduce_local(s, r, BLOCK, w.op);
}

static void sendrecv(const void *s, void *r, with_t w)
{
    MPI_Sendrecv(s, BLOCK, (rank + 1) % ranks, 1, r, BLOCK, (rank + ranks - 1) % ranks, 1, WORLD, MPI_STATUS_IGNORE);
}

static void pack_unpack(const void *s, void *r, with_t w)
{
    int size, at = 0;
    MPI_Pack_size(BLOCK, WORLD, &size);
    void *packed = malloc(size);
    MPI_Pack(s, BLOCK, packed, size, &at, WORLD);
    at = 0;
    MPI_Unpack(packed, size, &at, r, BLOCK, WORLD);
    free(packed);
}

/* One-sided: the result is the window, the source the origin. */
static MPI_Win window(void *r, with_t w)
{
    MPI_Win win;
    MPI_Win_create(r, (MPI_Aint)ranks * w.count * extent(w.type), extent(w.type), MPI_INFO_NULL, WORLD, &win);
    MPI_Win_fence(0, win);
    return win;
}

static void close_window(MPI_Win win)
{
    MPI_Win_fence(0, win);
    MPI_Win_free(&win);
}

static void put(const void *s, void *r, with_t w)
{
    MPI_Win win = window(r, w);
    MPI_Put(s, BLOCK, (rank + 1) % ranks, (MPI_Aint)rank * w.count, BLOCK, win);
    close_window(win);
}

static void accumulate(const void *s, void *r, with_t w)
{
    MPI_Win win = window(r, w);
    MPI_Accumulate(s, BLOCK, (rank + 1) % ranks, 0, BLOCK, w.op, win);
    close_window(win);
}

/* What a rank has at the next comes into its own second block. */
static void get_accumulate(const void *s, void *r, with_t w)
{
    MPI_Win win = window(r, w);
    char *second = (char *)r + (size_t)w.count * extent(w.type);
    MPI_Get_accumulate(s, BLOCK, second, BLOCK, (rank + 1) % ranks, 0, BLOCK, w.op, win);
    close_window(win);
}

/* Not by MPI_SUM: that is an atomic operation of UCX, which the card cannot do (docs/mpi.md). */
static void fetch_and_op(const void *s, void *r, with_t w)
{
    MPI_Win win = window(r, w);
    char *second = (char *)r + (size_t)w.count * extent(w.type);
    MPI_Fetch_and_op(s, second, w.type, (rank + 1) % ranks, w.count - 1, MPI_MAX, win);
    close_window(win);
}

/* Each rank writes its block to a file, and reads that of the next. */
static char file_name[64];

__attribute__((unused)) static void file(const void *s, void *r, with_t w)
{
    MPI_File file;
    MPI_Offset size = (MPI_Offset)w.count * extent(w.type);
    MPI_File_open(WORLD, file_name, MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL, &file);
    MPI_File_write_at(file, rank * size, s, BLOCK, MPI_STATUS_IGNORE);
    MPI_File_sync(file);
    MPI_Barrier(WORLD);
    MPI_File_read_at(file, (rank + 1) % ranks * size, r, BLOCK, MPI_STATUS_IGNORE);
    MPI_File_close(&file);
}

__attribute__((unused)) static void file_all(const void *s, void *r, with_t w)
{
    MPI_File file;
    MPI_Offset size = (MPI_Offset)w.count * extent(w.type);
    MPI_File_open(WORLD, file_name, MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL, &file);
    MPI_File_write_at_all(file, rank * size, s, BLOCK, MPI_STATUS_IGNORE);
    MPI_File_sync(file);
    MPI_Barrier(WORLD);
    MPI_File_read_at_all(file, (rank + 1) % ranks * size, r, BLOCK, MPI_STATUS_IGNORE);
    MPI_File_close(&file);
}

typedef struct {
    const char *name;
    run_t run, irun, prun;
    int blocks;  /* 1: the result is one block; 0: one for each rank */
    int reduces; /* whether the operation matters */
} collective_t;

#define CASE(name, blocks, reduces) {#name, name, i##name, p##name, blocks, reduces}
#define ALONE(name, blocks, reduces) {#name, name, NULL, NULL, blocks, reduces}
static const collective_t COLLECTIVES[] = {
    CASE(bcast, 1, 0), CASE(gather, 0, 0), CASE(gatherv, 0, 0), CASE(scatter, 1, 0), CASE(scatterv, 1, 0),
    CASE(allgather, 0, 0), CASE(allgather_in, 0, 0), CASE(allgatherv, 0, 0), CASE(alltoall, 0, 0),
    CASE(alltoall_in, 0, 0), CASE(alltoallv, 0, 0), CASE(alltoallw, 0, 0), CASE(neighbor_allgather, 0, 0),
    CASE(neighbor_allgatherv, 0, 0), CASE(neighbor_alltoall, 0, 0), CASE(neighbor_alltoallv, 0, 0),
    CASE(neighbor_alltoallw, 0, 0), CASE(reduce, 1, 1), CASE(reduce_in, 1, 1), CASE(allreduce, 1, 1),
    CASE(allreduce_in, 1, 1), CASE(reduce_scatter, 1, 1), CASE(reduce_scatter_root, 1, 1),
    CASE(reduce_scatter_block, 1, 1), CASE(scan, 1, 1),
    CASE(scan_in, 1, 1), CASE(exscan, 1, 1), ALONE(reduce_local, 1, 1), ALONE(sendrecv, 1, 0),
    ALONE(pack_unpack, 1, 0), ALONE(put, 0, 0), ALONE(accumulate, 0, 1), ALONE(get_accumulate, 0, 1),
    ALONE(fetch_and_op, 0, 1),
#if OMPI_MAJOR_VERSION < 6 /* docs/mpi.md */
    ALONE(file, 1, 0), ALONE(file_all, 1, 0),
#endif
};
#define COUNT(array) (sizeof(array) / sizeof *(array))

/* A predefined type, and how to fill elements so that no operation overflows or rounds. */
typedef struct {
    MPI_Datatype type;
    const char *name;
    enum { INTEGER, REAL, COMPLEX, LOGICAL, BYTE, PAIR } kind;
    enum { C_INT, C_FLOAT, C_DOUBLE, C_LONG_DOUBLE } as;
    int size; /* of an integer, or of the first of a pair */
} kind_t;

static kind_t KINDS[] = {
    {MPI_INT8_T, "int8", INTEGER, C_INT, 1}, {MPI_UINT8_T, "uint8", INTEGER, C_INT, 1},
    {MPI_INT16_T, "int16", INTEGER, C_INT, 2}, {MPI_UINT16_T, "uint16", INTEGER, C_INT, 2},
    {MPI_INT32_T, "int32", INTEGER, C_INT, 4}, {MPI_UINT32_T, "uint32", INTEGER, C_INT, 4},
    {MPI_INT64_T, "int64", INTEGER, C_INT, 8}, {MPI_UINT64_T, "uint64", INTEGER, C_INT, 8},
    {MPI_INT, "int", INTEGER, C_INT, 4}, {MPI_LONG, "long", INTEGER, C_INT, 8}, {MPI_SHORT, "short", INTEGER, C_INT, 2},
    {MPI_UNSIGNED_LONG_LONG, "unsigned long long", INTEGER, C_INT, 8}, {MPI_SIGNED_CHAR, "signed char", INTEGER, C_INT, 1},
    {MPI_FLOAT, "float", REAL, C_FLOAT, 0}, {MPI_DOUBLE, "double", REAL, C_DOUBLE, 0},
    {MPI_LONG_DOUBLE, "long double", REAL, C_LONG_DOUBLE, 0}, {MPI_C_FLOAT_COMPLEX, "float complex", COMPLEX, C_FLOAT, 0},
    {MPI_C_DOUBLE_COMPLEX, "double complex", COMPLEX, C_DOUBLE, 0}, {MPI_C_BOOL, "bool", LOGICAL, C_INT, 1},
    {MPI_BYTE, "byte", BYTE, C_INT, 1}, {MPI_FLOAT_INT, "float int", PAIR, C_FLOAT, 4},
    {MPI_DOUBLE_INT, "double int", PAIR, C_DOUBLE, 8}, {MPI_LONG_INT, "long int", PAIR, C_INT, 8},
    {MPI_2INT, "2int", PAIR, C_INT, 4}, {MPI_SHORT_INT, "short int", PAIR, C_INT, 2},
};

static int allowed(const kind_t *kind, MPI_Op op)
{
    int logical = op == MPI_LAND || op == MPI_LOR || op == MPI_LXOR;
    int bitwise = op == MPI_BAND || op == MPI_BOR || op == MPI_BXOR;
    int order = op == MPI_MAX || op == MPI_MIN;
    int located = op == MPI_MAXLOC || op == MPI_MINLOC;
    switch (kind->kind) {
    case INTEGER: return !located;
    case REAL: return !located && !logical && !bitwise;
    case COMPLEX: return !located && !logical && !bitwise && !order;
    case LOGICAL: return logical;
    case BYTE: return bitwise;
    default: return located;
    }
}

static void number(unsigned char *at, int as, int size, int value)
{
    float f = value;
    double d = value;
    long double l = value;
    switch (as) {
    case C_FLOAT: memcpy(at, &f, sizeof f); break;
    case C_DOUBLE: memcpy(at, &d, sizeof d); break;
    case C_LONG_DOUBLE: memcpy(at, &l, 10); break;
    default: memcpy(at, &(int64_t){value}, size);
    }
}

static void fill(unsigned char *bytes, const kind_t *kind, size_t length, int seed)
{
    size_t step = extent(kind->type);
    memset(bytes, 0, length);
    for (size_t i = 0; i + step <= length; i += step) {
        int value = (int)((i / step * 7 + seed * 3 + (i >> 9)) % 3) + (kind->kind == LOGICAL ? -1 : 1);
        number(bytes + i, kind->as, kind->size, kind->kind == LOGICAL ? value > 0 : value);
        if (kind->kind == PAIR) {
            number(bytes + i + (kind->size < 4 ? 4 : kind->size), C_INT, 4, rank + 1);
        } else if (kind->kind == COMPLEX) {
            number(bytes + i + step / 2, kind->as, 0, seed % 2);
        } else if (kind->kind == BYTE) {
            bytes[i] = (unsigned char)(i * 31 + seed * 7 + (i >> 8));
        }
    }
}

/* Runs a case in host memory, then with Gaudi memory, and compares all of the result with what lies around it. */
static void check(const char *name, run_t run, int blocks, const kind_t *fill_as, with_t w, int odd)
{
    size_t block = (size_t)w.count * extent(w.type);
    size_t source = block * ranks, result = blocks ? block : block * ranks;
    size_t all = result + 2 * MARGIN;
    unsigned char *s = malloc(source + 1), *r = malloc(all), *want = malloc(all), *got = malloc(all);
    void *gs, *gr;
    if (cases == 0) {
        must(ucx_gaudi_alloc(NULL, 1, &gs), "alloc"); /* so that the card stays open */
    }
    must(ucx_gaudi_alloc(NULL, source + MARGIN, &gs), "alloc");
    must(ucx_gaudi_alloc(NULL, all + MARGIN, &gr), "alloc");
    fill(s, fill_as, source, rank + 1);
    memset(r, POISON, all);
    fill(r + MARGIN, fill_as, result, rank + 2);
    memcpy(want, r, all);
    run(s, want + MARGIN, w);
    for (int which = 1; which <= MIXED; ++which) {
        int where = which < MIXED ? which : rank % 2 ? 0 : SOURCE | RESULT;
        unsigned char *in = where & SOURCE ? (unsigned char *)gs + odd : s;
        unsigned char *out = where & RESULT ? (unsigned char *)gr + odd : got;
        if (where & SOURCE) {
            must(ucx_gaudi_copy(in, s, source), "copy");
        }
        if (where & RESULT) {
            must(ucx_gaudi_copy(out, r, all), "copy");
        } else {
            memcpy(got, r, all);
        }
        run(in, out + MARGIN, w);
        if (where & RESULT) {
            must(ucx_gaudi_copy(got, out, all), "copy");
        }
        ++cases;
        for (size_t i = 0; i < all; ++i) {
            if (got[i] != want[i]) {
                fprintf(stderr, "rank %d: %s, %d of %s, %s%s%s in Gaudi memory: byte %zd of %zu is %#x, not %#x\n", rank, name,
                        w.count, fill_as->name, which == MIXED ? "of every other rank " : "", where & SOURCE ? "source " : "", where & RESULT ? "result" : "",
                        (ssize_t)i - MARGIN, result, got[i], want[i]);
                ++failures;
                break;
            }
        }
    }
    must(ucx_gaudi_free(gs), "free");
    must(ucx_gaudi_free(gr), "free");
    free(s), free(r), free(want), free(got);
}

static const struct { MPI_Op *op; const char *name; } OPS[] = {
    {&(MPI_Op){MPI_MAX}, "max"}, {&(MPI_Op){MPI_MIN}, "min"}, {&(MPI_Op){MPI_SUM}, "sum"}, {&(MPI_Op){MPI_PROD}, "prod"},
    {&(MPI_Op){MPI_LAND}, "land"}, {&(MPI_Op){MPI_BAND}, "band"}, {&(MPI_Op){MPI_LOR}, "lor"}, {&(MPI_Op){MPI_BOR}, "bor"},
    {&(MPI_Op){MPI_LXOR}, "lxor"}, {&(MPI_Op){MPI_BXOR}, "bxor"}, {&(MPI_Op){MPI_MAXLOC}, "maxloc"},
    {&(MPI_Op){MPI_MINLOC}, "minloc"},
};

static void said(const char *what, long before)
{
    long mine[2] = {cases - before, failures}, sum[2];
    MPI_Reduce(mine, sum, 2, MPI_LONG, MPI_SUM, 0, WORLD);
    if (rank == 0) {
        printf("%-60s %6ld cases, %ld wrong so far\n", what, sum[0], sum[1]);
        fflush(stdout);
    }
}

/* An operation of the user: it is associative also where it overflows. */
static void product(void *in, void *inout, int *count, MPI_Datatype *type)
{
    int step = extent(*type);
    MPI_Aint begin, size;
    MPI_Type_get_true_extent(*type, &begin, &size);
    for (int i = 0; i < *count; ++i) {
        *(uint32_t *)((char *)inout + begin + i * step) *= *(uint32_t *)((char *)in + begin + i * step) | 1;
    }
}

static void operations_of_the_user(int most)
{
    static const struct { const char *name; run_t run; } REDUCTIONS[] = {
        {"user's allreduce", allreduce}, {"user's allreduce_in", allreduce_in}, {"user's reduce", reduce},
        {"user's reduce_in", reduce_in}, {"user's reduce_scatter", reduce_scatter},
        {"user's reduce_scatter_block", reduce_scatter_block}, {"user's scan", scan}, {"user's exscan", exscan},
        {"user's reduce_local", reduce_local},
    };
    MPI_Op op;
    MPI_Datatype late, wide;
    long before = cases;
    MPI_Type_create_hindexed(1, (int[]){1}, (MPI_Aint[]){4}, MPI_UINT32_T, &late);
    MPI_Type_create_resized(late, 0, 12, &wide);
    MPI_Type_commit(&wide);
    MPI_Op_create(product, 1, &op);
    for (size_t i = 0; i < COUNT(REDUCTIONS); ++i) {
        for (int count = 1; count <= most / 4; count = count * 37 + 1) {
            check(REDUCTIONS[i].name, REDUCTIONS[i].run, 1, &KINDS[5], (with_t){count, MPI_UINT32_T, op}, 4);
            if (count < 1000) { /* with more, Open MPI writes past its own buffers: docs/upstream */
                check(REDUCTIONS[i].name, REDUCTIONS[i].run, 1, &KINDS[5], (with_t){count, wide, op}, 0);
            }
        }
    }
    MPI_Op_free(&op);
    MPI_Type_free(&wide);
    MPI_Type_free(&late);
    said("operations of the user", before);
}

/* Threads with communicators of their own, all at once. */
static void *in_a_thread(void *communicator)
{
    MPI_Comm comm = *(MPI_Comm *)communicator;
    enum { INTS = 900001, BLOCK_OF = 5000 };
    int *host = malloc(INTS * sizeof *host), *got = malloc(INTS * sizeof *got), *in, *out;
    must(ucx_gaudi_alloc(NULL, INTS * sizeof *in, (void **)&in), "alloc");
    must(ucx_gaudi_alloc(NULL, INTS * sizeof *out, (void **)&out), "alloc");
    for (int round = 1; round <= 5; ++round) {
        for (int i = 0; i < INTS; ++i) {
            host[i] = (rank + 1) * (i % 1000 + round);
        }
        must(ucx_gaudi_copy(in, host, INTS * sizeof *in), "copy");
        MPI_Allreduce(in, out, INTS, MPI_INT, MPI_SUM, comm);
        must(ucx_gaudi_copy(got, out, INTS * sizeof *out), "copy");
        for (int i = 0; i < INTS; ++i) {
            if (got[i] != ranks * (ranks + 1) / 2 * (i % 1000 + round)) {
                fprintf(stderr, "rank %d: a thread's allreduce: element %d is %d\n", rank, i, got[i]);
                __atomic_add_fetch(&failures, 1, __ATOMIC_RELAXED);
                break;
            }
        }
        int next = (rank + 1) % ranks, last = (rank + ranks - 1) % ranks;
        MPI_Alltoall(in, BLOCK_OF, MPI_INT, out, BLOCK_OF, MPI_INT, comm);
        MPI_Sendrecv_replace(in, INTS, MPI_INT, next, 1, last, 1, comm, MPI_STATUS_IGNORE);
        must(ucx_gaudi_copy(got, in, INTS * sizeof *in), "copy");
        must(ucx_gaudi_copy(host, out, (size_t)ranks * BLOCK_OF * sizeof *out), "copy");
        for (int i = 0; i < INTS; ++i) {
            int block = i / BLOCK_OF, exchanged = (block + 1) * ((rank * BLOCK_OF + i % BLOCK_OF) % 1000 + round);
            if (got[i] != (last + 1) * (i % 1000 + round) || (block < ranks && host[i] != exchanged)) {
                fprintf(stderr, "rank %d: a thread's message or exchange: element %d is wrong\n", rank, i);
                __atomic_add_fetch(&failures, 1, __ATOMIC_RELAXED);
                break;
            }
        }
        __atomic_add_fetch(&cases, 3, __ATOMIC_RELAXED);
    }
    must(ucx_gaudi_free(in), "free");
    must(ucx_gaudi_free(out), "free");
    free(host), free(got);
    return NULL;
}

static void threads(int provided)
{
    enum { THREADS = 3 };
    MPI_Comm comms[THREADS];
    pthread_t running[THREADS];
    long before = cases;
    if (provided < MPI_THREAD_MULTIPLE) {
        if (rank == 0) {
            puts("skipped: threads, as this MPI does not provide MPI_THREAD_MULTIPLE");
        }
        return;
    }
    for (int i = 0; i < THREADS; ++i) {
        MPI_Comm_dup(WORLD, &comms[i]);
    }
    for (int i = 0; i < THREADS; ++i) {
        pthread_create(&running[i], NULL, in_a_thread, &comms[i]);
    }
    for (int i = 0; i < THREADS; ++i) {
        pthread_join(running[i], NULL);
        MPI_Comm_free(&comms[i]);
    }
    said("three threads: allreduce, alltoall, sendrecv_replace", before);
}

/* Some collectives with blocks that are copied and sent in pieces. */
static void long_blocks(int most)
{
    static const char *const NAMES[] = {
        "bcast", "allgather", "alltoall", "allreduce", "allreduce_in", "reduce", "scan", "reduce_scatter_block", "sendrecv",
        "put", "accumulate", "file",
    };
    for (size_t i = 0; i < COUNT(NAMES); ++i) {
        long before = cases;
        for (size_t k = 0; k < COUNT(COLLECTIVES); ++k) {
            const collective_t *c = &COLLECTIVES[k];
            const kind_t *kind = &KINDS[c->reduces ? 4 : 19];
            for (int size = 1 << 20, odd = 1; strcmp(c->name, NAMES[i]) == 0 && size <= most; size *= 4, ++odd) {
                with_t w = {size / extent(kind->type) - odd % 3, kind->type, MPI_SUM};
                check(c->name, c->run, c->blocks, kind, w, odd);
                if (c->irun != NULL && size == 1 << 22) {
                    check(c->name, c->irun, c->blocks, kind, w, odd);
                }
            }
        }
        char what[80];
        snprintf(what, sizeof what, "%s, long blocks", NAMES[i]);
        said(what, before);
    }
}

int main(int argc, char **argv)
{
    int most = argc > 1 ? atoi(argv[1]) : 65536, provided;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
    MPI_Comm_rank(WORLD, &rank);
    MPI_Comm_size(WORLD, &ranks);
    MPI_Cart_create(WORLD, 1, &ranks, &(int){1}, 0, &ring);
    const kind_t *ints32 = &KINDS[4], *bytes = &KINDS[19];
    int id = getpid();
    MPI_Bcast(&id, 1, MPI_INT, 0, WORLD);
    snprintf(file_name, sizeof file_name, "/tmp/mpi_collectives.%d", id);

    for (size_t i = 0; i < COUNT(COLLECTIVES); ++i) {
        const collective_t *c = &COLLECTIVES[i];
        const kind_t *kind = c->reduces ? ints32 : bytes;
        long before = cases;
        for (int size = 1, odd = 1; size <= most && size <= 65536; size = size * 8 + odd, odd ^= 1) {
            with_t w = {(size + extent(kind->type) - 1) / extent(kind->type), kind->type, MPI_SUM};
            check(c->name, c->run, c->blocks, kind, w, odd * extent(kind->type));
            if (c->irun != NULL) {
                check(c->name, c->irun, c->blocks, kind, w, odd);
                check(c->name, c->prun, c->blocks, kind, w, odd);
            }
        }
        said(c->name, before);
    }

    /* Columns of a matrix, and a structure with holes. */
    MPI_Datatype vector, column, holes;
    MPI_Type_vector(37, 3, 5, MPI_BYTE, &vector);
    MPI_Type_create_resized(vector, 0, 37 * 5, &column);
    MPI_Type_create_struct(2, (int[]){5, 3}, (MPI_Aint[]){2, 16}, (MPI_Datatype[]){MPI_BYTE, MPI_INT}, &holes);
    MPI_Type_commit(&column);
    MPI_Type_commit(&holes);
    for (size_t i = 0; i < COUNT(COLLECTIVES); ++i) {
        const collective_t *c = &COLLECTIVES[i];
        long before = cases;
        if (c->reduces) {
            continue;
        }
        for (int which = 0; which < 2; ++which) {
            for (int count = 1; count <= 20; count += 19) {
                with_t w = {count, which ? holes : column, MPI_SUM};
                check(c->name, c->run, c->blocks, bytes, w, 3);
                if (c->irun != NULL) {
                    check(c->name, c->irun, c->blocks, bytes, w, 3);
                }
            }
        }
        char what[80];
        snprintf(what, sizeof what, "%s, derived datatypes", c->name);
        said(what, before);
    }

    for (size_t i = 0; i < COUNT(OPS); ++i) {
        long before = cases;
        for (size_t k = 0; k < COUNT(KINDS); ++k) {
            if (allowed(&KINDS[k], *OPS[i].op)) {
                with_t w = {257, KINDS[k].type, *OPS[i].op};
                check(OPS[i].name, allreduce, 1, &KINDS[k], w, 0);
                check(OPS[i].name, reduce_local, 1, &KINDS[k], w, 0);
                check(OPS[i].name, iscan, 1, &KINDS[k], w, 0);
            }
        }
        char what[80];
        snprintf(what, sizeof what, "%s: allreduce, reduce_local, iscan of all types", OPS[i].name);
        said(what, before);
    }

    operations_of_the_user(most);
    threads(provided);
    if (most > 65536) {
        long_blocks(most);
    }
    if (rank == 0) {
        unlink(file_name);
    }

    long mine[2] = {cases, failures}, sum[2];
    MPI_Allreduce(mine, sum, 2, MPI_LONG, MPI_SUM, WORLD);
    if (rank == 0) {
        printf("%ld cases on %d ranks, %ld wrong\n", sum[0], ranks, sum[1]);
    }
    MPI_Finalize();
    return sum[1] == 0 ? 0 : 1;
}

/*
 * Every collective of MPI on Gaudi memory, compared to the byte with the same on host memory.
 *
 *     mpicc -I$PREFIX/include mpi_collectives.c -o mpi_collectives -L$PREFIX/lib/ucx-gaudi -lucx_gaudi
 *     ucx-gaudi run -- mpirun -np 2 ./mpi_collectives [BYTES]        (docs/mpi.md)
 *
 * Each case runs with all operands in host memory, then with the source, the result, or both in Gaudi memory. BYTES is the
 * largest size of a block (65536). Needs Open MPI 5 or later.
 */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucx_gaudi.h>

enum { MARGIN = 64, POISON = 0xa5, MAX_RANKS = 64 };
enum { SOURCE = 1, RESULT = 2 }; /* which are in Gaudi memory */

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

/* A collective, and the same without blocking. */
#define BOTH(name, call, icall, args)                                        \
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

typedef struct {
    const char *name;
    run_t run, irun;
    int blocks;  /* 1: the result is one block; 0: one for each rank */
    int reduces; /* whether the operation matters */
} collective_t;

#define CASE(name, blocks, reduces) {#name, name, i##name, blocks, reduces}
static const collective_t COLLECTIVES[] = {
    CASE(bcast, 1, 0), CASE(gather, 0, 0), CASE(gatherv, 0, 0), CASE(scatter, 1, 0), CASE(scatterv, 1, 0),
    CASE(allgather, 0, 0), CASE(allgather_in, 0, 0), CASE(allgatherv, 0, 0), CASE(alltoall, 0, 0),
    CASE(alltoall_in, 0, 0), CASE(alltoallv, 0, 0), CASE(alltoallw, 0, 0), CASE(neighbor_allgather, 0, 0),
    CASE(neighbor_allgatherv, 0, 0), CASE(neighbor_alltoall, 0, 0), CASE(neighbor_alltoallv, 0, 0),
    CASE(neighbor_alltoallw, 0, 0), CASE(reduce, 1, 1), CASE(reduce_in, 1, 1), CASE(allreduce, 1, 1),
    CASE(allreduce_in, 1, 1), CASE(reduce_scatter, 1, 1), CASE(reduce_scatter_block, 1, 1), CASE(scan, 1, 1),
    CASE(scan_in, 1, 1), CASE(exscan, 1, 1), {"reduce_local", reduce_local, NULL, 1, 1},
    {"sendrecv", sendrecv, NULL, 1, 0}, {"pack_unpack", pack_unpack, NULL, 1, 0}, {"put", put, NULL, 0, 0},
    {"accumulate", accumulate, NULL, 0, 1},
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
    for (int where = 1; where <= (SOURCE | RESULT); ++where) {
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
                fprintf(stderr, "rank %d: %s, %d of %s, %s%s in Gaudi memory: byte %zd of %zu is %#x, not %#x\n", rank, name,
                        w.count, fill_as->name, where & SOURCE ? "source " : "", where & RESULT ? "result" : "",
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

int main(int argc, char **argv)
{
    int most = argc > 1 ? atoi(argv[1]) : 65536, provided;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SINGLE, &provided);
    MPI_Comm_rank(WORLD, &rank);
    MPI_Comm_size(WORLD, &ranks);
    MPI_Cart_create(WORLD, 1, &ranks, &(int){1}, 0, &ring);
    const kind_t *ints32 = &KINDS[4], *bytes = &KINDS[19];

    for (size_t i = 0; i < COUNT(COLLECTIVES); ++i) {
        const collective_t *c = &COLLECTIVES[i];
        const kind_t *kind = c->reduces ? ints32 : bytes;
        long before = cases;
        for (int size = 1, odd = 1; size <= most; size = size * 8 + odd, odd ^= 1) {
            with_t w = {(size + extent(kind->type) - 1) / extent(kind->type), kind->type, MPI_SUM};
            check(c->name, c->run, c->blocks, kind, w, odd * extent(kind->type));
            if (c->irun != NULL) {
                check(c->name, c->irun, c->blocks, kind, w, odd);
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

    long mine[2] = {cases, failures}, sum[2];
    MPI_Allreduce(mine, sum, 2, MPI_LONG, MPI_SUM, WORLD);
    if (rank == 0) {
        printf("%ld cases on %d ranks, %ld wrong\n", sum[0], ranks, sum[1]);
    }
    MPI_Finalize();
    return sum[1] == 0 ? 0 : 1;
}

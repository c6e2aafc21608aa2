/*
 * Plays Open MPI 5.0 for the components, as far as they know it: with -DLIBMPI and -DLIBOPEN_PAL its libraries, otherwise
 * a program that loads the components and calls them as Open MPI does, on Gaudi memory, and compares with the same on host memory.
 *
 *     program FOLDER
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { const char *name; void *parent, *construct, *destruct; int initialized, depth; void **constructors, **destructors; size_t size; } class_t;
enum { TYPES = 43, INT32 = 4 };
typedef struct module module_t;
typedef void (*two_t)(const void *, void *, int *, void **, module_t *);
typedef void (*three_t)(const void *, const void *, void *, int *, void **, module_t *);
typedef struct { two_t two[TYPES]; module_t *two_of[TYPES]; three_t three[TYPES]; module_t *three_of[TYPES]; } functions_t;
typedef struct { void *class; int references, unused; char name[64]; int kind, flags, index; functions_t functions; } op_t;
struct module { void *class; int references; int (*enable)(module_t *, op_t *); op_t *op; two_t two[TYPES]; three_t three[TYPES]; };

/* Collectives: a module, and a communicator with the table of its functions. */
typedef struct coll coll_t;
struct coll { void *class; int references; int (*enable)(coll_t *, void *); void *blocking[17], *others[51], *disable, *reduce_local, *data; };
typedef struct { void *function, *module; } pair_t;
typedef struct { char before[344]; pair_t *table; char after[32]; } communicator_t;
enum { ALLREDUCE = 2, ALLTOALL = 3, SLOTS = 67, RANKS = 2 };

#ifdef LIBMPI
class_t ompi_op_base_module_t_class = {.size = sizeof(module_t)};
class_t ompi_communicator_t_class = {.size = sizeof(communicator_t)};
class_t mca_coll_base_module_t_class = {.size = sizeof(coll_t)};
int PMPI_Comm_size(void *communicator, int *size) { (void)communicator; *size = RANKS; return 0; }
int PMPI_Comm_rank(void *communicator, int *rank) { (void)communicator; *rank = 0; return 0; }
int PMPI_Type_get_extent(void *type, long *low, long *extent) { *low = 0; *extent = *(int *)type; return 0; }
int PMPI_Type_get_true_extent(void *type, long *low, long *extent) { *low = 0; *extent = *(int *)type; return 0; }
void *PMPI_Type_f2c(int number) { static int byte = 1; return number == 1 ? &byte : NULL; }
void *PMPI_Op_f2c(int number) { static int or; return number == 8 ? &or : NULL; }
int PMPI_Get_library_version(char *text, int *length) { *length = sprintf(text, "Open MPI v5.0.7, package: a test"); return 0; }
int PMPI_Type_size(void *type, int *size) { *size = *(int *)type; return 0; }
#elif defined(LIBOPEN_PAL)
class_t opal_accelerator_stream_t_class = {.size = DEBUG_BUILD ? 48 : 24};
void opal_class_initialize(class_t *class) { static void *none; class->constructors = &none; }
#else
#include <dlfcn.h>

#define MUST(what) do { if (!(what)) { fprintf(stderr, "line %d: %s\n", __LINE__, #what); exit(1); } } while (0)

static struct {
    int (*check_addr)(const void *, int *, uint64_t *);
    int (*create_stream)(int, void **), (*create_event)(int, void **);
    void *record_event, *query_event, *copy_async;
    int (*copy)(int, int, void *, const void *, size_t, int), (*move)(int, int, void *, const void *, size_t, int);
    int (*alloc)(int, void **, size_t), (*release)(int, void *);
} accelerator;

static void *component(const char *folder, const char *framework)
{
    char path[4096], name[64];
    snprintf(path, sizeof path, "%s/mca_%s_gaudi.so", folder, framework);
    snprintf(name, sizeof name, "mca_%s_gaudi_component", framework);
    void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    MUST(library != NULL);
    char *found = dlsym(library, name);
    MUST(found != NULL && strcmp(found + 84, "gaudi") == 0);
    int (*open)(void) = *(void **)(found + 160);
    MUST(open == NULL || open() == 0);
    return found + 264; /* after who it is */
}

static void *gaudi(const void *host, size_t length)
{
    void *address;
    int device;
    uint64_t flags;
    MUST(accelerator.alloc(-1, &address, length) == 0);
    MUST(accelerator.check_addr(address, &device, &flags) == 1 && device == 0 && flags == 0);
    MUST(accelerator.check_addr((char *)address + length - 1, &device, &flags) == 1);
    MUST(accelerator.check_addr(host, &device, &flags) == 0 && device == -1);
    MUST(accelerator.copy(-1, -1, address, host, length, 0) == 0);
    return address;
}

static void expect(const void *address, const void *host, size_t length)
{
    char *read = malloc(length);
    MUST(accelerator.copy(-1, -1, read, address, length, 0) == 0);
    MUST(memcmp(read, host, length) == 0);
    free(read);
}

/* Overlapping, over more than one part, in both directions and not at all. */
static void moves(void)
{
    enum { LENGTH = 3 << 20 };
    const int places[][3] = {{0, 1000, LENGTH - 1000}, {1000, 0, LENGTH - 1000}, {7, 7, 100}, {0, LENGTH / 2, LENGTH / 2}, {5, 9, 0}};
    char *host = malloc(LENGTH);
    for (int i = 0; i < LENGTH; ++i) {
        host[i] = (char)(i * 7 + (i >> 9));
    }
    char *card = gaudi(host, LENGTH);
    for (size_t i = 0; i < sizeof places / sizeof *places; ++i) {
        const int *place = places[i];
        MUST(accelerator.move(-1, -1, card + place[0], card + place[1], place[2], 0) == 0);
        memmove(host + place[0], host + place[1], place[2]);
        expect(card, host, LENGTH);
    }
    MUST(accelerator.release(-1, card) == 0);
    free(host);
}

static void sum(const void *from, void *to, int *count, void **type, module_t *module)
{
    (void)type;
    MUST(module != NULL);
    for (int i = 0; i < *count; ++i) {
        ((int *)to)[i] += ((const int *)from)[i];
    }
}

static void sum3(const void *one, const void *other, void *to, int *count, void **type, module_t *module)
{
    (void)type, (void)module;
    for (int i = 0; i < *count; ++i) {
        ((int *)to)[i] = ((const int *)one)[i] + ((const int *)other)[i];
    }
}

static op_t op;

/* Each with operands of its own: in host memory, on the card, and both. */
static void *reductions(void *seed)
{
    enum { COUNT = 700001 };
    int size = 4;
    void *type = &size;
    size_t length = COUNT * sizeof(int);
    int *one = malloc(length), *other = malloc(length), *want = malloc(length);
    for (int i = 0; i < COUNT; ++i) {
        one[i] = i * 3 + (int)(intptr_t)seed;
        other[i] = i ^ 0x5a5a;
        want[i] = one[i] + other[i];
    }
    for (int where = 0; where < 4; ++where) {
        int count = COUNT, none = 0;
        int *from = where & 1 ? gaudi(one, length) : one;
        int *to = where & 2 ? gaudi(other, length) : memcpy(malloc(length), other, length);
        op.functions.two[INT32](from, to, &none, &type, op.functions.two_of[INT32]);
        op.functions.two[INT32](from, to, &count, &type, op.functions.two_of[INT32]);
        MUST(count == COUNT);
        expect(to, want, length);
        op.functions.three[INT32](from, other, to, &count, &type, op.functions.three_of[INT32]);
        expect(to, want, length);
        expect(from, one, length);
        if (where & 1) MUST(accelerator.release(-1, from) == 0);
        if (where & 2) MUST(accelerator.release(-1, to) == 0); else free(to);
    }
    free(one), free(other), free(want);
    return NULL;
}

/* As if the other rank had the same: the sum is twice the source. They get host memory, and long ones in parts. */
static int calls, splits;

static int all_reduce(const void *from, void *to, int count, void *type, void *op, communicator_t *communicator, void *module)
{
    int device;
    uint64_t flags;
    (void)op, (void)communicator;
    from = from == (void *)1 ? to : from;
    MUST(accelerator.check_addr(from, &device, &flags) == 0 && accelerator.check_addr(to, &device, &flags) == 0);
    MUST(module == &calls && (*(int *)type == 4 || count == 1));
    if (*(int *)type == 1) {
        *(char *)to = *(const char *)from;
        ++splits;
        return 0;
    }
    for (int i = 0; i < count; ++i) {
        ((int *)to)[i] = 2 * ((const int *)from)[i];
    }
    ++calls;
    return 0;
}

/* As if the other rank sent what this rank sends to it. */
static int all_to_all(const void *from, int sent, void *from_type, void *to, int count, void *type, void *communicator, void *module)
{
    (void)sent, (void)from_type, (void)communicator;
    MUST(module == &calls && *(int *)type == 4);
    MUST(accelerator.copy(-1, -1, to, from, (size_t)RANKS * count * 4, 0) == 0);
    int device;
    uint64_t flags;
    calls += accelerator.check_addr(to, &device, &flags) == 0;
    return 0;
}

static void collectives(coll_t *coll, communicator_t *communicator)
{
    typedef int (*allreduce_t)(const void *, void *, long, void *, void *, void *, void *);
    typedef int (*alltoall_t)(const void *, long, void *, void *, long, void *, void *, void *);
    allreduce_t allreduce = (allreduce_t)coll->blocking[ALLREDUCE];
    alltoall_t alltoall = (alltoall_t)coll->blocking[ALLTOALL];
    const long junk = 0x5a5a5a5a00000000; /* the upper half of an int says nothing */
    static const int COUNTS[][2] = {{1, 1}, {1000, 1}, {500000, 1}, {900001, 4}};
    int size = 4;
    static char op[100];
    for (int where = 0; where < 4; ++where) {
        for (int i = 0; i < 4; ++i) {
            int count = COUNTS[i][0];
            size_t length = (size_t)count * 4;
            int *one = malloc(length), *want = malloc(length);
            for (int k = 0; k < count; ++k) {
                one[k] = k * 3 + i, want[k] = 2 * one[k];
            }
            int *from = where & 1 ? gaudi(one, length) : one;
            int *to = where & 2 ? gaudi(one, length) : memset(malloc(length), 0x5a, length);
            calls = splits = 0;
            MUST(allreduce(from, to, count | junk, &size, op, communicator, coll) == 0);
            MUST(calls == (where == 0 ? 1 : COUNTS[i][1]) && splits == (i == 3));
            expect(to, want, length);
            if (where & 2) { /* in place */
                MUST(accelerator.copy(-1, -1, to, one, length, 0) == 0);
                MUST(allreduce((void *)1, to, count | junk, &size, op, communicator, coll) == 0);
                expect(to, want, length);
            }
            calls = 0;
            MUST(alltoall(from, (count / 2) | junk, &size, to, (count / 2) | junk, &size, communicator, coll) == 0);
            MUST(calls == (!(where & 2) || (i > 0 && i < 2)));
            expect(to, one, (size_t)(count / 2) * 8);
            if (where & 1) MUST(accelerator.release(-1, from) == 0);
            if (where & 2) MUST(accelerator.release(-1, to) == 0); else free(to);
            free(one), free(want);
        }
    }
}

int main(int argc, char **argv)
{
    void *(**init)(void) = component(argv[argc - 1], "accelerator");
    void *module = (*init)();
    if (module == NULL) {
        puts("declined");
        return 0;
    }
    memcpy(&accelerator, module, sizeof accelerator);
    struct { int (*init)(char, char); module_t *(*query)(op_t *, int *); } *reduces = component(argv[argc - 1], "op");
    MUST(reduces->init(0, 0) == 0);

    static module_t theirs = {.references = 4 * TYPES};
    for (int i = 0; i < TYPES; ++i) {
        op.functions.two_of[i] = op.functions.three_of[i] = &theirs;
    }
    op.functions.two[INT32] = sum;
    op.functions.three[INT32] = sum3;
    int priority = -1;
    module_t *ours = reduces->query(&op, &priority);
    MUST(ours != NULL && priority == 100 && ours->enable(ours, &op) == 0);
    MUST(theirs.references == 6 * TYPES); /* Open MPI drops those that it had */
    for (int i = 0; i < TYPES; ++i) {
        MUST((ours->two[i] != NULL) == (i == INT32) && (ours->three[i] != NULL) == (i == INT32));
    }
    op.functions.two[INT32] = ours->two[INT32];
    op.functions.three[INT32] = ours->three[INT32];
    op.functions.two_of[INT32] = op.functions.three_of[INT32] = ours;

    struct { int (*init)(char, char); coll_t *(*query)(void *, int *); } *coll = component(argv[argc - 1], "coll");
    static pair_t table[SLOTS], whole[SLOTS];
    static communicator_t communicator = {.table = table};
    MUST(coll->init(0, 0) == 0);
    coll_t *chosen = coll->query(&communicator, &priority);
    MUST(chosen != NULL && priority == 90 && chosen->references == 1 && chosen->enable(chosen, &communicator) != 0);
    for (int i = 0; i < SLOTS; ++i) {
        table[i] = (pair_t){i == ALLREDUCE ? (void *)all_reduce : i == ALLTOALL ? (void *)all_to_all : whole, &calls};
    }
    memcpy(whole, table, sizeof table);
    MUST(chosen->enable(chosen, &communicator) == 0 && memcmp(whole, table, sizeof table) == 0 && chosen->disable == NULL);
    MUST(chosen->blocking[0] == NULL && chosen->reduce_local != NULL);

    struct { void *class; int references; void *own; } *stream, *event;
    MUST(accelerator.create_stream(-1, (void **)&stream) == 0 && stream->references == 1);
    MUST(accelerator.create_event(-1, (void **)&event) != 0); /* there is no such class here */

    moves();
    collectives(chosen, &communicator);
    pthread_t threads[4];
    for (intptr_t i = 0; i < 4; ++i) {
        pthread_create(&threads[i], NULL, reductions, (void *)i);
    }
    for (int i = 0; i < 4; ++i) {
        pthread_join(threads[i], NULL);
    }
    puts("every byte is right");
    return 0;
}
#endif

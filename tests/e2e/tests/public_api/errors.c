/* The codes, their texts and the reason of the last failure, as ucx_gaudi.h promises them. */
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include <ucx_gaudi.h>

static int failures;

#define EXPECT(condition)                                             \
    do {                                                              \
        if (!(condition)) {                                           \
            fprintf(stderr, "line %d: " #condition "\n", __LINE__);   \
            ++failures;                                               \
        }                                                             \
    } while (0)

static void codes(void)
{
    static const struct {
        int code;
        const char *name;
    } all[] = {
        {UCX_GAUDI_ERR_DEVICE_NOT_FOUND, "DEVICE_NOT_FOUND"},
        {UCX_GAUDI_ERR_OUT_OF_MEMORY, "OUT_OF_MEMORY"},
        {UCX_GAUDI_ERR_INVALID_PARAMS, "INVALID_PARAMS"},
        {UCX_GAUDI_ERR_DEVICE_BUSY, "DEVICE_BUSY"},
        {UCX_GAUDI_ERR_DMA_FAILED, "DMA_FAILED"},
        {UCX_GAUDI_ERR_TIMEOUT, "TIMEOUT"},
        {UCX_GAUDI_ERR_PERMISSION_DENIED, "PERMISSION_DENIED"},
        {UCX_GAUDI_ERR_CHANNEL_FAILED, "CHANNEL_FAILED"},
    };
    const char *unknown = ucx_gaudi_error_string(1);

    for (int i = 0; i < 8; ++i) {
        const char *text = ucx_gaudi_error_string(all[i].code);
        size_t length    = strlen(all[i].name);

        EXPECT(all[i].code == -1 - i);
        EXPECT(strncmp(text, all[i].name, length) == 0);
        EXPECT(strncmp(text + length, ": ", 2) == 0);
        EXPECT(strstr(text, "; ") != NULL); /* what to do */
        EXPECT(ucx_gaudi_error_string(all[i].code) == text);
        printf("%d %s\n", all[i].code, text);
    }
    EXPECT(strcmp(ucx_gaudi_error_string(UCX_GAUDI_OK), "OK: no error") == 0);
    EXPECT(strncmp(unknown, "UNKNOWN: ", 9) == 0);
    EXPECT(ucx_gaudi_error_string(-9) == unknown);
    EXPECT(ucx_gaudi_error_string(INT_MIN) == unknown);
    EXPECT(ucx_gaudi_error_string(INT_MAX) == unknown);
}

/* The text stays where it is until the thread's next call, and its place until the thread ends. */
static void lifetime(void)
{
    const char *reason;
    char first[100];
    int host;

    EXPECT(strcmp(ucx_gaudi_error(), "") == 0);
    EXPECT(ucx_gaudi_lend(-1) == UCX_GAUDI_ERR_INVALID_PARAMS);
    reason = ucx_gaudi_error();
    snprintf(first, sizeof(first), "%s", reason);
    EXPECT(strcmp(first, "-1 is no descriptor") == 0);
    EXPECT(ucx_gaudi_error_string(-1) != reason && strcmp(reason, first) == 0);
    EXPECT(ucx_gaudi_free(&host) == UCX_GAUDI_ERR_INVALID_PARAMS);
    EXPECT(ucx_gaudi_error() == reason);
    EXPECT(strstr(reason, "did not come from ucx_gaudi_alloc") != NULL);
    EXPECT(ucx_gaudi_is_device_memory(&host, 1) == 0);
    EXPECT(ucx_gaudi_error() == reason && strcmp(reason, "") == 0);
}

static pthread_key_t key;

/* Runs when the storage of the library for this thread is gone already. */
static void at_thread_end(void *value)
{
    (void)value;
    EXPECT(ucx_gaudi_lend(-1) == UCX_GAUDI_ERR_INVALID_PARAMS);
    EXPECT(ucx_gaudi_error() != NULL);
}

static void *other_thread(void *mine)
{
    EXPECT(strcmp(ucx_gaudi_error(), "") == 0);
    EXPECT(ucx_gaudi_lend(-2) == UCX_GAUDI_ERR_INVALID_PARAMS);
    EXPECT(strcmp(ucx_gaudi_error(), "-2 is no descriptor") == 0);
    EXPECT(strcmp(mine, "-1 is no descriptor") == 0);
    pthread_setspecific(key, mine);
    return NULL;
}

int main(void)
{
    pthread_t thread;

    codes();
    lifetime();
    EXPECT(ucx_gaudi_lend(-1) == UCX_GAUDI_ERR_INVALID_PARAMS);
    EXPECT(pthread_key_create(&key, at_thread_end) == 0);
    EXPECT(pthread_create(&thread, NULL, other_thread, (void *)ucx_gaudi_error()) == 0);
    EXPECT(pthread_join(thread, NULL) == 0);
    EXPECT(strcmp(ucx_gaudi_error(), "-1 is no descriptor") == 0);
    return failures != 0;
}

/*
 * UCP in C with Gaudi memory: host → card → card → host by tagged messages of a worker to itself, every
 * byte checked. Between two processes only the endpoint differs.
 *
 *     cc -I$UCX/include ucp_gaudi.c -o ucp_gaudi -L$UCX/lib -lucp -lucs
 *     ucx-gaudi run --soft -- ./ucp_gaudi
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucp/api/ucp.h>

enum { LENGTH = (1 << 20) + 3 };

static ucp_context_h context;
static ucp_worker_h worker;
static ucp_ep_h endpoint;

static void check(ucs_status_t status, const char *what)
{
    if (status != UCS_OK) {
        fprintf(stderr, "%s: %s\n", what, ucs_status_string(status));
        exit(1);
    }
}

static void finish(ucs_status_ptr_t request, const char *what)
{
    if (UCS_PTR_IS_PTR(request)) {
        ucs_status_t status;
        while ((status = ucp_request_check_status(request)) == UCS_INPROGRESS) {
            ucp_worker_progress(worker);
        }
        check(status, what);
        ucp_request_free(request);
    } else {
        check(UCS_PTR_STATUS(request), what);
    }
}

/* UCX recognises which memory the addresses are in. */
static void move(void *to, const void *from)
{
    ucp_request_param_t param = {0};
    ucs_status_ptr_t receive = ucp_tag_recv_nbx(worker, to, LENGTH, 1, (ucp_tag_t)-1, &param);
    finish(ucp_tag_send_nbx(endpoint, from, LENGTH, 1, &param), "send");
    finish(receive, "receive");
}

static void *gaudi_memory(ucp_mem_h *handle)
{
    ucp_mem_map_params_t map = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .length = LENGTH, .flags = UCP_MEM_MAP_ALLOCATE, .memory_type = UCS_MEMORY_TYPE_GAUDI};
    ucp_mem_attr_t attr = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS};

    check(ucp_mem_map(context, &map, handle), "Gaudi memory");
    check(ucp_mem_query(*handle, &attr), "ucp_mem_query");
    return attr.address;
}

int main(void)
{
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_TAG};
    ucp_worker_params_t worker_params = {0};
    ucp_ep_params_t ep_params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS};
    ucp_request_param_t param = {0};
    ucp_mem_h handles[2];
    size_t length;

    check(ucp_init(&params, NULL, &context), "ucp_init");
    check(ucp_worker_create(context, &worker_params, &worker), "ucp_worker_create");
    check(ucp_worker_get_address(worker, (ucp_address_t **)&ep_params.address, &length), "address");
    check(ucp_ep_create(worker, &ep_params, &endpoint), "ucp_ep_create");
    ucp_worker_release_address(worker, (ucp_address_t *)ep_params.address);

    unsigned char *from = malloc(LENGTH), *back = calloc(1, LENGTH);
    void *one = gaudi_memory(&handles[0]), *two = gaudi_memory(&handles[1]);
    for (int i = 0; i < LENGTH; ++i) {
        from[i] = (unsigned char)(i * 7 + (i >> 8));
    }
    move(one, from);
    move(two, one);
    move(back, two);
    int right = memcmp(from, back, LENGTH) == 0;

    finish(ucp_ep_close_nbx(endpoint, &param), "close");
    ucp_mem_unmap(context, handles[0]);
    ucp_mem_unmap(context, handles[1]);
    ucp_worker_destroy(worker);
    ucp_cleanup(context);
    printf(right ? "%d bytes through Gaudi memory: every byte is right\n" : "%d bytes: wrong\n", LENGTH);
    return !right;
}

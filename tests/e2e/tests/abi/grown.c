/* A stand-in for libuct, of which only the wrappers that the layout probe calls are there. How its tables
 * are laid out is chosen when it is compiled:
 *   PUBLIC      number of public operations of an interface
 *   BEFORE_LAST operations inserted in front of the last eight public ones
 *   INTERNAL    operations inserted in front of the internal ones
 *   QUERY_V2    1 if the first internal operation is iface_query_v2, as in all but 1.21.0
 *   ELEMENT     1 if iface_mem_element_pack is one of them, as in snapshots before 1.21.0
 *   FLAGS       1 if memory has flags, as since 1.22
 *   MD          operations inserted in front of a memory domain's
 *   COMPONENT   functions inserted in front of a component's rkey_ptr
 *   OPEN        functions inserted in front of a component's md_open
 */
#include <stddef.h>

typedef signed char status;
typedef status (*operation)(void);

static status call(void **table, size_t slot)
{
    return ((operation)table[slot])();
}

#define PUBLIC_SLOT(_slot) ((_slot) + ((_slot) >= 42 ? BEFORE_LAST : 0))
#define PUBLIC_OF_IFACE(_name, _slot) \
    status _name(void **iface) { return call(iface, PUBLIC_SLOT(_slot)); }
#define PUBLIC_OF_EP(_name, _slot) \
    status _name(void ***ep) { return call(*ep, PUBLIC_SLOT(_slot)); }
#define INTERNAL_SLOT(_slot) (INTERNAL + QUERY_V2 - 1 + (_slot) + ((_slot) > 2 ? ELEMENT : 0))
#define INTERNAL_OF_IFACE(_name, _slot) \
    status _name(void **iface) { return call(iface[PUBLIC], INTERNAL_SLOT(_slot)); }
#define INTERNAL_OF_EP(_name, _slot) \
    status _name(void ***ep) { return call((*ep)[PUBLIC], INTERNAL_SLOT(_slot)); }
#define OF_MD(_name, _slot) \
    status _name(void ***md) { return call(*md, MD + (_slot)); }

PUBLIC_OF_IFACE(uct_iface_query, 46)
PUBLIC_OF_IFACE(uct_iface_event_fd_get, 43)
PUBLIC_OF_IFACE(uct_iface_get_address, 48)
PUBLIC_OF_EP(uct_ep_check, 28)
#if QUERY_V2
INTERNAL_OF_IFACE(uct_iface_query_v2, 0)
#endif
#if ELEMENT
INTERNAL_OF_IFACE(uct_iface_mem_element_pack, 2)
#endif
INTERNAL_OF_IFACE(uct_iface_estimate_perf, 1)
INTERNAL_OF_EP(uct_ep_query, 3)
INTERNAL_OF_EP(uct_ep_invalidate, 4)
INTERNAL_OF_IFACE(uct_iface_is_reachable_v2, 6)
OF_MD(uct_md_close, 0)
OF_MD(uct_md_query_v2, 1)
OF_MD(uct_md_mem_free, 3)
OF_MD(uct_md_mem_advise, 4)
OF_MD(uct_md_mem_reg_v2, 5)
OF_MD(uct_md_mem_dereg_v2, 6)
OF_MD(uct_md_mem_query, 7)
#if FLAGS
OF_MD(uct_md_mem_query_v2, 7)
#endif
OF_MD(uct_md_mkey_pack_v2, 8)
OF_MD(uct_md_mem_attach, 9)
OF_MD(uct_md_detect_memory_type, 10)

status uct_md_open(void **component)
{
    return call(component + 2, OPEN + 1);
}

status uct_rkey_ptr(void **component)
{
    return call(component + 2, COMPONENT + 4);
}

/* Tables without a field: only their ends. */
void *uct_md_config_table[11];
void *uct_iface_config_table[11];

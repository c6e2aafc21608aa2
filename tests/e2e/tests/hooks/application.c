/*
 * A library of an application that uses the driver by itself, linked to libhl-thunk as any C
 * program is: its calls go through relocations, which is where they can be noticed.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <ucx_gaudi.h>

int hlthunk_open(int device_name, const char *bus_id);
int hlthunk_open_control(int device, const char *bus_id);
int hlthunk_get_pci_bus_id_from_fd(int fd, char *bus_id, int length);
int hlthunk_close(int fd);
uint64_t hlthunk_device_memory_alloc(int fd, uint64_t size, uint64_t page_size, bool contiguous,
                                     bool shared);
int hlthunk_device_memory_free(int fd, uint64_t handle);
uint64_t hlthunk_device_memory_map(int fd, uint64_t handle, uint64_t hint);
int hlthunk_memory_unmap(int fd, uint64_t address);

enum { HLTHUNK_DEVICE_DONT_CARE = 4 };

int application_open(void)
{
    return hlthunk_open(HLTHUNK_DEVICE_DONT_CARE, NULL);
}

/* Opens the control node of the same card, and closes it. */
int application_glance(int fd)
{
    char bus_id[16];
    int control = hlthunk_get_pci_bus_id_from_fd(fd, bus_id, sizeof(bus_id));

    if (control == 0) {
        control = hlthunk_open_control(0, bus_id);
    }
    return control < 0 ? control : hlthunk_close(control);
}

int application_close(int fd)
{
    return hlthunk_close(fd);
}

uint64_t application_alloc(int fd, uint64_t size)
{
    return hlthunk_device_memory_alloc(fd, size, 0, true, true);
}

int application_free(int fd, uint64_t handle)
{
    return hlthunk_device_memory_free(fd, handle);
}

uint64_t application_map(int fd, uint64_t handle)
{
    return hlthunk_device_memory_map(fd, handle, 0);
}

int application_unmap(int fd, uint64_t address)
{
    return hlthunk_memory_unmap(fd, address);
}

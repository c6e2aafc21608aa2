/* A stand-in for CUDA's driver library on a machine without GPUs: enough of it that UCX's CUDA module is loaded, and
 * finds no device. */
enum { NO_DEVICE = 100 };
int cuInit(unsigned flags) { (void)flags; return NO_DEVICE; }
int cuDeviceGetCount(int *count) { *count = 0; return NO_DEVICE; }
int cuGetErrorString(int error, const char **text) { (void)error; *text = "no device"; return 0; }

/* Preloaded into a process: its wall clock is off by as many seconds as the file named by SOAK_CLOCK says (one double,
 * mapped, so that a step takes effect at once). The monotonic clock is left alone, as a step leaves it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static const volatile double *offset;
static int (*real)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    const char *name = getenv("SOAK_CLOCK");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        void *mapped = mmap(NULL, sizeof(double), PROT_READ, MAP_SHARED, file, 0);
        offset = mapped == MAP_FAILED ? NULL : mapped;
        close(file);
    }
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = real(clock, now);
    if (result == 0 && clock == CLOCK_REALTIME && offset)
        now->tv_sec += (time_t)*offset;
    return result;
}

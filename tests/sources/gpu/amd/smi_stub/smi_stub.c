/* A stand-in libamd_smi.so. It tells what the file named by KVP_SMI_WORLD says, read anew at each call.
 *
 * Lines: "version MAJOR MINOR RELEASE", "init STATUS", and per device
 *   "device BDF TOTAL_BYTES USED_BYTES TOTAL_MIB USED_MIB GFX_PERCENT CURRENT_W SOCKET_W AVERAGE_W LIMIT_W CAP"
 * where BDF is domain:bus:device.function in hex and a value is a number, "-" (NOT_SUPPORTED) or "!N" (status N).
 * Symbols that the wrapper binds and this file does not define are generated next to it as NOT_SUPPORTED.
 * Layouts follow the structures of the Python wrapper.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEVICES 80
#define VALUES 10

enum { TOTAL_BYTES, USED_BYTES, TOTAL_MIB, USED_MIB, GFX, CURRENT_W, SOCKET_W, AVERAGE_W, LIMIT_W, CAP };

static char values[MAX_DEVICES][VALUES][32];
static unsigned bdf[MAX_DEVICES][4];
static unsigned version[3];
static int devices, init_status;

static void load(void) {
    char line[1024];
    const char *path = getenv("KVP_SMI_WORLD");
    FILE *file = path ? fopen(path, "r") : NULL;
    devices = init_status = 0;
    while (file && fgets(line, sizeof line, file)) {
        char (*v)[32] = values[devices];
        unsigned *b = bdf[devices];
        sscanf(line, "version %u %u %u", &version[0], &version[1], &version[2]);
        sscanf(line, "init %d", &init_status);
        if (devices < MAX_DEVICES &&
            sscanf(line, "device %x:%x:%x.%x %31s %31s %31s %31s %31s %31s %31s %31s %31s %31s", &b[0], &b[1], &b[2],
                   &b[3], v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9]) == 4 + VALUES)
            devices++;
    }
    if (file) fclose(file);
}

/* Status 0 and the value, or the status that the file demands. */
static int get(void *handle, int which, uint64_t *out) {
    load();
    long index = (long)handle - 1;
    if (index < 0 || index >= devices) return 31;
    const char *text = values[index][which];
    if (text[0] == '-') return 2;
    if (text[0] == '!') return atoi(text + 1);
    *out = strtoull(text, NULL, 10);
    return 0;
}

/* A member of a structure: a value that is not supported reads as the sentinel of its width. */
static uint64_t member(void *handle, int which, uint64_t sentinel) {
    uint64_t value;
    return get(handle, which, &value) ? sentinel : value;
}

int amdsmi_init(uint64_t flags) { (void)flags; load(); return init_status; }
int amdsmi_shut_down(void) { return 0; }

struct lib_version { uint32_t major, minor, release, padding; const char *build; };
int amdsmi_get_lib_version(struct lib_version *out) {
    load();
    out->major = version[0]; out->minor = version[1]; out->release = version[2]; out->build = "stub";
    return 0;
}

int amdsmi_get_socket_handles(uint32_t *count, void **handles) {
    if (handles) handles[0] = (void *)1;
    *count = 1;
    return 0;
}

int amdsmi_get_processor_handles(void *socket, uint32_t *count, void **handles) {
    (void)socket;
    load();
    for (long i = 0; handles && i < devices; i++) handles[i] = (void *)(i + 1);
    *count = (uint32_t)devices;
    return 0;
}

int amdsmi_get_gpu_device_bdf(void *handle, uint64_t *out) {
    load();
    long i = (long)handle - 1;
    if (i < 0 || i >= devices) return 31;
    *out = (uint64_t)bdf[i][0] << 16 | (uint64_t)bdf[i][1] << 8 | bdf[i][2] << 3 | bdf[i][3];
    return 0;
}

int amdsmi_get_gpu_memory_total(void *handle, uint32_t type, uint64_t *out) {
    return type == 0 ? get(handle, TOTAL_BYTES, out) : 2;
}
int amdsmi_get_gpu_memory_usage(void *handle, uint32_t type, uint64_t *out) {
    return type == 0 ? get(handle, USED_BYTES, out) : 2;
}

struct vram_usage { uint32_t total, used, reserved[2]; };
int amdsmi_get_gpu_vram_usage(void *handle, struct vram_usage *out) {
    uint64_t total = 0, used = 0;
    int status = get(handle, TOTAL_MIB, &total);
    if (!status) status = get(handle, USED_MIB, &used);
    out->total = (uint32_t)total; out->used = (uint32_t)used;
    return status;
}

struct engine_usage { uint32_t gfx, umc, mm, reserved[13]; };
int amdsmi_get_gpu_activity(void *handle, struct engine_usage *out) {
    uint64_t gfx = 0xFFFF;
    int status = get(handle, GFX, &gfx);
    out->gfx = (uint32_t)gfx; out->umc = 0xFFFF; out->mm = 0xFFFF;
    return status == 2 ? 0 : status;
}

struct power_info {
    uint64_t socket_power; uint32_t current, average; uint64_t gfx, soc, mem; uint32_t limit, padding;
    uint64_t reserved[18];
};
int amdsmi_get_power_info(void *handle, struct power_info *out) {
    memset(out, 0, sizeof *out);
    out->socket_power = member(handle, SOCKET_W, 0xFFFF);
    out->current = (uint32_t)member(handle, CURRENT_W, 0xFFFF);
    out->average = (uint32_t)member(handle, AVERAGE_W, 0xFFFF);
    out->limit = (uint32_t)member(handle, LIMIT_W, 0xFFFFFFFF);
    return 0;
}

struct power_cap { uint64_t cap, standard, dpm, min, max, reserved[3]; };
int amdsmi_get_power_cap_info(void *handle, uint32_t sensor, struct power_cap *out) {
    (void)sensor;
    memset(out, 0, sizeof *out);
    return get(handle, CAP, &out->cap);
}

/* A stand-in for libnvidia-ml.so.1 that tells what a file says.
 *
 * The file named by NVML_STUB_WORLD holds lines "key = value"; it is read again whenever it was replaced
 * or changed, so that a test changes the world under a running process. Keys (G = GPU index, M = MIG slot):
 *
 *   driver_version, count, epoch                 epoch: a session opened under another epoch gets UNINITIALIZED
 *   <function>, all                              return code of that call, or of every call not named
 *   gpu.G.<function>, gpu.G.all                  the same for one GPU (its MIG instances included)
 *   gpu.G.mig.M.<function>                       the same for one MIG instance
 *   hang.<function>, gpu.G.hang.<function>       seconds that the call blocks (ends early when the key goes)
 *   gpu.G.uuid .name .minor .bus .memory_total .memory_free .utilization
 *         .memory_utilization .power_mw .power_limit_mw .clocks_reasons (bits) .mig (0/1) .max_mig
 *         .processes .mps_processes              "pid:bytes,pid:na"
 *         .gpm (0/1) .sm .tensor .dram           percent; .gpm_status = nvmlReturn of each single metric
 *         .event_types                           bits of nvmlDeviceGetSupportedEventTypes
 *   gpu.G.mig.M.uuid .name .gi .ci .memory_... .processes .sm .tensor .dram
 *   event.K = "G:type:data"                      events in order K = 0, 1, ...; each is delivered once
 *
 * A field that has no line gives NVML_ERROR_NOT_SUPPORTED. Structures are laid out as the public NVML interface
 * documents them; only what the tests need is here. nvml_stub_calls() returns how often each call was made, and
 * the same text goes to the file named by NVML_STUB_WORLD_CALLS when the process ends.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int Return;
enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, TIMEOUT = 10, VERSION_MISMATCH = 25, UNKNOWN = 999,
};

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } Process;
typedef struct {
    char bus_legacy[16]; unsigned domain, bus, device, pci_device, pci_subsystem; char bus_id[32];
} Pci;
typedef struct { void *device; unsigned long long type, data; unsigned gi, ci; } Event;
typedef struct { unsigned id; Return status; double value; struct { char *a, *b, *c; } info; } GpmMetric;
typedef struct { double sm, tensor, dram; struct timespec taken; int valid; Return status; } GpmSample;
typedef struct { unsigned version, count; GpmSample *first, *second; GpmMetric metrics[]; } GpmMetrics;
typedef struct { unsigned version, supported; } GpmSupport;

/* --- the world file ---------------------------------------------------------------------------------------- */

#define MAX_LINES 4096
static pthread_mutex_t world_lock = PTHREAD_MUTEX_INITIALIZER;
static struct { char *key, *value; } lines[MAX_LINES];
static int line_count;
static char *text;
static struct stat seen;

static char *trim(char *s)
{
    while (*s == ' ' || *s == '\t') s++;
    char *end = s + strlen(s);
    while (end > s && strchr(" \t\r\n", end[-1])) *--end = 0;
    return s;
}

static int by_key(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static void reload_locked(void)
{
    const char *path = getenv("NVML_STUB_WORLD");
    struct stat now;
    if (!path || stat(path, &now)) { line_count = 0; memset(&seen, 0, sizeof seen); return; }
    if (text && now.st_ino == seen.st_ino && now.st_size == seen.st_size
        && now.st_mtim.tv_sec == seen.st_mtim.tv_sec && now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec)
        return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    free(text);
    text = calloc(1, (size_t)now.st_size + 1);
    size_t got = fread(text, 1, (size_t)now.st_size, file);
    fclose(file);
    text[got] = 0;
    seen = now;
    line_count = 0;
    char *rest = text, *line;
    while ((line = strsep(&rest, "\n")) && line_count < MAX_LINES) {
        char *equals = strchr(line, '=');
        if (*line == '#' || !equals) continue;
        *equals = 0;
        lines[line_count].key = trim(line);
        lines[line_count++].value = trim(equals + 1);
    }
    qsort(lines, (size_t)line_count, sizeof lines[0], by_key);
}

/* Copies the value of a key into out; 0 when there is none. */
static int lookup(const char *key, char *out, size_t size)
{
    int found = 0, low = 0, high;
    pthread_mutex_lock(&world_lock);
    reload_locked();
    high = line_count - 1;
    while (low <= high && !found) {
        int middle = (low + high) / 2, order = strcmp(key, lines[middle].key);
        if (order == 0) { snprintf(out, size, "%s", lines[middle].value); found = 1; }
        else if (order < 0) high = middle - 1;
        else low = middle + 1;
    }
    pthread_mutex_unlock(&world_lock);
    return found;
}

static int lookup_number(const char *key, double *out)
{
    char value[64];
    if (!lookup(key, value, sizeof value)) return 0;
    *out = strtod(value, NULL);
    return 1;
}

/* --- devices ------------------------------------------------------------------------------------------------ */

typedef struct { int gpu, mig; char uuid[96]; } Device;
#define MAX_DEVICES 4096
static Device *devices[MAX_DEVICES];
static int device_count;

/* The same handle for the same (slot, uuid), as the driver does it. */
static Device *device_handle(int gpu, int mig, const char *uuid)
{
    Device *device = NULL;
    pthread_mutex_lock(&world_lock);
    for (int i = 0; i < device_count && !device; i++)
        if (devices[i]->gpu == gpu && devices[i]->mig == mig && !strcmp(devices[i]->uuid, uuid)) device = devices[i];
    if (!device && device_count < MAX_DEVICES) {
        device = calloc(1, sizeof *device);
        device->gpu = gpu;
        device->mig = mig;
        snprintf(device->uuid, sizeof device->uuid, "%s", uuid);
        devices[device_count++] = device;
    }
    pthread_mutex_unlock(&world_lock);
    return device;
}

static void device_key(char *key, size_t size, const Device *device, const char *field)
{
    if (device->mig < 0) snprintf(key, size, "gpu.%d.%s", device->gpu, field);
    else snprintf(key, size, "gpu.%d.mig.%d.%s", device->gpu, device->mig, field);
}

static int field_text(const Device *device, const char *field, char *out, size_t size)
{
    char key[160];
    device_key(key, sizeof key, device, field);
    return lookup(key, out, size);
}

static int field_number(const Device *device, const char *field, double *out)
{
    char key[160];
    device_key(key, sizeof key, device, field);
    return lookup_number(key, out);
}

/* --- every call passes here: count it, hang, fail as told --------------------------------------------------- */

#define MAX_CALLS 128
static struct { const char *name; unsigned long count; } calls[MAX_CALLS];
static int initialized, next_event;
static double opened_epoch;

static void count_call(const char *function)
{
    pthread_mutex_lock(&world_lock);
    for (int i = 0; i < MAX_CALLS; i++) {
        if (!calls[i].name) calls[i].name = function;
        if (calls[i].name == function || !strcmp(calls[i].name, function)) { calls[i].count++; break; }
    }
    pthread_mutex_unlock(&world_lock);
}

static double now_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + now.tv_nsec / 1e9;
}

static void hang(const char *key)
{
    struct timespec step = {0, 5 * 1000 * 1000};
    double seconds, started = now_seconds();
    while (lookup_number(key, &seconds) && now_seconds() - started < seconds) nanosleep(&step, NULL);
}

static Return told(const Device *device, const char *function)
{
    char key[160];
    double code;
    if (device && device->mig >= 0) {
        snprintf(key, sizeof key, "gpu.%d.mig.%d.%s", device->gpu, device->mig, function);
        if (lookup_number(key, &code)) return (Return)code;
    }
    if (device) {
        snprintf(key, sizeof key, "gpu.%d.%s", device->gpu, function);
        if (lookup_number(key, &code)) return (Return)code;
        snprintf(key, sizeof key, "gpu.%d.all", device->gpu);
        if (lookup_number(key, &code)) return (Return)code;
    }
    if (lookup_number(function, &code)) return (Return)code;
    if (lookup_number("all", &code)) return (Return)code;
    return SUCCESS;
}

static Return enter(const Device *device, const char *function)
{
    char key[160], uuid[96];
    double epoch = 0;
    count_call(function);
    if (device) {
        snprintf(key, sizeof key, "gpu.%d.hang.%s", device->gpu, function);
        hang(key);
    }
    snprintf(key, sizeof key, "hang.%s", function);
    hang(key);
    Return code = told(device, function);
    if (code) return code;
    if (!strncmp(function, "nvmlInit", 8)) return SUCCESS;
    lookup_number("epoch", &epoch);
    if (!initialized || epoch != opened_epoch) return UNINITIALIZED;
    if (device && (!field_text(device, "uuid", uuid, sizeof uuid) || strcmp(uuid, device->uuid))) return INVALID_ARGUMENT;
    return SUCCESS;
}

#define ENTER(device) do { Return code_ = enter((device), __func__); if (code_) return code_; } while (0)

static Return number_field(const Device *device, const char *field, unsigned *out)
{
    double value;
    if (!field_number(device, field, &value)) return NOT_SUPPORTED;
    *out = (unsigned)value;
    return SUCCESS;
}

const char *nvml_stub_calls(void)
{
    static char report[MAX_CALLS * 80];
    char *end = report;
    pthread_mutex_lock(&world_lock);
    for (int i = 0; i < MAX_CALLS && calls[i].name; i++)
        end += sprintf(end, "%s %lu\n", calls[i].name, calls[i].count);
    *end = 0;
    pthread_mutex_unlock(&world_lock);
    return report;
}

/* As if the process had just begun. No call may be under way. */
void nvml_stub_reset(void)
{
    memset(calls, 0, sizeof calls);
    initialized = next_event = 0;
}

__attribute__((destructor)) static void dump_calls(void)
{
    const char *path = getenv("NVML_STUB_WORLD_CALLS");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file) return;
    fputs(nvml_stub_calls(), file);
    fclose(file);
}

/* --- system and enumeration --------------------------------------------------------------------------------- */

Return nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    ENTER(NULL);
    opened_epoch = 0;
    lookup_number("epoch", &opened_epoch);
    initialized++;
    return SUCCESS;
}

Return nvmlShutdown(void)
{
    count_call(__func__);
    hang("hang.nvmlShutdown");
    if (!initialized) return UNINITIALIZED;
    Return code = told(NULL, __func__);
    if (code) return code;
    initialized--;
    return SUCCESS;
}

const char *nvmlErrorString(Return code)
{
    static char words[32];
    snprintf(words, sizeof words, "stub code %d", code);
    return words;
}

static Return copy_text(const char *value, char *out, unsigned size)
{
    if (strlen(value) >= size) return INSUFFICIENT_SIZE;
    strcpy(out, value);
    return SUCCESS;
}

Return nvmlSystemGetDriverVersion(char *out, unsigned size)
{
    char value[80];
    ENTER(NULL);
    return lookup("driver_version", value, sizeof value) ? copy_text(value, out, size) : NOT_SUPPORTED;
}

Return nvmlDeviceGetCount_v2(unsigned *out)
{
    double value = 0;
    ENTER(NULL);
    lookup_number("count", &value);
    *out = (unsigned)value;
    return SUCCESS;
}

Return nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out)
{
    Device slot = {(int)index, -1, ""};
    if (!field_text(&slot, "uuid", slot.uuid, sizeof slot.uuid)) {
        count_call(__func__);
        Return code = told(&slot, __func__);
        return code ? code : INVALID_ARGUMENT;
    }
    ENTER(&slot);
    *out = device_handle((int)index, -1, slot.uuid);
    return SUCCESS;
}

Return nvmlDeviceGetUUID(Device *device, char *out, unsigned size)
{
    ENTER(device);
    return copy_text(device->uuid, out, size);
}

Return nvmlDeviceGetName(Device *device, char *out, unsigned size)
{
    char value[96];
    ENTER(device);
    return field_text(device, "name", value, sizeof value) ? copy_text(value, out, size) : NOT_SUPPORTED;
}

Return nvmlDeviceGetMinorNumber(Device *device, unsigned *out)
{
    ENTER(device);
    return number_field(device, "minor", out);
}

Return nvmlDeviceGetPciInfo_v3(Device *device, Pci *out)
{
    ENTER(device);
    memset(out, 0, sizeof *out);
    return field_text(device, "bus", out->bus_id, sizeof out->bus_id) ? SUCCESS : NOT_SUPPORTED;
}

/* --- memory, utilization, power, clocks ----------------------------------------------------------------------- */

static Return memory_figures(const Device *device, unsigned long long *total, unsigned long long *free_bytes)
{
    double t, f;
    if (!field_number(device, "memory_total", &t) || !field_number(device, "memory_free", &f)) return NOT_SUPPORTED;
    *total = (unsigned long long)t;
    *free_bytes = (unsigned long long)f;
    return SUCCESS;
}

Return nvmlDeviceGetMemoryInfo(Device *device, Memory *out)
{
    ENTER(device);
    Return code = memory_figures(device, &out->total, &out->free);
    if (!code) out->used = out->total - out->free;
    return code;
}

Return nvmlDeviceGetUtilizationRates(Device *device, Utilization *out)
{
    unsigned memory = 0;
    ENTER(device);
    number_field(device, "memory_utilization", &memory);
    out->memory = memory;
    return number_field(device, "utilization", &out->gpu);
}

Return nvmlDeviceGetPowerUsage(Device *device, unsigned *out)
{
    ENTER(device);
    return number_field(device, "power_mw", out);
}

Return nvmlDeviceGetEnforcedPowerLimit(Device *device, unsigned *out)
{
    ENTER(device);
    return number_field(device, "power_limit_mw", out);
}

Return nvmlDeviceGetCurrentClocksEventReasons(Device *device, unsigned long long *out)
{
    double bits;
    ENTER(device);
    if (!field_number(device, "clocks_reasons", &bits)) return NOT_SUPPORTED;
    *out = (unsigned long long)bits;
    return SUCCESS;
}

/* --- processes ------------------------------------------------------------------------------------------------ */

static Return processes(const Device *device, const char *field, unsigned *count, Process *out)
{
    char list[8192];
    unsigned found = 0;
    double gi = 0xFFFFFFFFu, ci = 0xFFFFFFFFu;
    if (!field_text(device, field, list, sizeof list)) return NOT_SUPPORTED;
    if (device->mig >= 0) { field_number(device, "gi", &gi); field_number(device, "ci", &ci); }
    char *rest = list, *item;
    while ((item = strsep(&rest, ","))) {
        char *colon = strchr(item, ':');
        if (!colon) continue;
        if (out && found < *count) {
            out[found].pid = (unsigned)strtoul(item, NULL, 10);
            out[found].used = !strcmp(trim(colon + 1), "na") ? ~0ull : strtoull(colon + 1, NULL, 10);
            out[found].gi = (unsigned)gi;
            out[found].ci = (unsigned)ci;
        }
        found++;
    }
    Return code = found > *count ? INSUFFICIENT_SIZE : SUCCESS;
    *count = found;
    return code;
}

#define PROCESS_LIST(name, field) \
    Return name(Device *device, unsigned *count, Process *out) \
    { \
        ENTER(device); \
        return processes(device, field, count, out); \
    }

PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, "processes")
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps_processes")

/* --- MIG ------------------------------------------------------------------------------------------------------- */

Return nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending)
{
    ENTER(device);
    Return code = number_field(device, "mig", current);
    *pending = *current;
    return code;
}

Return nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *out)
{
    ENTER(device);
    *out = 7;
    number_field(device, "max_mig", out);
    return SUCCESS;
}

Return nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **out)
{
    Device slot = {device->gpu, (int)index, ""};
    ENTER(device);
    if (!field_text(&slot, "uuid", slot.uuid, sizeof slot.uuid)) return NOT_FOUND;
    *out = device_handle(slot.gpu, slot.mig, slot.uuid);
    return SUCCESS;
}

Return nvmlDeviceGetGpuInstanceId(Device *device, unsigned *out)
{
    ENTER(device);
    return number_field(device, "gi", out);
}

typedef struct { Device *device; unsigned id, profile, start, size; } GpuInstanceInfo;

/* An instance's handle is that of the MIG device that has it. */
Return nvmlDeviceGetGpuInstanceById(Device *device, unsigned id, Device **out)
{
    ENTER(device);
    for (int index = 0; index < 64; index++) {
        Device slot = {device->gpu, index, ""};
        unsigned found;
        if (!field_text(&slot, "uuid", slot.uuid, sizeof slot.uuid)) continue;
        if (number_field(&slot, "gi", &found) == SUCCESS && found == id) {
            *out = device_handle(slot.gpu, slot.mig, slot.uuid);
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

Return nvmlGpuInstanceGetInfo(Device *instance, GpuInstanceInfo *out)
{
    ENTER(instance);
    *out = (GpuInstanceInfo){instance, 0, 19, 0, 1};
    number_field(instance, "gi", &out->id);
    return number_field(instance, "start", &out->start);
}

Return nvmlDeviceGetComputeInstanceId(Device *device, unsigned *out)
{
    ENTER(device);
    return number_field(device, "ci", out);
}

/* --- GPM -------------------------------------------------------------------------------------------------------- */

Return nvmlGpmQueryDeviceSupport(Device *device, GpmSupport *out)
{
    double supported = 0;
    if (out->version != 1) return VERSION_MISMATCH;
    ENTER(device);
    field_number(device, "gpm", &supported);
    out->supported = (unsigned)supported;
    return SUCCESS;
}

Return nvmlGpmSampleAlloc(GpmSample **out)
{
    ENTER(NULL);
    *out = calloc(1, sizeof **out);
    return SUCCESS;
}

Return nvmlGpmSampleFree(GpmSample *sample)
{
    ENTER(NULL);
    free(sample);
    return SUCCESS;
}

static Return take_gpm(const Device *device, GpmSample *out)
{
    double status = 0;
    out->sm = out->tensor = out->dram = -1;
    field_number(device, "sm", &out->sm);
    field_number(device, "tensor", &out->tensor);
    field_number(device, "dram", &out->dram);
    field_number(device, "gpm_status", &status);
    out->status = (Return)status;
    clock_gettime(CLOCK_MONOTONIC, &out->taken);
    out->valid = 1;
    return SUCCESS;
}

Return nvmlGpmSampleGet(Device *device, GpmSample *out)
{
    ENTER(device);
    return take_gpm(device, out);
}

Return nvmlGpmMigSampleGet(Device *device, unsigned gi, GpmSample *out)
{
    ENTER(device);
    for (int mig = 0; mig < 64; mig++) {
        Device slot = {device->gpu, mig, ""};
        double instance;
        if (field_number(&slot, "gi", &instance) && (unsigned)instance == gi) return take_gpm(&slot, out);
    }
    return INVALID_ARGUMENT;
}

/* Gives what the later sample holds; both must be filled. */
Return nvmlGpmMetricsGet(GpmMetrics *metrics)
{
    if (metrics->version != 1) return VERSION_MISMATCH;
    ENTER(NULL);
    if (!metrics->first || !metrics->second || !metrics->first->valid || !metrics->second->valid) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < metrics->count; i++) {
        GpmMetric *metric = &metrics->metrics[i];
        const GpmSample *s = metrics->second;
        metric->value = metric->id == 2 ? s->sm : metric->id == 5 ? s->tensor : metric->id == 10 ? s->dram : -1;
        metric->status = s->status ? s->status : metric->value < 0 ? NOT_SUPPORTED : SUCCESS;
        if (metric->status) metric->value = 0;
    }
    return SUCCESS;
}

/* --- events ------------------------------------------------------------------------------------------------------ */

typedef struct { int registered[1024], unusable; } EventSet;
Return nvmlEventSetCreate(EventSet **out)
{
    ENTER(NULL);
    *out = calloc(1, sizeof **out);
    return SUCCESS;
}

Return nvmlEventSetFree(EventSet *set)
{
    count_call("nvmlEventSetFree");
    free(set);
    return SUCCESS;
}

Return nvmlDeviceGetSupportedEventTypes(Device *device, unsigned long long *out)
{
    double bits = 0;
    ENTER(device);
    field_number(device, "event_types", &bits);
    *out = (unsigned long long)bits;
    return SUCCESS;
}

Return nvmlDeviceRegisterEvents(Device *device, unsigned long long types, EventSet *set)
{
    Return code = enter(device, __func__);
    if (code) {
        set->unusable = code != NOT_SUPPORTED; /* as documented: the set must be freed then */
        return code;
    }
    set->registered[device->gpu] |= (int)types;
    return SUCCESS;
}

static int take_event(EventSet *set, Event *out)
{
    char key[32], value[64], uuid[96];
    int gpu;
    unsigned long long type, data;
    for (;;) {
        snprintf(key, sizeof key, "event.%d", next_event);
        if (!lookup(key, value, sizeof value) || sscanf(value, "%d:%llu:%llu", &gpu, &type, &data) != 3) return 0;
        next_event++;
        Device slot = {gpu, -1, ""};
        if (!(set->registered[gpu] & (int)type) || !field_text(&slot, "uuid", uuid, sizeof uuid)) continue;
        *out = (Event){device_handle(gpu, -1, uuid), type, data, 0xFFFFFFFFu, 0xFFFFFFFFu};
        return 1;
    }
}

Return nvmlEventSetWait_v2(EventSet *set, Event *out, unsigned milliseconds)
{
    struct timespec step = {0, 5 * 1000 * 1000};
    double end = now_seconds() + milliseconds / 1000.0;
    ENTER(NULL);
    for (;;) {
        Return code = set->unusable ? UNKNOWN : told(NULL, __func__);
        if (code) return code;
        if (take_event(set, out)) return SUCCESS;
        if (now_seconds() >= end) return TIMEOUT;
        nanosleep(&step, NULL);
    }
}

// The CUDA runtime of the emulated GPUs: a replacement for the functions of libcudart that PyTorch calls.
//
// "Device" memory is host memory that is filled with 0xff bytes, so that reading it before writing it gives NaN.
// Operations complete at once, with two exceptions that complete later, as on a GPU, so that code that does not wait
// for them reads old values:
// - a copy from a device to pinned host memory (`non_blocking=True`) happens when the host waits for its stream;
// - a collective of nccl.c runs in a thread.
// A function that is not in this file is the one of the real libcudart, which reports that there is no driver.
#define _GNU_SOURCE
#include "runtime.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "driver_types.h"

#define DEVICES_BY_DEFAULT 2
#define MAX_DEVICES 8
#define MEMORY ((size_t)16 << 30)  // of each device
#define ALIGNMENT 512

static __thread int current_device = 0;
static __thread cudaError_t last_error = cudaSuccess;

static cudaError_t report(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

static double milliseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

// --------------------------------------------------------------------------------------------------------- devices

static int installed_devices(void) {
    const char *text = getenv("EMULATED_GPUS");
    int count = text ? atoi(text) : DEVICES_BY_DEFAULT;
    return count > MAX_DEVICES ? MAX_DEVICES : count;
}

// PyTorch counts GPUs through libnvidia-ml if it can, because that does not initialize CUDA.
int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }

int nvmlDeviceGetCount_v2(int *count) {
    *count = installed_devices();
    return 0;
}

// The message of an out-of-memory error lists the processes that use the GPU: none.
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return 3; }  // not supported
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return 3; }

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) {
    *count = 0;
    return 0;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return 0;
}

// CUDA_VISIBLE_DEVICES selects devices by number, as with CUDA. Their order makes no difference here.
static int visible_devices(void) {
    int count = installed_devices();
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) return count;
    int selected = 0;
    while (*visible) {
        char *end;
        long number = strtol(visible, &end, 10);
        if (end == visible || number < 0 || number >= count) break;
        selected++;
        visible = *end == ',' ? end + 1 : end;
    }
    return selected;
}

cudaError_t cudaGetDeviceCount(int *count) {
    *count = visible_devices();
    return report(*count ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= visible_devices()) return report(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, "Emulated GPU");
    properties->totalGlobalMem = MEMORY;
    properties->major = 9;
    properties->multiProcessorCount = 132;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerBlockOptin = 227 << 10;
    properties->sharedMemPerMultiprocessor = 228 << 10;
    properties->regsPerMultiprocessor = 65536;
    properties->l2CacheSize = 50 << 20;
    properties->pciBusID = device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
    snprintf(id, length, "0000:%02x:00.0", device);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = 13000;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = 13000;
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------- memory

typedef struct block {
    struct block *next;
    char *start;
    size_t size;
    int device;  // -1 for pinned host memory
} block;

static block *blocks = NULL;
static size_t used[MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t completed = PTHREAD_COND_INITIALIZER;

static cudaError_t allocate(void **pointer, size_t size, int device) {
    if (device >= 0 && used[device] + size > MEMORY) return report(cudaErrorMemoryAllocation);
    block *added = malloc(sizeof *added);
    *added = (block){NULL, NULL, size, device};
    if (posix_memalign((void **)&added->start, ALIGNMENT, size ? size : 1)) return report(cudaErrorMemoryAllocation);
    memset(added->start, 0xff, size);
    pthread_mutex_lock(&lock);
    if (device >= 0) used[device] += size;
    added->next = blocks;
    blocks = added;
    pthread_mutex_unlock(&lock);
    *pointer = added->start;
    return cudaSuccess;
}

static cudaError_t release(void *pointer) {
    pthread_mutex_lock(&lock);
    for (block **link = &blocks; *link; link = &(*link)->next) {
        block *found = *link;
        if (found->start == pointer) {
            if (found->device >= 0) used[found->device] -= found->size;
            *link = found->next;
            free(found->start);
            free(found);
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

// The block that contains the address, or NULL. The caller holds the lock.
static block *block_of(const void *pointer) {
    for (block *found = blocks; found; found = found->next)
        if ((const char *)pointer >= found->start && (const char *)pointer < found->start + found->size) return found;
    return NULL;
}

cudaError_t cudaMalloc(void **pointer, size_t size) { return allocate(pointer, size, current_device); }

cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) { return allocate(pointer, size, -1); }

cudaError_t cudaDeviceSynchronize(void);

cudaError_t cudaFree(void *pointer) {
    cudaDeviceSynchronize();
    return release(pointer);
}

cudaError_t cudaFreeHost(void *pointer) { return cudaFree(pointer); }

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *total = MEMORY;
    *free_bytes = MEMORY - used[current_device];
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    memset(attributes, 0, sizeof *attributes);
    pthread_mutex_lock(&lock);
    block *found = block_of(pointer);
    if (found) {
        attributes->type = found->device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
        attributes->device = found->device < 0 ? 0 : found->device;
        attributes->devicePointer = (void *)pointer;
        attributes->hostPointer = found->device < 0 ? (void *)pointer : NULL;
    }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

// --------------------------------------------------------------------------------------------- streams and events

struct emulated_operation {
    emulated_operation *next;
    unsigned long number;
    void *stream;
    void *to;    // of a deferred copy; NULL for operations of nccl.c
    void *data;  // of a deferred copy: the values at the time of the call
    size_t size;
};

typedef struct {
    unsigned long number;  // of the last operation that the event includes
    void *stream;
    double time;
} event;

static emulated_operation *operations = NULL, **last_operation = &operations;
static unsigned long issued = 0;
volatile int emulated_pending = 0;  // read without the lock: the number of operations that are not complete

static emulated_operation *enqueue(void *stream, void *to, const void *from, size_t size) {
    emulated_operation *added = calloc(1, sizeof *added);
    added->stream = stream;
    if (to) {
        added->to = to;
        added->size = size;
        added->data = malloc(size);
        memcpy(added->data, from, size);
    }
    pthread_mutex_lock(&lock);
    added->number = ++issued;
    *last_operation = added;
    last_operation = &added->next;
    emulated_pending++;
    pthread_mutex_unlock(&lock);
    return added;
}

emulated_operation *emulated_enqueue(void *stream) { return enqueue(stream, NULL, NULL, 0); }

// The caller holds the lock.
static void complete(emulated_operation *operation) {
    emulated_operation **link = &operations;
    while (*link != operation) link = &(*link)->next;
    *link = operation->next;
    if (last_operation == &operation->next) last_operation = link;
    if (operation->to) memcpy(operation->to, operation->data, operation->size);
    free(operation->data);
    free(operation);
    emulated_pending--;
    pthread_cond_broadcast(&completed);
}

void emulated_complete(emulated_operation *operation) {
    pthread_mutex_lock(&lock);
    complete(operation);
    pthread_mutex_unlock(&lock);
}

// The first operation on a stream, or on any stream for `all`, up to a number. The caller holds the lock.
static emulated_operation *first_on(void *stream, int all, unsigned long number) {
    for (emulated_operation *found = operations; found && found->number <= number; found = found->next)
        if (all || found->stream == stream) return found;
    return NULL;
}

int emulated_is_first(emulated_operation *operation) {
    pthread_mutex_lock(&lock);
    emulated_operation *first = first_on(operation->stream, 0, operation->number);
    while (first != operation && first->to) {  // copies wait for nothing
        complete(first);
        first = first_on(operation->stream, 0, operation->number);
    }
    pthread_mutex_unlock(&lock);
    return first == operation;
}

static void wait_for(void *stream, int all, unsigned long number) {
    if (!emulated_pending) return;
    pthread_mutex_lock(&lock);
    emulated_operation *found;
    while ((found = first_on(stream, all, number))) {
        if (found->to)
            complete(found);
        else
            pthread_cond_wait(&completed, &lock);
    }
    pthread_mutex_unlock(&lock);
}

// Whether the operations are complete. Copies are completed here, since nothing else would complete them.
static cudaError_t query(void *stream, unsigned long number) {
    cudaError_t answer = cudaSuccess;
    pthread_mutex_lock(&lock);
    emulated_operation *found;
    while ((found = first_on(stream, 0, number))) {
        if (!found->to) {
            answer = cudaErrorNotReady;
            break;
        }
        complete(found);
    }
    pthread_mutex_unlock(&lock);
    return answer;
}

void emulated_wait_for_stream(void *stream) { wait_for(stream, 0, ~0ul); }

cudaError_t cudaDeviceSynchronize(void) {
    wait_for(NULL, 1, ~0ul);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(void *stream) {
    wait_for(stream, 0, ~0ul);
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(void *stream) { return query(stream, ~0ul); }

cudaError_t cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    *stream = malloc(1);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(void **stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(void **stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

cudaError_t cudaStreamGetPriority(void *stream, int *priority) {
    *priority = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(void *stream) {
    wait_for(stream, 0, ~0ul);
    free(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(void *stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(void *stream, enum cudaStreamCaptureStatus *status, ...) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(void **created, unsigned flags) {
    *created = calloc(1, sizeof(event));
    return cudaSuccess;
}

cudaError_t cudaEventCreate(void **created) { return cudaEventCreateWithFlags(created, 0); }

cudaError_t cudaEventDestroy(void *destroyed) {
    free(destroyed);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(event *recorded, void *stream, unsigned flags) {
    *recorded = (event){issued, stream, milliseconds()};
    return cudaSuccess;
}

cudaError_t cudaEventRecord(event *recorded, void *stream) { return cudaEventRecordWithFlags(recorded, stream, 0); }

cudaError_t cudaEventQuery(event *queried) { return query(queried->stream, queried->number); }

cudaError_t cudaEventSynchronize(event *awaited) {
    wait_for(awaited->stream, 0, awaited->number);
    return cudaSuccess;
}

// The host waits here, which a GPU would do by itself: kernels of the emulation run at once.
cudaError_t cudaStreamWaitEvent(void *stream, event *awaited, unsigned flags) {
    return cudaEventSynchronize(awaited);
}

cudaError_t cudaEventElapsedTime(float *elapsed, event *start, event *end) {
    *elapsed = (float)(end->time - start->time);
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------- copies and kernels

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, void *stream) {
    wait_for(stream, 0, ~0ul);
    pthread_mutex_lock(&lock);
    block *target = block_of(to), *source = block_of(from);
    int deferred = target && target->device < 0 && source && source->device >= 0;
    pthread_mutex_unlock(&lock);
    if (deferred)
        enqueue(stream, to, from, size);
    else
        memmove(to, from, size);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    cudaDeviceSynchronize();
    memmove(to, from, size);
    return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size, void *stream) {
    return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t size, void *stream) {
    wait_for(stream, 0, ~0ul);
    memset(to, value, size);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t size) { return cudaMemsetAsync(to, value, size, NULL); }

// kernels.py replaces the operators that launch kernels. An operator that it does not replace must not pass in silence.
static cudaError_t refuse_kernel(void) { return report(cudaErrorNotSupported); }

cudaError_t cudaLaunchKernel() { return refuse_kernel(); }
cudaError_t __cudaLaunchKernel() { return refuse_kernel(); }
cudaError_t cudaLaunchKernelExC() { return refuse_kernel(); }
cudaError_t cudaLaunchCooperativeKernel() { return refuse_kernel(); }

// ---------------------------------------------------------------------------------------------------------- errors

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char *cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation"
           : error == cudaErrorInvalidDevice  ? "cudaErrorInvalidDevice"
           : error == cudaErrorNotSupported   ? "cudaErrorNotSupported"
                                              : "cudaError";
}

const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory"
           : error == cudaErrorInvalidDevice  ? "invalid device ordinal"
           : error == cudaErrorNotSupported   ? "the emulated GPU has no kernel for this operator (see tests/emulated_gpu)"
                                              : "error of the emulated GPU";
}

// ---------------------------------------------------------------------------------------------------------- driver

// PyTorch loads libcuda.so.1, which is a link to this library, and looks up its functions. They serve kernels that are
// compiled at run time, by Triton or NVRTC, which the emulation does not have.
enum { DRIVER_NOT_SUPPORTED = 801 };
#define REFUSED(name) \
    int name() { return DRIVER_NOT_SUPPORTED; }
REFUSED(cuDeviceGet) REFUSED(cuDeviceGetAttribute) REFUSED(cuDevicePrimaryCtxRetain) REFUSED(cuFuncGetAttribute)
REFUSED(cuFuncSetAttribute) REFUSED(cuFuncSetCacheConfig) REFUSED(cuLaunchCooperativeKernel) REFUSED(cuLaunchKernel)
REFUSED(cuLinkAddData_v2) REFUSED(cuLinkComplete) REFUSED(cuLinkCreate_v2) REFUSED(cuModuleGetFunction)
REFUSED(cuModuleLoad) REFUSED(cuModuleLoadData) REFUSED(cuModuleLoadDataEx) REFUSED(cuModuleUnload)
REFUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor) REFUSED(cuPointerGetAttribute) REFUSED(cuTensorMapEncodeTiled)
REFUSED(cuCtxSetCurrent)

static int refused(void) { return DRIVER_NOT_SUPPORTED; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = refused;
    if (found) *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

int cuCtxGetCurrent(void **context) {
    *context = &current_device;
    return 0;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return 0;
}

int cuGetErrorString(int error, const char **text) {
    *text = "the emulated GPU does not support this";
    return 0;
}

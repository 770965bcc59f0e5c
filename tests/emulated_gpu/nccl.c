// NCCL between emulated GPUs of one machine: collectives through shared memory, called by PyTorch's own ProcessGroupNCCL.
//
// A call enqueues its operation on a stream and returns. A thread of the communicator executes the operations in order,
// so an operation that other ranks have not joined blocks its stream, and PyTorch's watchdog sees it time out. Ranks
// that call different collectives, or different sizes, hang, as with NCCL. The first collective connects the ranks, so it
// returns when all ranks have called it.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "runtime.h"

#define MAX_RANKS 8
#define CHUNK ((size_t)256 << 10)  // bytes that a rank exchanges at a time
#define VERSION 22800

// The values are those of nccl.h, which is not included because it requires all headers of CUDA.
typedef enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 } result;
typedef enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 } data_type;
typedef enum { SUM, PRODUCT, MAX, MIN, AVERAGE, SCALED_SUM } reduction;  // SCALED_SUM + i has the factor factors[i]
typedef enum { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND, RECEIVE } kind;
typedef struct { char name[128]; } unique_id;

typedef struct {
    _Atomic size_t filled;  // bytes that the sender has written and the receiver has not read
    char data[CHUNK];
} mailbox;

typedef struct {
    _Atomic int joined, connected, arrived, generation;
    char slots[MAX_RANKS][CHUNK];
    mailbox mailboxes[MAX_RANKS][MAX_RANKS];  // [sender][receiver]
} shared_memory;

typedef struct operation {
    struct operation *next;
    kind kind;
    const char *from;
    char *to;
    size_t count;
    data_type type;
    reduction reduction;
    int peer;  // or root
    size_t done;
} operation;

// The operations of one call, or of one group of calls, in order.
typedef struct task {
    struct task *next;
    struct communicator *communicator;
    operation *operations;
    emulated_operation *on_stream;
} task;

typedef struct communicator {
    int rank, size, splits, running, connected;
    unique_id id;
    shared_memory *shared;
    volatile int aborted, closed, connecting;
    task *tasks;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
} communicator;

static size_t size_of(data_type type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return sizes[type];
}

static void pause_briefly(void) { usleep(50); }

// ------------------------------------------------------------------------------------------------------- reductions

// A long double holds every value of every type.
static long double load(data_type type, const void *values, size_t i) {
    switch (type) {
        case INT8: return ((const int8_t *)values)[i];
        case UINT8: return ((const uint8_t *)values)[i];
        case INT32: return ((const int32_t *)values)[i];
        case UINT32: return ((const uint32_t *)values)[i];
        case INT64: return ((const int64_t *)values)[i];
        case UINT64: return ((const uint64_t *)values)[i];
        case FLOAT16: return ((const _Float16 *)values)[i];
        case FLOAT32: return ((const float *)values)[i];
        case FLOAT64: return ((const double *)values)[i];
        case BFLOAT16: break;
    }
    uint32_t bits = (uint32_t)((const uint16_t *)values)[i] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void store(data_type type, void *values, size_t i, long double value) {
    switch (type) {
        case INT8: ((int8_t *)values)[i] = value; return;
        case UINT8: ((uint8_t *)values)[i] = value; return;
        case INT32: ((int32_t *)values)[i] = value; return;
        case UINT32: ((uint32_t *)values)[i] = value; return;
        case INT64: ((int64_t *)values)[i] = value; return;
        case UINT64: ((uint64_t *)values)[i] = value; return;
        case FLOAT16: ((_Float16 *)values)[i] = value; return;
        case FLOAT32: ((float *)values)[i] = value; return;
        case FLOAT64: ((double *)values)[i] = value; return;
        case BFLOAT16: break;
    }
    float rounded = value;
    uint32_t bits;
    memcpy(&bits, &rounded, sizeof bits);
    if (rounded == rounded) bits += 0x7fff + ((bits >> 16) & 1);  // to the nearest, ties to even
    ((uint16_t *)values)[i] = bits >> 16;
}

static double factors[64];  // of the reductions that ncclRedOpCreatePreMulSum creates
static _Atomic int created = 0;

static void reduce(communicator *comm, operation *op, char *to, size_t bytes) {
    for (size_t i = 0; i < bytes / size_of(op->type); i++) {
        long double total = load(op->type, comm->shared->slots[0], i);
        for (int rank = 1; rank < comm->size; rank++) {
            long double value = load(op->type, comm->shared->slots[rank], i);
            switch (op->reduction) {
                case PRODUCT: total *= value; break;
                case MAX: total = value > total || value != value ? value : total; break;
                case MIN: total = value < total || value != value ? value : total; break;
                default: total += value;
            }
        }
        if (op->reduction == AVERAGE) total /= comm->size;
        if (op->reduction >= SCALED_SUM) total *= factors[(op->reduction - SCALED_SUM) % 64];
        store(op->type, to, i, total);
    }
}

// ------------------------------------------------------------------------------------------------------ collectives

// Wait for all ranks. Return 0 if the communicator was aborted.
static int barrier(communicator *comm) {
    shared_memory *shared = comm->shared;
    int generation = shared->generation;
    if (atomic_fetch_add(&shared->arrived, 1) + 1 == comm->size) {
        shared->arrived = 0;
        shared->generation++;
        return 1;
    }
    while (shared->generation == generation) {
        if (comm->aborted) return 0;
        pause_briefly();
    }
    return 1;
}

// Exchange a chunk of the part of a tensor that has number `part`. All ranks have written it to their slots.
static void read_chunk(communicator *comm, operation *op, int part, size_t start, size_t bytes) {
    size_t whole = op->count * size_of(op->type);
    int is_root = comm->rank == op->peer, is_mine = comm->rank == part;
    switch (op->kind) {
        case ALL_REDUCE: return reduce(comm, op, op->to + start, bytes);
        case REDUCE: return is_root ? reduce(comm, op, op->to + start, bytes) : (void)0;
        case REDUCE_SCATTER: return is_mine ? reduce(comm, op, op->to + start, bytes) : (void)0;
        case BROADCAST: memcpy(op->to + start, comm->shared->slots[op->peer], bytes); return;
        case GATHER:
            if (!is_root) return;
            break;
        case ALL_TO_ALL:
            if (!is_mine) return;
            break;
        default: break;
    }
    for (int rank = 0; rank < comm->size; rank++)
        memcpy(op->to + rank * whole + start, comm->shared->slots[rank], bytes);
}

static void run_collective(communicator *comm, operation *op) {
    size_t whole = op->count * size_of(op->type);
    int parts = op->kind == REDUCE_SCATTER || op->kind == ALL_TO_ALL ? comm->size : 1;
    for (int part = 0; part < parts; part++) {
        for (size_t start = 0; start < whole; start += CHUNK) {
            size_t bytes = whole - start < CHUNK ? whole - start : CHUNK;
            if (op->kind != BROADCAST || comm->rank == op->peer)
                memcpy(comm->shared->slots[comm->rank], op->from + part * whole + start, bytes);
            if (!barrier(comm)) return;
            read_chunk(comm, op, part, start, bytes);
            if (!barrier(comm)) return;
        }
    }
}

// Send or receive the next chunk if possible. Return whether the operation is complete.
static int advance(communicator *comm, operation *op) {
    size_t whole = op->count * size_of(op->type), rest = whole - op->done, bytes = rest < CHUNK ? rest : CHUNK;
    if (op->kind == SEND) {
        mailbox *box = &comm->shared->mailboxes[comm->rank][op->peer];
        if (rest && !box->filled) {
            memcpy(box->data, op->from + op->done, bytes);
            box->filled = bytes;
            op->done += bytes;
        }
    } else {
        mailbox *box = &comm->shared->mailboxes[op->peer][comm->rank];
        if (rest && box->filled) {
            memcpy(op->to + op->done, box->data, bytes);
            box->filled = 0;
            op->done += bytes;
        }
    }
    return op->done == whole;
}

static int is_first_of_its_kind(operation *operations, operation *op) {
    for (operation *before = operations; before != op; before = before->next)
        if (before->kind == op->kind && before->peer == op->peer && before->done < before->count * size_of(before->type))
            return 0;
    return 1;
}

static void run_task(communicator *comm, task *current) {
    while (!comm->aborted && !emulated_is_first(current->on_stream)) pause_briefly();
    for (operation *op = current->operations; op && !comm->aborted; op = op->next)
        if (op->kind < SEND) run_collective(comm, op);
    for (int complete = 0; !complete && !comm->aborted;) {
        complete = 1;
        for (operation *op = current->operations; op; op = op->next)
            if (op->kind >= SEND && !(is_first_of_its_kind(current->operations, op) && advance(comm, op))) complete = 0;
        if (!complete) pause_briefly();
    }
}

static void *execute(void *argument) {
    communicator *comm = argument;
    pthread_mutex_lock(&comm->lock);
    while (1) {
        while (!comm->tasks && !comm->closed) pthread_cond_wait(&comm->changed, &comm->lock);
        task *current = comm->tasks;
        if (!current) break;
        pthread_mutex_unlock(&comm->lock);
        run_task(comm, current);
        emulated_complete(current->on_stream);
        pthread_mutex_lock(&comm->lock);
        comm->tasks = current->next;
        for (operation *op = current->operations; op;) {
            operation *next = op->next;
            free(op);
            op = next;
        }
        free(current);
        pthread_cond_broadcast(&comm->changed);
    }
    pthread_mutex_unlock(&comm->lock);
    return NULL;
}

// ----------------------------------------------------------------------------------------------------------- groups

static __thread int depth = 0;
static __thread task *grouped = NULL;

static void connect_ranks(communicator *comm) {
    comm->connected = 1;
    atomic_fetch_add(&comm->shared->connected, 1);
    while (comm->shared->connected < comm->size && !comm->aborted) pause_briefly();
}

static result submit(task *added) {
    communicator *comm = added->communicator;
    int is_message = added->operations->kind == SEND || added->operations->kind == RECEIVE;
    comm->connecting = 1;  // `close_communicator` frees the communicator when it is 0
    if (!is_message && !comm->connected) connect_ranks(comm);
    pthread_mutex_lock(&comm->lock);
    task **link = &comm->tasks;
    while (*link) link = &(*link)->next;
    *link = added;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
    result found = comm->aborted ? SYSTEM_ERROR : SUCCESS;
    comm->connecting = 0;
    return found;
}

static result enqueue(communicator *comm, operation added, void *stream) {
    task *found = grouped;
    while (found && found->communicator != comm) found = found->next;
    if (!found) {
        found = calloc(1, sizeof *found);
        found->communicator = comm;
        found->on_stream = emulated_enqueue(stream);
        found->next = grouped;
        grouped = found;
    }
    operation **link = &found->operations;
    while (*link) link = &(*link)->next;
    *link = malloc(sizeof added);
    **link = added;
    (*link)->next = NULL;
    if (depth) return SUCCESS;
    grouped = NULL;
    return submit(found);
}

result ncclGroupStart(void) {
    depth++;
    return SUCCESS;
}

result ncclGroupEnd(void) {
    if (--depth) return SUCCESS;
    result found = SUCCESS;
    while (grouped) {
        task *first = grouped;
        grouped = first->next;
        first->next = NULL;
        result submitted = submit(first);
        if (submitted) found = submitted;
    }
    return found;
}

result ncclAllReduce(const void *from, void *to, size_t count, data_type type, reduction reduction, communicator *comm,
                     void *stream) {
    return enqueue(comm, (operation){NULL, ALL_REDUCE, from, to, count, type, reduction}, stream);
}

result ncclReduce(const void *from, void *to, size_t count, data_type type, reduction reduction, int root,
                  communicator *comm, void *stream) {
    return enqueue(comm, (operation){NULL, REDUCE, from, to, count, type, reduction, root}, stream);
}

result ncclBroadcast(const void *from, void *to, size_t count, data_type type, int root, communicator *comm,
                     void *stream) {
    return enqueue(comm, (operation){NULL, BROADCAST, from, to, count, type, SUM, root}, stream);
}

result ncclBcast(void *buffer, size_t count, data_type type, int root, communicator *comm, void *stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

result ncclAllGather(const void *from, void *to, size_t count, data_type type, communicator *comm, void *stream) {
    return enqueue(comm, (operation){NULL, ALL_GATHER, from, to, count, type}, stream);
}

result ncclGather(const void *from, void *to, size_t count, data_type type, int root, communicator *comm,
                  void *stream) {
    return enqueue(comm, (operation){NULL, GATHER, from, to, count, type, SUM, root}, stream);
}

result ncclReduceScatter(const void *from, void *to, size_t count, data_type type, reduction reduction,
                         communicator *comm, void *stream) {
    return enqueue(comm, (operation){NULL, REDUCE_SCATTER, from, to, count, type, reduction}, stream);
}

result ncclAlltoAll(const void *from, void *to, size_t count, data_type type, communicator *comm, void *stream) {
    return enqueue(comm, (operation){NULL, ALL_TO_ALL, from, to, count, type}, stream);
}

result ncclSend(const void *from, size_t count, data_type type, int peer, communicator *comm, void *stream) {
    return enqueue(comm, (operation){NULL, SEND, from, NULL, count, type, SUM, peer}, stream);
}

result ncclRecv(void *to, size_t count, data_type type, int peer, communicator *comm, void *stream) {
    return enqueue(comm, (operation){NULL, RECEIVE, NULL, to, count, type, SUM, peer}, stream);
}

result ncclRedOpCreatePreMulSum(reduction *op, void *scalar, data_type type, int residence, communicator *comm) {
    int index = atomic_fetch_add(&created, 1);
    factors[index % 64] = load(type, scalar, 0);
    *op = SCALED_SUM + index;
    return SUCCESS;
}

result ncclRedOpDestroy(reduction op, communicator *comm) { return SUCCESS; }

// ---------------------------------------------------------------------------------------------------- communicators

result ncclGetUniqueId(unique_id *id) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    memset(id, 0, sizeof *id);
    snprintf(id->name, sizeof id->name, "/emulated_nccl_%d_%ld_%ld", getpid(), (long)now.tv_sec, now.tv_nsec);
    return SUCCESS;
}

// Create a communicator. Waits for all its ranks.
result ncclCommInitRank(communicator **created, int size, unique_id id, int rank) {
    if (size > MAX_RANKS) return INVALID_ARGUMENT;
    int file = shm_open(id.name, O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, sizeof(shared_memory))) return SYSTEM_ERROR;
    communicator *comm = calloc(1, sizeof *comm);
    comm->shared = mmap(NULL, sizeof(shared_memory), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (comm->shared == MAP_FAILED) return SYSTEM_ERROR;
    comm->rank = rank;
    comm->size = size;
    comm->id = id;
    pthread_mutex_init(&comm->lock, NULL);
    pthread_cond_init(&comm->changed, NULL);
    atomic_fetch_add(&comm->shared->joined, 1);
    while (comm->shared->joined < size) pause_briefly();
    shm_unlink(id.name);
    pthread_create(&comm->thread, NULL, execute, comm);
    *created = comm;
    return SUCCESS;
}

result ncclCommInitRankConfig(communicator **created, int size, unique_id id, int rank, void *config) {
    return ncclCommInitRank(created, size, id, rank);
}

result ncclCommInitRankScalable(communicator **created, int size, int rank, int ids, unique_id *id, void *config) {
    return ncclCommInitRank(created, size, id[0], rank);
}

static void drain(communicator *comm) {
    pthread_mutex_lock(&comm->lock);
    while (comm->tasks) pthread_cond_wait(&comm->changed, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
}

// Ranks with the same color form a new communicator, in the order of their keys.
result ncclCommSplit(communicator *comm, int color, int key, communicator **created, void *config) {
    drain(comm);
    int mine[2] = {color, key}, rank = 0, size = 0;
    memcpy(comm->shared->slots[comm->rank], mine, sizeof mine);
    if (!barrier(comm)) return SYSTEM_ERROR;
    for (int other = 0; other < comm->size; other++) {
        int its[2];
        memcpy(its, comm->shared->slots[other], sizeof its);
        if (its[0] != color) continue;
        size++;
        if (its[1] < key || (its[1] == key && other < comm->rank)) rank++;
    }
    if (!barrier(comm)) return SYSTEM_ERROR;
    unique_id id = {0};
    snprintf(id.name, sizeof id.name, "%.90s_%d_%d", comm->id.name, comm->splits++, color);
    *created = NULL;
    return color < 0 ? SUCCESS : ncclCommInitRank(created, size, id, rank);
}

static result close_communicator(communicator *comm, int abort) {
    comm->aborted = abort;
    while (comm->connecting) pause_briefly();
    pthread_mutex_lock(&comm->lock);
    comm->closed = 1;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
    pthread_join(comm->thread, NULL);
    munmap(comm->shared, sizeof(shared_memory));
    free(comm);
    return SUCCESS;
}

result ncclCommFinalize(communicator *comm) {
    drain(comm);
    return SUCCESS;
}

result ncclCommDestroy(communicator *comm) { return close_communicator(comm, 0); }
result ncclCommAbort(communicator *comm) { return close_communicator(comm, 1); }

result ncclCommGetAsyncError(communicator *comm, result *error) {
    *error = SUCCESS;
    return SUCCESS;
}

result ncclCommCount(communicator *comm, int *count) {
    *count = comm->size;
    return SUCCESS;
}

result ncclCommUserRank(communicator *comm, int *rank) {
    *rank = comm->rank;
    return SUCCESS;
}

result ncclGetVersion(int *version) {
    *version = VERSION;
    return SUCCESS;
}

const char *ncclGetErrorString(result error) { return error == SUCCESS ? "no error" : "error of the emulated NCCL"; }
const char *ncclGetLastError(communicator *comm) { return ""; }

// Registration of memory makes no difference here.
result ncclCommRegister(communicator *comm, void *buffer, size_t size, void **handle) { return SUCCESS; }
result ncclCommDeregister(communicator *comm, void *handle) { return SUCCESS; }

#define REFUSED(name) \
    result name() { return INVALID_USAGE; }
REFUSED(ncclCommGetUniqueId) REFUSED(ncclCommGrow) REFUSED(ncclCommInitAll) REFUSED(ncclCommMemStats)
REFUSED(ncclCommResume) REFUSED(ncclCommRevoke) REFUSED(ncclCommShrink) REFUSED(ncclCommSuspend)
REFUSED(ncclCommWindowDeregister) REFUSED(ncclCommWindowRegister) REFUSED(ncclMemAlloc) REFUSED(ncclMemFree)
REFUSED(ncclPutSignal) REFUSED(ncclSignal) REFUSED(ncclWaitSignal) REFUSED(ncclGroupSimulateEnd)

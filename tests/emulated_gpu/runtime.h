// Streams of the emulated GPUs, shared by runtime.c and nccl.c.
#pragma once
#include <stddef.h>

typedef struct emulated_operation emulated_operation;

// Enqueue an operation. `emulated_complete` completes and frees it.
emulated_operation *emulated_enqueue(void *stream);
// Return whether the operations that were enqueued on the same stream before this one are complete.
int emulated_is_first(emulated_operation *operation);
void emulated_complete(emulated_operation *operation);
// Wait until all operations on the stream are complete.
void emulated_wait_for_stream(void *stream);

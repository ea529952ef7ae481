/*
 * A custom node that behaves as its parameters say, well or badly, and keeps account of its memory.
 *
 * initialize: "ok", "error", "abort", "wait", "hang"
 * mark: a file that gets a byte for each call that hangs
 * inputs_info, outputs_info: "ok", "error", "null", "negative", "huge", "no_name", "no_shape"
 * execute: "echo", "write", "address", "return_input", "wait", "hang", "hang_if_negative", "segv", "segv_if_negative",
 *          "build" (x and the number of the build; waits if x is negative),
 *          "abort", "error", "null", "zero", "negative", "huge", or "outputs" with the parameter outputs, one letter for each:
 *          g good, z zero size, c scalar, n no name, p precision unspecified, q precision unknown, s too short,
 *          d data null, m much data announced, h huge sizes, r absurd rank, x sizes null, i impossible zero size,
 *          a data of the output before
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "custom_node_interface.h"

#define CAPACITY 65536

#ifndef BUILD
#define BUILD 0
#endif

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static void* made[CAPACITY];
static int made_count, released_count, unknown_count, initialized_count, deinitialized_count, waiting_count, is_open;
static int released_too_late;
static const void* lent;

static int locked(const int* value) {
    pthread_mutex_lock(&lock);
    int copy = *value;
    pthread_mutex_unlock(&lock);
    return copy;
}

int fixture_made(void) { return locked(&made_count); }
int fixture_released(void) { return locked(&released_count); }
int fixture_unknown(void) { return locked(&unknown_count); }
int fixture_initialized(void) { return locked(&initialized_count); }
int fixture_deinitialized(void) { return locked(&deinitialized_count); }
int fixture_waiting(void) { return locked(&waiting_count); }
int fixture_build(void) { return BUILD; }
int fixture_released_too_late(void) { return locked(&released_too_late); }

void fixture_open(void) {
    pthread_mutex_lock(&lock);
    is_open = 1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void wait_until_open(void) {
    pthread_mutex_lock(&lock);
    waiting_count++;
    while (!is_open) pthread_cond_wait(&changed, &lock);
    waiting_count--;
    pthread_mutex_unlock(&lock);
}

static void* make(size_t bytes) {
    void* memory = malloc(bytes ? bytes : 1);
    pthread_mutex_lock(&lock);
    for (int index = 0; index < CAPACITY; index++)
        if (!made[index]) {
            made[index] = memory;
            break;
        }
    made_count++;
    pthread_mutex_unlock(&lock);
    return memory;
}

int release(void* ptr, void* manager) {
    int status = 1;
    pthread_mutex_lock(&lock);
    released_too_late += initialized_count == deinitialized_count;
    for (int index = 0; index < CAPACITY && status; index++)
        if (made[index] == ptr) {
            made[index] = NULL;
            released_count++;
            free(ptr);
            status = 0;
        }
    if (ptr == lent) status = 0;
    unknown_count += status;
    pthread_mutex_unlock(&lock);
    return status;
}

static const char* param(const struct CustomNodeParam* params, int count, const char* key) {
    for (int index = 0; index < count; index++)
        if (!strcmp(params[index].key, key)) return params[index].value;
    return "ok";
}

/* Never end; the file gets a byte for each call that does not, so that another process can wait for it. */
static void hang(const char* mark) {
    FILE* file = fopen(mark, "a");
    if (file) fputc('.', file), fclose(file);
    for (;;) pause();
}

int initialize(void** manager, const struct CustomNodeParam* params, int count) {
    const char* mode = param(params, count, "initialize");
    if (!strcmp(mode, "error")) return 5;
    if (!strcmp(mode, "abort")) abort();
    if (!strcmp(mode, "wait")) wait_until_open();
    if (!strcmp(mode, "hang")) hang(param(params, count, "mark"));
    *manager = malloc(1);
    pthread_mutex_lock(&lock);
    initialized_count++;
    pthread_mutex_unlock(&lock);
    return 0;
}

int deinitialize(void* manager) {
    free(manager);
    pthread_mutex_lock(&lock);
    deinitialized_count++;
    pthread_mutex_unlock(&lock);
    return 0;
}

static int info(const char* name, const char* mode, struct CustomNodeTensorInfo** info, int* count) {
    if (!strcmp(mode, "error")) return 3;
    *count = 1;
    if (!strcmp(mode, "null")) return 0;
    struct CustomNodeTensorInfo* item = *info = make(sizeof *item);
    *item = (struct CustomNodeTensorInfo){name, NULL, 2, FP32};
    if (!strcmp(mode, "negative")) *count = -1;
    if (!strcmp(mode, "huge")) *count = 1 << 30;
    if (*count != 1 || !strcmp(mode, "no_shape")) return 0;
    if (!strcmp(mode, "no_name")) item->name = NULL;
    item->dims = make(2 * sizeof(uint64_t));
    item->dims[0] = 1;
    item->dims[1] = 0;
    return 0;
}

int getInputsInfo(
    struct CustomNodeTensorInfo** items, int* count, const struct CustomNodeParam* params, int params_count, void* manager) {
    return info("x", param(params, params_count, "inputs_info"), items, count);
}

int getOutputsInfo(
    struct CustomNodeTensorInfo** items, int* count, const struct CustomNodeParam* params, int params_count, void* manager) {
    return info("y", param(params, params_count, "outputs_info"), items, count);
}

static struct CustomNodeTensor output(const char* name, CustomNodeTensorPrecision precision, uint64_t bytes, uint64_t rank) {
    struct CustomNodeTensor tensor = {name, make(bytes), bytes, make(rank * sizeof(uint64_t)), rank, precision};
    return tensor;
}

static struct CustomNodeTensor variant(char letter, int index) {
    static const char* names[] = {"o0", "o1", "o2", "o3", "o4", "o5", "o6", "o7", "o8", "o9"};
    struct CustomNodeTensor tensor = output(names[index % 10], U8, 6, 2);
    memset(tensor.data, index, 6);
    tensor.dims[0] = 2;
    tensor.dims[1] = 3;
    if (letter == 'n') tensor.name = NULL;
    if (letter == 'p') tensor.precision = UNSPECIFIED;
    if (letter == 'q') tensor.precision = (CustomNodeTensorPrecision)77;
    if (letter == 's') tensor.dataBytes = 5;
    if (letter == 'm') tensor.dataBytes = UINT64_MAX;
    if (letter == 'h') tensor.dims[0] = tensor.dims[1] = UINT64_MAX;
    if (letter == 'r') tensor.dimsCount = UINT64_MAX / 2;
    if (letter == 'c') tensor.dimsCount = 0, tensor.dataBytes = 1;
    if (letter == 'z') tensor.dims[0] = 0, tensor.dataBytes = 0;
    if (letter == 'i') tensor.dims[0] = 0, tensor.dims[1] = UINT64_MAX, tensor.dataBytes = 0;
    if (letter == 'd') release(tensor.data, NULL), tensor.data = NULL;
    if (letter == 'x') release(tensor.dims, NULL), tensor.dims = NULL;
    return tensor;
}

static void variants(const char* letters, struct CustomNodeTensor** outputs, int* count) {
    *count = (int)strlen(letters);
    *outputs = make(*count * sizeof **outputs);
    for (int index = 0; index < *count; index++) {
        (*outputs)[index] = variant(letters[index], index);
        if (letters[index] == 'a' && index && (*outputs)[index - 1].data) {
            release((*outputs)[index].data, NULL);
            (*outputs)[index].data = (*outputs)[index - 1].data;
        }
    }
}

static void echo(const struct CustomNodeTensor* inputs, int inputs_count, struct CustomNodeTensor** outputs, int* count) {
    *outputs = make(inputs_count * sizeof **outputs);
    *count = inputs_count;
    for (int index = 0; index < inputs_count; index++) {
        const struct CustomNodeTensor* from = &inputs[index];
        struct CustomNodeTensor* to = &(*outputs)[index];
        const char* name = !strcmp(from->name, "x") ? "y" : !strcmp(from->name, "a") ? "b" : "other";
        *to = output(name, from->precision, from->dataBytes, from->dimsCount);
        memcpy(to->data, from->data, from->dataBytes);
        memcpy(to->dims, from->dims, from->dimsCount * sizeof(uint64_t));
    }
}

static void addresses(const struct CustomNodeTensor* input, struct CustomNodeTensor** outputs, int* count) {
    *count = 1;
    *outputs = make(sizeof **outputs);
    **outputs = output("y", I64, 2 * sizeof(int64_t), 1);
    (*outputs)->dims[0] = 2;
    ((int64_t*)(*outputs)->data)[0] = (int64_t)input->data;
    ((int64_t*)(*outputs)->data)[1] = (int64_t)(*outputs)->data;
}

static void return_input(const struct CustomNodeTensor* input, struct CustomNodeTensor** outputs, int* count) {
    *count = 1;
    *outputs = make(sizeof **outputs);
    **outputs = *input;
    (*outputs)->name = "y";
    (*outputs)->dims = make(input->dimsCount * sizeof(uint64_t));
    memcpy((*outputs)->dims, input->dims, input->dimsCount * sizeof(uint64_t));
    pthread_mutex_lock(&lock);
    lent = input->data;
    pthread_mutex_unlock(&lock);
}

static void add_build(float* data, uint64_t bytes) {
    for (uint64_t index = 0; index < bytes / sizeof *data; index++) data[index] += BUILD;
}

static int give_count(int number, struct CustomNodeTensor** outputs, int* count) {
    *outputs = make(sizeof **outputs);
    *count = number;
    return 0;
}

int execute(
    const struct CustomNodeTensor* inputs, int inputs_count, struct CustomNodeTensor** outputs, int* count,
    const struct CustomNodeParam* params, int params_count, void* manager) {
    const char* mode = param(params, params_count, "execute");
    if (!strcmp(mode, "error")) return 7;
    if (!strcmp(mode, "zero")) return give_count(0, outputs, count);
    if (!strcmp(mode, "negative")) return give_count(-3, outputs, count);
    if (!strcmp(mode, "huge")) return give_count(1 << 30, outputs, count);
    if (!strcmp(mode, "null")) {
        *outputs = NULL;
        *count = 1;
        return 0;
    }
    if (!strcmp(mode, "abort")) abort();
    if (!strcmp(mode, "segv") || (!strcmp(mode, "segv_if_negative") && ((const float*)inputs[0].data)[0] < 0))
        *(volatile int*)8 = 1;
    if (!strcmp(mode, "hang") || (!strcmp(mode, "hang_if_negative") && ((const float*)inputs[0].data)[0] < 0))
        hang(param(params, params_count, "mark"));
    if (!strcmp(mode, "wait") || (!strcmp(mode, "build") && ((const float*)inputs[0].data)[0] < 0)) wait_until_open();
    if (!strcmp(mode, "write"))
        for (int index = 0; index < inputs_count; index++) memset(inputs[index].data, 42, inputs[index].dataBytes);
    if (!strcmp(mode, "outputs"))
        variants(param(params, params_count, "outputs"), outputs, count);
    else if (!strcmp(mode, "address"))
        addresses(inputs, outputs, count);
    else if (!strcmp(mode, "return_input"))
        return_input(inputs, outputs, count);
    else
        echo(inputs, inputs_count, outputs, count);
    if (!strcmp(mode, "build")) add_build((float*)(*outputs)->data, (*outputs)->dataBytes);
    return 0;
}

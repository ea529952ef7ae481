/* Shared code of both custom nodes. All memory is from malloc, so `release` calls free. */
#ifndef NODES_H
#define NODES_H

#include <stdlib.h>
#include <string.h>

#include "custom_node_interface.h"

#define COLUMNS 10

/* Find an input by its name; return NULL if it is missing or not FP32. */
static inline const struct CustomNodeTensor* find_input(
    const struct CustomNodeTensor* inputs, int inputsCount, const char* name) {
    for (int i = 0; i < inputsCount; i++)
        if (strcmp(inputs[i].name, name) == 0) return inputs[i].precision == FP32 ? &inputs[i] : NULL;
    return NULL;
}

/* Find a parameter by its key; return `otherwise` if it is not configured. */
static inline const char* find_param(
    const struct CustomNodeParam* params, int paramsCount, const char* key, const char* otherwise) {
    for (int i = 0; i < paramsCount; i++)
        if (strcmp(params[i].key, key) == 0) return params[i].value;
    return otherwise;
}

/* Allocate an output; return 0 on success. */
static inline int allocate(
    struct CustomNodeTensor* output, const char* name, CustomNodeTensorPrecision precision, uint64_t itemBytes,
    const uint64_t* dims, uint64_t dimsCount) {
    output->name = name;
    output->precision = precision;
    output->dimsCount = dimsCount;
    output->dataBytes = itemBytes;
    for (uint64_t i = 0; i < dimsCount; i++) output->dataBytes *= dims[i];
    output->dims = malloc(dimsCount * sizeof *dims);
    output->data = malloc(output->dataBytes);
    if (output->dims == NULL || output->data == NULL) return 1;
    memcpy(output->dims, dims, dimsCount * sizeof *dims);
    return 0;
}

/* Free outputs that will not be returned. */
static inline int discard(struct CustomNodeTensor* outputs, int count) {
    for (int i = 0; i < count; i++) {
        free(outputs[i].dims);
        free(outputs[i].data);
    }
    free(outputs);
    return 1;
}

/* Describe an input or output; a size of 0 means any. */
static inline int describe(
    struct CustomNodeTensorInfo* info, const char* name, CustomNodeTensorPrecision precision, const uint64_t* dims,
    uint64_t dimsCount) {
    info->name = name;
    info->precision = precision;
    info->dimsCount = dimsCount;
    info->dims = malloc(dimsCount * sizeof *dims);
    if (info->dims == NULL) return 1;
    memcpy(info->dims, dims, dimsCount * sizeof *dims);
    return 0;
}

/* Neither node has a state. */
int initialize(void** manager, const struct CustomNodeParam* params, int paramsCount) {
    (void)manager, (void)params, (void)paramsCount;
    return 0;
}

int deinitialize(void* manager) {
    (void)manager;
    return 0;
}

int release(void* ptr, void* manager) {
    (void)manager;
    free(ptr);
    return 0;
}

#endif

/* Shared code of the benchmark nodes: one input and one output of FP32 [1, any size]. */
#include <stdint.h>
#include <stdlib.h>

#include "custom_node_interface.h"

int initialize(void** manager, const struct CustomNodeParam* params, int params_count) {
    return 0;
}

int deinitialize(void* manager) {
    return 0;
}

int release(void* pointer, void* manager) {
    free(pointer);
    return 0;
}

static uint64_t* dims_of(uint64_t size) {
    uint64_t* dims = malloc(2 * sizeof *dims);
    dims[0] = 1;
    dims[1] = size;
    return dims;
}

static int describe(const char* name, struct CustomNodeTensorInfo** info, int* count) {
    *info = malloc(sizeof **info);
    **info = (struct CustomNodeTensorInfo){name, dims_of(0), 2, FP32};
    *count = 1;
    return 0;
}

int getInputsInfo(struct CustomNodeTensorInfo** info, int* count, const struct CustomNodeParam* params,
                  int params_count, void* manager) {
    return describe("x", info, count);
}

int getOutputsInfo(struct CustomNodeTensorInfo** info, int* count, const struct CustomNodeParam* params,
                   int params_count, void* manager) {
    return describe("y", info, count);
}

static int give(struct CustomNodeTensor** outputs, int* count, uint64_t size, float* values) {
    *outputs = malloc(sizeof **outputs);
    **outputs =
        (struct CustomNodeTensor){"y", (uint8_t*)values, size * sizeof *values, dims_of(size), 2, FP32};
    *count = 1;
    return 0;
}

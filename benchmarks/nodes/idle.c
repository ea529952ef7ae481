/* Custom node that ignores its input and returns a buffer of the same size; records the bytes copied before its call. */
#include "plain.h"

extern uint64_t copied_bytes(void) __attribute__((weak));

static uint64_t copied_before;

uint64_t copied_before_node(void) {
    return copied_before;
}

int execute(const struct CustomNodeTensor* inputs, int inputs_count, struct CustomNodeTensor** outputs,
            int* outputs_count, const struct CustomNodeParam* params, int params_count, void* manager) {
    copied_before = copied_bytes ? copied_bytes() : 0;
    return give(outputs, outputs_count, inputs[0].dims[1], malloc(inputs[0].dataBytes));
}

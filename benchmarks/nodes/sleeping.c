/* Custom node that sleeps for 20 ms and returns one zero. */
#include <time.h>

#include "plain.h"

int execute(const struct CustomNodeTensor* inputs, int inputs_count, struct CustomNodeTensor** outputs,
            int* outputs_count, const struct CustomNodeParam* params, int params_count, void* manager) {
    struct timespec pause = {0, 20 * 1000 * 1000};
    nanosleep(&pause, NULL);
    return give(outputs, outputs_count, 1, calloc(1, sizeof(float)));
}

/*
 * Gathering node: selects one of `candidates` FP32 [N,1,10] as `best` FP32 [1,10], with its index `which` INT32 [1].
 *
 * The parameter `criterion` is largest_sum or smallest_sum.
 */
#include "nodes.h"

/* Return 1 for the largest sum, -1 for the smallest, 0 if the criterion is invalid. */
static int direction(const struct CustomNodeParam* params, int paramsCount) {
    const char* criterion = find_param(params, paramsCount, "criterion", "largest_sum");
    if (strcmp(criterion, "largest_sum") == 0) return 1;
    return strcmp(criterion, "smallest_sum") == 0 ? -1 : 0;
}

static int32_t choose(const float* candidates, uint64_t rows, int sign) {
    int32_t best = 0;
    double best_sum = 0;
    for (uint64_t row = 0; row < rows; row++) {
        double sum = 0;
        for (int column = 0; column < COLUMNS; column++) sum += candidates[row * COLUMNS + column];
        if (row == 0 || sign * sum > sign * best_sum) {
            best = (int32_t)row;
            best_sum = sum;
        }
    }
    return best;
}

int execute(
    const struct CustomNodeTensor* inputs, int inputsCount, struct CustomNodeTensor** outputs, int* outputsCount,
    const struct CustomNodeParam* params, int paramsCount, void* manager) {
    (void)manager;
    const struct CustomNodeTensor* candidates = find_input(inputs, inputsCount, "candidates");
    int sign = direction(params, paramsCount);
    if (sign == 0 || candidates == NULL || candidates->dimsCount != 3 || candidates->dims[0] == 0) return 1;
    if (candidates->dims[1] != 1 || candidates->dims[2] != COLUMNS) return 1;

    struct CustomNodeTensor* made = calloc(2, sizeof *made);
    if (made == NULL) return 1;
    if (allocate(&made[0], "best", FP32, sizeof(float), (uint64_t[]){1, COLUMNS}, 2) ||
        allocate(&made[1], "which", I32, sizeof(int32_t), (uint64_t[]){1}, 1))
        return discard(made, 2);
    int32_t best = choose((const float*)candidates->data, candidates->dims[0], sign);
    memcpy(made[0].data, candidates->data + (uint64_t)best * made[0].dataBytes, made[0].dataBytes);
    memcpy(made[1].data, &best, sizeof best);
    *outputs = made;
    *outputsCount = 2;
    return 0;
}

int getInputsInfo(
    struct CustomNodeTensorInfo** info, int* infoCount, const struct CustomNodeParam* params, int paramsCount,
    void* manager) {
    (void)params, (void)paramsCount, (void)manager;
    *info = calloc(1, sizeof **info);
    if (*info == NULL) return 1;
    *infoCount = 1;
    if (describe(*info, "candidates", FP32, (uint64_t[]){0, 1, COLUMNS}, 3) == 0) return 0;
    free(*info);
    return 1;
}

/* Fails on an invalid criterion, so that the pipeline does not load instead of failing every request. */
int getOutputsInfo(
    struct CustomNodeTensorInfo** info, int* infoCount, const struct CustomNodeParam* params, int paramsCount,
    void* manager) {
    (void)manager;
    if (direction(params, paramsCount) == 0) return 1;
    *info = calloc(2, sizeof **info);
    if (*info == NULL) return 1;
    *infoCount = 2;
    if (describe(&(*info)[0], "best", FP32, (uint64_t[]){1, COLUMNS}, 2) == 0 &&
        describe(&(*info)[1], "which", I32, (uint64_t[]){1}, 1) == 0)
        return 0;
    free((*info)[0].dims);
    free(*info);
    return 1;
}

/*
 * Demultiplexer: multiplies `numbers` FP32 [1,10] by each of N factors to `products` FP32 [N,1,10].
 *
 * The parameter `factors` contains the factors separated by spaces, such as "1 -1 0.5".
 */
#include "nodes.h"

#define FACTORS_AT_MOST 100

/* Parse the factors; return their number, or -1 if the text is invalid. */
static int read_factors(const char* text, float* factors) {
    int count = 0;
    char* end;
    for (;;) {
        float factor = strtof(text, &end);
        if (end == text) break;
        if (count == FACTORS_AT_MOST) return -1;
        factors[count++] = factor;
        text = end;
    }
    return text[strspn(text, " ")] == '\0' && count > 0 ? count : -1;
}

static int configured(const struct CustomNodeParam* params, int paramsCount, float* factors) {
    return read_factors(find_param(params, paramsCount, "factors", "1 -1"), factors);
}

int execute(
    const struct CustomNodeTensor* inputs, int inputsCount, struct CustomNodeTensor** outputs, int* outputsCount,
    const struct CustomNodeParam* params, int paramsCount, void* manager) {
    (void)manager;
    float factors[FACTORS_AT_MOST];
    int count = configured(params, paramsCount, factors);
    const struct CustomNodeTensor* numbers = find_input(inputs, inputsCount, "numbers");
    if (count < 0 || numbers == NULL || numbers->dataBytes != COLUMNS * sizeof(float)) return 1;

    struct CustomNodeTensor* output = calloc(1, sizeof *output);
    uint64_t dims[] = {(uint64_t)count, 1, COLUMNS};
    if (output == NULL) return 1;
    if (allocate(output, "products", FP32, sizeof(float), dims, 3)) return discard(output, 1);
    const float* from = (const float*)numbers->data;
    float* to = (float*)output->data;
    for (int row = 0; row < count; row++)
        for (int column = 0; column < COLUMNS; column++) *to++ = factors[row] * from[column];
    *outputs = output;
    *outputsCount = 1;
    return 0;
}

static int describe_one(
    struct CustomNodeTensorInfo** info, int* infoCount, const char* name, const uint64_t* dims, uint64_t dimsCount) {
    *info = calloc(1, sizeof **info);
    if (*info == NULL) return 1;
    if (describe(*info, name, FP32, dims, dimsCount)) {
        free(*info);
        return 1;
    }
    *infoCount = 1;
    return 0;
}

int getInputsInfo(
    struct CustomNodeTensorInfo** info, int* infoCount, const struct CustomNodeParam* params, int paramsCount,
    void* manager) {
    (void)params, (void)paramsCount, (void)manager;
    return describe_one(info, infoCount, "numbers", (uint64_t[]){1, COLUMNS}, 2);
}

/* Fails on invalid factors, so that the pipeline does not load instead of failing every request. */
int getOutputsInfo(
    struct CustomNodeTensorInfo** info, int* infoCount, const struct CustomNodeParam* params, int paramsCount,
    void* manager) {
    (void)manager;
    float factors[FACTORS_AT_MOST];
    if (configured(params, paramsCount, factors) < 0) return 1;
    return describe_one(info, infoCount, "products", (uint64_t[]){0, 1, COLUMNS}, 3);
}

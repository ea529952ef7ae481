/*
 * What a shared library must export to be a custom node of a pipeline; for C and for C++.
 *
 * All six functions must be there.  Each returns 0 for success and anything else for failure, and each may be called
 * by several threads at once.  What `initialize` stores through its first argument belongs to one node of one pipeline
 * and is handed to every other call for that node, always as the last argument.
 *
 * Memory: names are read and never released.  Every other pointer that `execute`, `getInputsInfo` and `getOutputsInfo`
 * give (the array of structs, and the dims and data that its elements point to) is handed to `release` exactly once.
 * If one of them returns a failure, nothing that it has made is looked at, and it must have cleaned up itself.
 * What the arguments point to is valid until the call returns.
 */
#ifndef CUSTOM_NODE_INTERFACE_H
#define CUSTOM_NODE_INTERFACE_H

#include <stdint.h>

#if defined(__GNUC__)
#define CUSTOM_NODE_EXPORT __attribute__((visibility("default")))
#else
#define CUSTOM_NODE_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The type of a tensor's elements. */
typedef enum CustomNodeTensorPrecision {
    UNSPECIFIED = 0,
    FP32 = 1,
    FP16 = 2,
    U8 = 3,
    I8 = 4,
    I16 = 5,
    U16 = 6,
    I32 = 7,
    FP64 = 8,
    I64 = 9
} CustomNodeTensorPrecision;

/* A tensor: elements packed in row-major order.  `dimsCount` 0 is a scalar, which has one element. */
struct CustomNodeTensor {
    const char* name;
    uint8_t* data;
    uint64_t dataBytes;
    uint64_t* dims;
    uint64_t dimsCount;
    CustomNodeTensorPrecision precision;
};

/* What a node says of an input or output; a size of 0 in `dims` means any. */
struct CustomNodeTensorInfo {
    const char* name;
    uint64_t* dims;
    uint64_t dimsCount;
    CustomNodeTensorPrecision precision;
};

/* One entry of the node's `params` in the configuration. */
struct CustomNodeParam {
    const char *key, *value;
};

/* Called once for each node before anything else; a failure makes the pipeline fail to load. */
CUSTOM_NODE_EXPORT int initialize(
    void** customNodeLibraryInternalManager, const struct CustomNodeParam* params, int paramsCount);

/* Called once for each initialised node, when nothing that it gave is in use any more. */
CUSTOM_NODE_EXPORT int deinitialize(void* customNodeLibraryInternalManager);

/*
 * Runs the node.  Inputs are in the order of their names; find them by name.  Leave what they hold as it is: a server
 * may be sharing it with other nodes.
 */
CUSTOM_NODE_EXPORT int execute(
    const struct CustomNodeTensor* inputs, int inputsCount,
    struct CustomNodeTensor** outputs, int* outputsCount,
    const struct CustomNodeParam* params, int paramsCount,
    void* customNodeLibraryInternalManager);

/* Say what the node takes, and what it gives. */
CUSTOM_NODE_EXPORT int getInputsInfo(
    struct CustomNodeTensorInfo** info, int* infoCount,
    const struct CustomNodeParam* params, int paramsCount,
    void* customNodeLibraryInternalManager);
CUSTOM_NODE_EXPORT int getOutputsInfo(
    struct CustomNodeTensorInfo** info, int* infoCount,
    const struct CustomNodeParam* params, int paramsCount,
    void* customNodeLibraryInternalManager);

/* Takes back one pointer that the library gave; from any thread, and from several at once. */
CUSTOM_NODE_EXPORT int release(void* ptr, void* customNodeLibraryInternalManager);

#ifdef __cplusplus
}
#endif

#endif

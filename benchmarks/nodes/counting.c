/* Preloaded library that counts the bytes of large copies by the C library's copy functions. */
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define LARGE (64 * 1024)

static _Atomic uint64_t copied;

uint64_t copied_bytes(void) {
    return copied;
}

static void* copy(void* target, const void* source, size_t size) {
    void* start = target;
    if (size >= LARGE)
        copied += size;
    if ((uintptr_t)target - (uintptr_t)source >= size) {
        __asm__ volatile("rep movsb" : "+D"(target), "+S"(source), "+c"(size) : : "memory");
    } else {
        unsigned char* to = (unsigned char*)target + size - 1;
        const unsigned char* from = (const unsigned char*)source + size - 1;
        __asm__ volatile("std; rep movsb; cld" : "+D"(to), "+S"(from), "+c"(size) : : "memory");
    }
    return start;
}

void* memcpy(void* restrict target, const void* restrict source, size_t size) {
    return copy(target, source, size);
}

void* memmove(void* target, const void* source, size_t size) {
    return copy(target, source, size);
}

void* __memcpy_chk(void* restrict target, const void* restrict source, size_t size, size_t room) {
    return size > room ? NULL : copy(target, source, size);
}

void* __memmove_chk(void* target, const void* source, size_t size, size_t room) {
    return size > room ? NULL : copy(target, source, size);
}

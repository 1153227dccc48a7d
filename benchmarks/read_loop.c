/* The bandwidth that reading reaches: every byte once, into registers, by the threads of the caller's pool.
 * GCC's and Clang's vectors, so that it is as wide as the flags allow (-march=native) on any machine. */
#include <stdint.h>

typedef int32_t (*ParallelFor)(
    int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void *), void *context);
typedef uint64_t Vector __attribute__((vector_size(64), aligned(1)));

enum { BLOCK = 4096 };

typedef struct {
    const char *bytes;
    uint64_t *sink;
} Read;

static void read_blocks(int64_t begin, int64_t end, void *context) {
    const Read *read = context;
    Vector a = {0}, b = {0}, c = {0}, d = {0};
    for (const char *p = read->bytes + begin * BLOCK; p < read->bytes + end * BLOCK; p += 256) {
        a ^= *(const Vector *)p;
        b ^= *(const Vector *)(p + 64);
        c ^= *(const Vector *)(p + 128);
        d ^= *(const Vector *)(p + 192);
    }
    a ^= b ^ c ^ d;
    uint64_t all = 0;
    for (int i = 0; i < 8; ++i) all |= a[i];
    if (all == 0x123456789abcdef) *read->sink = all; /* never, but the compiler cannot know */
}

/* Whole blocks of a tensor; what is left over is less than one. */
void read_bytes(const char *bytes, int64_t count, ParallelFor parallel_for) {
    uint64_t sink = 0;
    Read read = {bytes, &sink};
    parallel_for(0, count / BLOCK, 1, read_blocks, &read);
}

/* What the lowered IR calls: a copy between strided arrays of one shape (MLIR's runtime function of that name). */
#include <stdint.h>
#include <string.h>

typedef struct {
    int64_t rank;
    void *descriptor;
} Unranked;

typedef struct {
    char *allocated, *aligned;
    int64_t offset;
    int64_t sizes_and_strides[];
} Ranked;

static void copy(const char *from, char *to, int64_t size, int64_t axis, int64_t rank, const int64_t *sizes,
                 const int64_t *from_strides, const int64_t *to_strides) {
    if (axis == rank) {
        memcpy(to, from, size);
        return;
    }
    for (int64_t i = 0; i < sizes[axis]; i++)
        copy(from + i * from_strides[axis] * size, to + i * to_strides[axis] * size, size, axis + 1, rank, sizes,
             from_strides, to_strides);
}

void memrefCopy(int64_t size, Unranked *from, Unranked *to) {
    Ranked *a = from->descriptor, *b = to->descriptor;
    int64_t rank = from->rank;
    copy(a->aligned + a->offset * size, b->aligned + b->offset * size, size, 0, rank, a->sizes_and_strides,
         a->sizes_and_strides + rank, b->sizes_and_strides + rank);
}

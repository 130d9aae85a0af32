// SwiGLU: silu(gate) * up, gate first, in float32, rounded once. Clamped: the gate from above, up on both sides.
#include "kernels.h"

namespace porter {
namespace {

template <typename Gated>
void swiglu(void* out, const void* gate_up, int64_t rows, int64_t size, int64_t stride, int32_t dtype, int32_t threads,
            Gated gated) {
  dispatch(dtype, [&](auto tag) {
    using T = decltype(tag);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const T* gate = static_cast<const T*>(gate_up) + row * stride;
      T* target = static_cast<T*>(out) + row * size;
      for_each_vector(size, [&](int64_t i, int n) {
        store_count(target + i, gated(load_count(gate + i, n), load_count(gate + size + i, n)), n);
      });
    }
  });
}

}  // namespace
}  // namespace porter

PORTER_EXPORT void porter_swiglu(void* out, const void* gate_up, int64_t rows, int64_t size, int64_t stride,
                                 int32_t dtype, int32_t threads) {
  using namespace porter;
  swiglu(out, gate_up, rows, size, stride, dtype, threads, [](Vec gate, Vec up) { return silu(gate) * up; });
}

PORTER_EXPORT void porter_swiglu_clamped(void* out, const void* gate_up, int64_t rows, int64_t size, int64_t stride,
                                         double limit, int32_t dtype, int32_t threads) {
  using namespace porter;
  Vec high = set1(static_cast<float>(limit)), low = set1(-static_cast<float>(limit));
  swiglu(out, gate_up, rows, size, stride, dtype, threads, [=](Vec gate, Vec up) {
    return silu(vmin(high, gate)) * vmax(low, vmin(high, up));
  });
}

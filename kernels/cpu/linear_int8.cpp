// y = x w^T + bias with int8 weights and activations quantized to int8 per token: exact int32 sums, then times the
// token's scale and the weight row's scale. The sums are exact while k * 127 * 128 < 2^31: k <= 132104.
#include "gemm.h"
#include "kernels.h"

namespace porter {
namespace {

template <typename T>
void finish(T* out, const int32_t* sums, int64_t count, float x_scale, const float* weight_scale, const T* bias) {
  for (int64_t i = 0; i < count; ++i) {
    float y = static_cast<float>(sums[i]) * x_scale * weight_scale[i];
    out[i] = from_float<T>(bias == nullptr ? y : y + to_float(bias[i]));
  }
}

struct Quantized {
  int8_t* codes;
  float* scales;
};

template <typename T>
Quantized quantize(const T* x, int64_t m, int64_t k, int64_t stride, int threads) {
  static thread_local Scratch codes_memory, scales_memory;
  Quantized q{codes_memory.get<int8_t>(m * k), scales_memory.get<float>(m)};
  if (m * k < 65536) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t row = 0; row < m; ++row) q.scales[row] = quantize_row(q.codes + row * k, x + row * stride, k);
  return q;
}

}  // namespace
}  // namespace porter

// Layouts as porter_linear; weight is int8.
PORTER_EXPORT void porter_linear_w8a8(void* out, const void* x, const int8_t* weight, const float* weight_scale,
                                      const void* bias, int64_t m, int64_t n, int64_t k, int64_t x_stride,
                                      int64_t weight_stride, int64_t few, int32_t dtype, int32_t threads) {
  using namespace porter;
  dispatch(dtype, [&](auto tag) {
    using T = decltype(tag);
    Quantized q = quantize(static_cast<const T*>(x), m, k, x_stride, threads);
    auto emit = [&](int64_t row, int64_t n0, int64_t n1, const int32_t* sums) {
      const T* b = bias == nullptr ? nullptr : static_cast<const T*>(bias) + n0;
      finish(static_cast<T*>(out) + row * n + n0, sums, n1 - n0, q.scales[row], weight_scale + n0, b);
    };
    if (m > few) {
      gemm<Int8Gemm>(
          m, n, k, threads, [&](int64_t row) { return q.codes + row * k; },
          [&](int64_t row) { return weight + row * weight_stride; }, emit);
      return;
    }
    static thread_local Scratch packed;
    int64_t room = padded_int8(k);
    auto* activations = packed.get<Int8Dot::Activation>(m * room);
    for (int64_t row = 0; row < m; ++row) pack_int8_row(activations + row * room, q.codes + row * k, k);
    constexpr int64_t strip = 32;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t n0 = 0; n0 < n; n0 += strip) {
      int64_t rows = smaller(strip, n - n0);
      for (int64_t row = 0; row < m; row += 4) {
        int32_t sums[4 * strip];
        int64_t count = smaller(4, m - row);
        int8_dots(activations + row * room, room, count, weight + n0 * weight_stride, weight_stride, rows, k, sums, strip);
        for (int64_t i = 0; i < count; ++i) emit(row + i, n0, n0 + rows, sums + i * strip);
      }
    }
  });
}

// The gates of a gated delta rule, and x * sigmoid(gate).
#include "kernels.h"

namespace porter {
namespace {

static inline Vec sigmoid(Vec x) { return set1(1.0f) / (set1(1.0f) + exp(zero() - x)); }

// log(1 + e^x); past 20 it is x to float32.
static inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <typename T>
void gate_rows(T* out, const T* x, const T* gate, int64_t rows, int64_t size, int64_t x_stride, int64_t gate_stride,
               bool one_gate, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const T *source = x + row * x_stride, *gates = gate + row * gate_stride;
    Vec one = set1(one_gate ? 1.0f / (1.0f + std::exp(-to_float(gates[0]))) : 0.0f);
    for_each_vector(size, [&](int64_t i, int n) {
      store_count(out + row * size + i, load_count(source + i, n) * (one_gate ? one : sigmoid(load_count(gates + i, n))),
                  n);
    });
  }
}

}  // namespace
}  // namespace porter

// a and b [rows][groups][size] at strides[0..1] and [2..3] in elements (row, group), the last dimension contiguous;
// rates and bias [groups * size] of dtypes of their own; decay and beta [rows, groups * size] float32.
PORTER_EXPORT void porter_delta_gates(float* decay, float* beta, const void* a, const void* b, const void* rates,
                                      const void* bias, const int64_t* shape, double beta_scale, int32_t dtype,
                                      int32_t rates_dtype, int32_t bias_dtype, int32_t threads) {
  using namespace porter;
  int64_t rows = shape[0], groups = shape[1], size = shape[2], heads = groups * size;
  const int64_t* strides = shape + 3;
  static thread_local Scratch memory;
  float *rate = memory.get<float>(2 * heads), *shift = rate + heads;
  dispatch(rates_dtype, [&](auto tag) {
    for (int64_t h = 0; h < heads; ++h) rate[h] = -std::exp(to_float(static_cast<const decltype(tag)*>(rates)[h]));
  });
  dispatch(bias_dtype, [&](auto tag) {
    for (int64_t h = 0; h < heads; ++h) shift[h] = to_float(static_cast<const decltype(tag)*>(bias)[h]);
  });
  dispatch(dtype, [&](auto tag) {
    using T = decltype(tag);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t item = 0; item < rows * groups; ++item) {
      int64_t row = item / groups, group = item % groups;
      const T* from_a = static_cast<const T*>(a) + row * strides[0] + group * strides[1];
      const T* from_b = static_cast<const T*>(b) + row * strides[2] + group * strides[3];
      for (int64_t i = 0; i < size; ++i) {
        int64_t h = group * size + i;
        decay[row * heads + h] = rate[h] * softplus(to_float(from_a[i]) + shift[h]);
        beta[row * heads + h] = static_cast<float>(beta_scale) / (1.0f + std::exp(-to_float(from_b[i])));
      }
    }
  });
}

// x [rows, size] and out, gate [rows, size] or, where one_gate, [rows, 1].
PORTER_EXPORT void porter_sigmoid_gate(void* out, const void* x, const void* gate, int64_t rows, int64_t size,
                                       int64_t x_stride, int64_t gate_stride, int32_t one_gate, int32_t dtype,
                                       int32_t threads) {
  using namespace porter;
  dispatch(dtype, [&](auto tag) {
    using T = decltype(tag);
    gate_rows(static_cast<T*>(out), static_cast<const T*>(x), static_cast<const T*>(gate), rows, size, x_stride,
              gate_stride, one_gate != 0, threads);
  });
}

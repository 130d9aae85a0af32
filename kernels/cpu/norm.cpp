// RMSNorm: y = x * rsqrt(mean(x^2) + eps) * weight, in float32, rounded once.
// Variants: weight, (1 + weight) or none; with the residual added first; times silu(gate).
#include "kernels.h"

namespace porter {
namespace {

template <typename T>
float inverse_rms(const T* x, int64_t size, float eps) {
  Vec squares[2] = {zero(), zero()};
  int turn = 0;
  for_each_vector(size, [&](int64_t i, int n) {
    Vec v = load_count(x + i, n);
    squares[turn] = fma(v, v, squares[turn]);
    turn ^= 1;
  });
  return 1.0f / std::sqrt(sum(squares[0] + squares[1]) / static_cast<float>(size) + eps);
}

template <typename T, typename W>
void scale_row(T* out, const T* x, const W* weight, const T* gate, int64_t size, float eps, float offset) {
  Vec scale = set1(inverse_rms(x, size, eps)), shift = set1(offset);
  for_each_vector(size, [&](int64_t i, int n) {
    Vec y = load_count(x + i, n) * scale;
    if (weight != nullptr) y = y * (load_count(weight + i, n) + shift);
    if (gate != nullptr) y = y * silu(load_count(gate + i, n));
    store_count(out + i, y, n);
  });
}

template <typename T>
void add_row(T* total, const T* x, const T* residual, int64_t size) {
  for_each_vector(size, [&](int64_t i, int n) {
    store_count(total + i, load_count(x + i, n) + load_count(residual + i, n), n);
  });
}

}  // namespace
}  // namespace porter

// out, x, gate, residual, total: rows of `size` elements; x and gate rows lie x_stride and gate_stride apart, out and
// total are contiguous. weight may be null: none. dtypes: code of the rows, and that of the weight times 256. residual and total are both given (total = x + residual is what is normed) or both null.
PORTER_EXPORT void porter_rms_norm(void* out, void* total, const void* x, const void* residual, const void* weight,
                                   const void* gate, int64_t rows, int64_t size, int64_t x_stride,
                                   int64_t residual_stride, int64_t gate_stride, double eps, double offset,
                                   int32_t dtypes, int32_t threads) {
  using namespace porter;
  dispatch(dtypes & 255, [&](auto tag) {
    using T = decltype(tag);
    auto scaled = [&](T* target, const T* source, const T* gate_row) {
      dispatch(dtypes >> 8, [&](auto weight_tag) {
        scale_row(target, source, static_cast<const decltype(weight_tag)*>(weight), gate_row, size,
                  static_cast<float>(eps), static_cast<float>(offset));
      });
    };
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const T* source = static_cast<const T*>(x) + row * x_stride;
      if (residual != nullptr) {
        T* added = static_cast<T*>(total) + row * size;
        add_row(added, source, static_cast<const T*>(residual) + row * residual_stride, size);
        source = added;
      }
      const T* gate_row = gate == nullptr ? nullptr : static_cast<const T*>(gate) + row * gate_stride;
      scaled(static_cast<T*>(out) + row * size, source, gate_row);
    }
  });
}

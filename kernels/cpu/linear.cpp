// y = x w^T + bias with float32, bfloat16 or int8 weights (int8 with one scale per output row), float32 accumulation.
#include <vector>

#include "digits.h"
#include "gemm.h"
#include "kernels.h"
#include "rows.h"

namespace porter {
namespace {

struct Linear {
  void* out;
  const void* x;
  const void* weight;
  const float* weight_scale;  // null unless the weight is int8
  const void* bias;           // null, or the dtype of x
  int64_t m, n, k, x_stride, weight_stride;
  int threads;
};

template <typename T>
void finish(const Linear& a, int64_t m, int64_t n0, int64_t n1, const float* sums) {
  T* out = static_cast<T*>(a.out) + m * a.n + n0;
  const T* bias = static_cast<const T*>(a.bias);
  for_each_vector(n1 - n0, [&](int64_t i, int count) {
    Vec y = load_count(sums + i, count);
    if (a.weight_scale != nullptr) y = y * load_count(a.weight_scale + n0 + i, count);
    if (bias != nullptr) y = y + load_count(bias + n0 + i, count);
    store_count(out + i, y, count);
  });
}

constexpr int64_t strip = 32;

#if defined(PORTER_DIGITS)
// False where a row of x has no digits, see digits.h.
bool exact_rows(const Linear& a, const float* x, int64_t room) {
  static thread_local Scratch memory;
  static thread_local std::vector<Digits> rows;
  if (a.k > kDigitsLimit) return false;
  int64_t size = kMaxDigits * digits_room(a.k);
  int8_t* digit = memory.get<int8_t>(a.m * size);
  rows.resize(a.m);
  for (int64_t m = 0; m < a.m; ++m) {
    rows[m] = to_digits(digit + m * size, x + m * room, a.k);
    if (rows[m].count == 0) return false;
  }
  const Digits* digits = rows.data();
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1) schedule(static)
  for (int64_t n = 0; n < a.n; n += strip) {
    int64_t count = smaller(strip, a.n - n);
    const int8_t* w = static_cast<const int8_t*>(a.weight) + n * a.weight_stride;
    for (int64_t m = 0; m < a.m; ++m) {
      float sums[strip];
      digits_dots(digits[m], w, a.weight_stride, count, a.k, sums);
      finish<bf16>(a, m, n, n + count, sums);
    }
  }
  return true;
}
#endif

// Each thread streams its own slice of the weights once for all rows of x.
template <typename T, typename W>
void few_rows(const Linear& a) {
  static thread_local Scratch packed;
  int64_t room = padded(a.k);
  float* x = packed.get<float>(a.m * room);
  for (int64_t m = 0; m < a.m; ++m) pack_row(x + m * room, static_cast<const T*>(a.x) + m * a.x_stride, a.k);
#if defined(PORTER_DIGITS)
  if constexpr (sizeof(T) == 2 && sizeof(W) == 1)
    if (exact_rows(a, x, room)) return;
#endif
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1) schedule(static)
  for (int64_t n = 0; n < a.n; n += strip) {
    int64_t rows = smaller(strip, a.n - n);
    const W* w = static_cast<const W*>(a.weight) + n * a.weight_stride;
    for (int64_t m = 0; m < a.m; m += 4) {
      float sums[4 * strip];
      int64_t count = smaller(4, a.m - m);
      dots(x + m * room, room, count, w, a.weight_stride, rows, a.k, sums, strip);
      for (int64_t i = 0; i < count; ++i) finish<T>(a, m + i, n, n + rows, sums + i * strip);
    }
  }
}

template <typename Dot, typename T, typename W>
void many_rows(const Linear& a) {
  gemm<Dot>(
      a.m, a.n, a.k, a.threads, [&](int64_t m) { return static_cast<const T*>(a.x) + m * a.x_stride; },
      [&](int64_t n) { return static_cast<const W*>(a.weight) + n * a.weight_stride; },
      [&](int64_t m, int64_t n0, int64_t n1, const float* sums) { finish<T>(a, m, n0, n1, sums); });
}

template <typename T, typename W>
void linear(const Linear& a, int64_t few) {
  if (a.m <= few) return few_rows<T, W>(a);
#if defined(PORTER_BFLOAT16_DOT)
  if constexpr (sizeof(T) == 2) return many_rows<BFloat16Dot, T, W>(a);
#endif
  many_rows<FloatDot, T, W>(a);
}

}  // namespace
}  // namespace porter

// x [m, k] with rows x_stride apart, weight [n, k] with rows weight_stride apart, out [m, n] contiguous. Up to `few`
// rows of x take the streaming kernel, more take the blocked one. weight_dtype: int8, bfloat16 or that of x.
PORTER_EXPORT void porter_linear(void* out, const void* x, const void* weight, const float* weight_scale,
                                 const void* bias, int64_t m, int64_t n, int64_t k, int64_t x_stride,
                                 int64_t weight_stride, int64_t few, int32_t dtype, int32_t weight_dtype,
                                 int32_t threads) {
  using namespace porter;
  Linear arguments{out, x, weight, weight_scale, bias, m, n, k, x_stride, weight_stride, threads};
  dispatch(dtype, [&](auto tag) {
    using T = decltype(tag);
    if (weight_dtype == kInt8) linear<T, int8_t>(arguments, few);
    else if (weight_dtype == kBFloat16) linear<T, bf16>(arguments, few);
    else linear<T, T>(arguments, few);
  });
}

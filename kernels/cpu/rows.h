// Dot products of a few float32 rows with many weight rows read straight from memory (matrix times vector, decode).
#pragma once
#include "abi.h"

namespace porter {

// Rows of x are packed with zeros up to a whole number of vectors, so only the weights need care at the tail.
static inline int64_t padded(int64_t size) { return round_up(size, Vec::width); }

template <typename T>
static inline void pack_row(float* out, const T* x, int64_t size) {
  for_each_vector(size, [&](int64_t i, int n) { store(out + i, load_count(x + i, n)); });
}

template <typename T, int MR, int NR>
static inline void dot_block(const float* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t size, float* out) {
  Vec acc[MR][NR];
  for (int m = 0; m < MR; ++m)
    for (int n = 0; n < NR; ++n) acc[m][n] = zero();
  int64_t i = 0;
  for (; i + Vec::width <= size; i += Vec::width) {
    Vec weight[NR];
    for (int n = 0; n < NR; ++n) weight[n] = load(w + n * w_stride + i);
    for (int m = 0; m < MR; ++m) {
      Vec value = load(x + m * x_stride + i);
      for (int n = 0; n < NR; ++n) acc[m][n] = fma(value, weight[n], acc[m][n]);
    }
  }
  if (i < size) {
    for (int n = 0; n < NR; ++n) {
      Vec weight = load_first(w + n * w_stride + i, static_cast<int>(size - i));
      for (int m = 0; m < MR; ++m) acc[m][n] = fma(load(x + m * x_stride + i), weight, acc[m][n]);
    }
  }
  for (int m = 0; m < MR; ++m) {
    if constexpr (NR == 4) sum4(out + m * NR, acc[m][0], acc[m][1], acc[m][2], acc[m][3]);
    else
      for (int n = 0; n < NR; ++n) out[m * NR + n] = sum(acc[m][n]);
  }
}

// The same for four weight rows, one after the other: a single sequential stream, which the processor's prefetcher
// follows across rows. From memory this is up to twice as fast as reading the four rows side by side.
template <typename T, int MR>
static inline void dot_stream(const float* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t size, float* out) {
  constexpr int chains = Vec::width == 16 ? 2 : MR == 3 ? 1 : 4 / MR;
  Vec totals[MR][4];
  for (int n = 0; n < 4; ++n) {
    const T* row = w + n * w_stride;
    Vec acc[MR][chains];
    for (int m = 0; m < MR; ++m)
      for (int c = 0; c < chains; ++c) acc[m][c] = zero();
    int64_t i = 0;
    for (; i + chains * Vec::width <= size; i += chains * Vec::width) {
      for (int c = 0; c < chains; ++c) {
        Vec weight = load(row + i + c * Vec::width);
        for (int m = 0; m < MR; ++m) acc[m][c] = fma(load(x + m * x_stride + i + c * Vec::width), weight, acc[m][c]);
      }
    }
    for (; i < size; i += Vec::width) {
      Vec weight = load_count(row + i, static_cast<int>(smaller(size - i, Vec::width)));
      for (int m = 0; m < MR; ++m) acc[m][0] = fma(load(x + m * x_stride + i), weight, acc[m][0]);
    }
    for (int m = 0; m < MR; ++m) {
      for (int c = 1; c < chains; ++c) acc[m][0] = acc[m][0] + acc[m][c];
      totals[m][n] = acc[m][0];
    }
  }
  for (int m = 0; m < MR; ++m) sum4(out + m * 4, totals[m][0], totals[m][1], totals[m][2], totals[m][3]);
}

// out[m * out_stride + n] = x[m] . w[n] for MR rows of x and `rows` weight rows.
template <typename T, int MR>
static inline void dot_strip(const float* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t rows, int64_t size,
                             float* out, int64_t out_stride) {
  constexpr int NR = (Vec::width == 16 || MR <= 2) ? 4 : 2;  // accumulators and weights fit the register file
  float block[MR * 4];
  int64_t n = 0;
  bool resident = MR * size * sizeof(float) <= 24 * 1024;  // x stays in the first-level cache beside the weights
  for (; resident && n + 4 <= rows; n += 4) {
    dot_stream<T, MR>(x, x_stride, w + n * w_stride, w_stride, size, block);
    for (int m = 0; m < MR; ++m)
      for (int j = 0; j < 4; ++j) out[m * out_stride + n + j] = block[m * 4 + j];
  }
  for (; n + NR <= rows; n += NR) {
    dot_block<T, MR, NR>(x, x_stride, w + n * w_stride, w_stride, size, block);
    for (int m = 0; m < MR; ++m)
      for (int j = 0; j < NR; ++j) out[m * out_stride + n + j] = block[m * NR + j];
  }
  for (; n < rows; ++n) {
    dot_block<T, MR, 1>(x, x_stride, w + n * w_stride, w_stride, size, block);
    for (int m = 0; m < MR; ++m) out[m * out_stride + n] = block[m];
  }
}

template <typename T>
static inline void dots(const float* x, int64_t x_stride, int64_t count, const T* w, int64_t w_stride, int64_t rows,
                        int64_t size, float* out, int64_t out_stride) {
  for (int64_t m = 0; m < count; m += 4) {
    const float* group = x + m * x_stride;
    float* target = out + m * out_stride;
    switch (smaller(count - m, 4)) {
      case 4: dot_strip<T, 4>(group, x_stride, w, w_stride, rows, size, target, out_stride); break;
      case 3: dot_strip<T, 3>(group, x_stride, w, w_stride, rows, size, target, out_stride); break;
      case 2: dot_strip<T, 2>(group, x_stride, w, w_stride, rows, size, target, out_stride); break;
      default: dot_strip<T, 1>(group, x_stride, w, w_stride, rows, size, target, out_stride);
    }
  }
}

// c[m] += sum over k of a[m][k] * b[k]: MR rows of coefficients, `size` columns of b read straight from memory.
template <typename T, int MR, int NV>
static inline void outer_block(const float* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t depth, float* c,
                               int64_t c_stride) {
  Vec acc[MR][NV];
  for (int m = 0; m < MR; ++m)
    for (int v = 0; v < NV; ++v) acc[m][v] = load(c + m * c_stride + v * Vec::width);
  for (int64_t k = 0; k < depth; ++k) {
    Vec value[NV];
    for (int v = 0; v < NV; ++v) value[v] = load(b + k * b_stride + v * Vec::width);
    for (int m = 0; m < MR; ++m) {
      Vec coefficient = set1(a[m * a_stride + k]);
      for (int v = 0; v < NV; ++v) acc[m][v] = fma(coefficient, value[v], acc[m][v]);
    }
  }
  for (int m = 0; m < MR; ++m)
    for (int v = 0; v < NV; ++v) store(c + m * c_stride + v * Vec::width, acc[m][v]);
}

template <typename T, int MR>
static inline void outer_strip(const float* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t depth,
                               int64_t size, float* c, int64_t c_stride) {
  constexpr int NV = MR == 1 ? 4 : 2;
  int64_t i = 0;
  for (; i + NV * Vec::width <= size; i += NV * Vec::width)
    outer_block<T, MR, NV>(a, a_stride, b + i, b_stride, depth, c + i, c_stride);
  for (; i + Vec::width <= size; i += Vec::width)
    outer_block<T, MR, 1>(a, a_stride, b + i, b_stride, depth, c + i, c_stride);
  if (i == size) return;
  int rest = static_cast<int>(size - i);
  for (int m = 0; m < MR; ++m) {
    Vec acc = load_first(c + m * c_stride + i, rest);
    for (int64_t k = 0; k < depth; ++k) acc = fma(set1(a[m * a_stride + k]), load_first(b + k * b_stride + i, rest), acc);
    store_first(c + m * c_stride + i, acc, rest);
  }
}

template <typename T>
static inline void outer(const float* a, int64_t a_stride, int64_t count, const T* b, int64_t b_stride, int64_t depth,
                         int64_t size, float* c, int64_t c_stride) {
  for (int64_t m = 0; m < count; m += 4) {
    const float* group = a + m * a_stride;
    float* target = c + m * c_stride;
    switch (smaller(count - m, 4)) {
      case 4: outer_strip<T, 4>(group, a_stride, b, b_stride, depth, size, target, c_stride); break;
      case 3: outer_strip<T, 3>(group, a_stride, b, b_stride, depth, size, target, c_stride); break;
      case 2: outer_strip<T, 2>(group, a_stride, b, b_stride, depth, size, target, c_stride); break;
      default: outer_strip<T, 1>(group, a_stride, b, b_stride, depth, size, target, c_stride);
    }
  }
}

}  // namespace porter

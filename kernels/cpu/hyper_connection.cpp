// Hyper-connections: several residual streams [T, N, D], read as one weighted stream and written back mixed.
#include "rows.h"

namespace porter {
namespace {

constexpr int64_t kTokens = 4, kRows = 4;  // a unit of parallel work: so many tokens times so many rows of fn

struct Streams {
  int64_t tokens, count, size, iterations;
  float norm_eps, eps;
  int threads;

  int64_t width() const { return count * size; }
};

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// logits [tokens][rows]: RMS-normalised streams times fn [rows, N D].
template <typename T>
void mix(const Streams& a, const T* streams, const float* fn, int64_t rows, float* logits) {
  static thread_local Scratch memory;
  int64_t width = a.width(), room = padded(width);
  float* packed = memory.get<float>(a.tokens * (room + 1));
  float* inverse = packed + a.tokens * room;
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1 && a.tokens > 1) schedule(static)
  for (int64_t t = 0; t < a.tokens; ++t) {
    float* row = packed + t * room;
    pack_row(row, streams + t * width, width);
    Vec squares = zero();
    for (int64_t i = 0; i < room; i += Vec::width) squares = fma(load(row + i), load(row + i), squares);
    inverse[t] = 1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + a.norm_eps);
  }
  int64_t strips = divide_up(rows, kRows), items = divide_up(a.tokens, kTokens) * strips;
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1) schedule(static)
  for (int64_t item = 0; item < items; ++item) {
    int64_t t = item / strips * kTokens, r = item % strips * kRows;
    dots(packed + t * room, room, smaller(kTokens, a.tokens - t), fn + r * width, width, smaller(kRows, rows - r), width,
         logits + t * rows + r, rows);
  }
  for (int64_t t = 0; t < a.tokens; ++t)
    for (int64_t r = 0; r < rows; ++r) logits[t * rows + r] *= inverse[t];
}

// Rows of a matrix [n, n] divided by their sums plus eps (step 1, stride n), or its columns (step n, stride 1).
void normalise(float* matrix, int64_t n, int64_t step, int64_t stride, float eps) {
  for (int64_t line = 0; line < n; ++line) {
    float total = eps;
    for (int64_t i = 0; i < n; ++i) total += matrix[line * stride + i * step];
    for (int64_t i = 0; i < n; ++i) matrix[line * stride + i * step] /= total;
  }
}

void doubly_stochastic(float* comb, const float* logits, const float* base, float scale, int64_t n, float eps,
                       int64_t iterations) {
  for (int64_t row = 0; row < n; ++row) {
    float largest = -std::numeric_limits<float>::infinity(), total = 0;
    float* out = comb + row * n;
    for (int64_t i = 0; i < n; ++i) {
      out[i] = logits[row * n + i] * scale + base[row * n + i];
      largest = std::fmax(largest, out[i]);
    }
    for (int64_t i = 0; i < n; ++i) total += out[i] = std::exp(out[i] - largest);
    for (int64_t i = 0; i < n; ++i) out[i] = out[i] / total + eps;
  }
  normalise(comb, n, n, 1, eps);
  for (int64_t turn = 1; turn < iterations; ++turn) {
    normalise(comb, n, 1, n, eps);
    normalise(comb, n, n, 1, eps);
  }
}

// out [D] = sum over streams of weights[j * step] * streams[j], plus `added` times `weight` where there is one.
template <typename T>
void combine(T* out, const T* streams, const float* weights, int64_t step, const T* added, float weight, int64_t count,
             int64_t size) {
  for_each_vector(size, [&](int64_t i, int n) {
    Vec total = added == nullptr ? zero() : set1(weight) * load_count(added + i, n);
    for (int64_t j = 0; j < count; ++j) total = fma(set1(weights[j * step]), load_count(streams + j * size + i, n), total);
    store_count(out + i, total, n);
  });
}

}  // namespace
}  // namespace porter

// streams [T, N, D] contiguous, fn [M, N D], base [M]; M = (2 + N) N and scale [3], or, where post and comb are null, M = N
// and scale [1]. post [T, N] and comb [T, N, N] float32, collapsed [T, D]. shape: T, N, D, iterations.
PORTER_EXPORT void porter_hyper_collapse(float* post, float* comb, void* collapsed, const void* streams, const float* fn,
                                         const float* base, const float* scale, const int64_t* shape, double norm_eps,
                                         double eps, int32_t dtype, int32_t threads) {
  using namespace porter;
  Streams a{shape[0], shape[1], shape[2], shape[3], static_cast<float>(norm_eps), static_cast<float>(eps), threads};
  int64_t n = a.count, rows = post == nullptr ? n : (2 + n) * n;
  static thread_local Scratch memory;
  float* logits = memory.get<float>(a.tokens * rows);
  dispatch(dtype, [&](auto tag) {
    using T = decltype(tag);
    mix(a, static_cast<const T*>(streams), fn, rows, logits);
#pragma omp parallel for num_threads(threads) if (threads > 1 && a.tokens > 1) schedule(static)
    for (int64_t t = 0; t < a.tokens; ++t) {
      float* row = logits + t * rows;
      if (post != nullptr) {
        for (int64_t i = 0; i < n; ++i) post[t * n + i] = 2.0f * sigmoid(row[n + i] * scale[1] + base[n + i]);
        doubly_stochastic(comb + t * n * n, row + 2 * n, base + 2 * n, scale[2], n, a.eps, a.iterations);
      }
      for (int64_t i = 0; i < n; ++i) row[i] = sigmoid(row[i] * scale[0] + base[i]) + a.eps;
      combine(static_cast<T*>(collapsed) + t * a.size, static_cast<const T*>(streams) + t * a.width(), row, 1,
              static_cast<const T*>(nullptr), 0.0f, n, a.size);
    }
  });
}

// out, streams [T, N, D], output [T, D] contiguous; post [T, N], comb [T, N, N] float32. shape: T, N, D.
PORTER_EXPORT void porter_hyper_expand(void* out, const void* streams, const void* output, const float* post,
                                       const float* comb, const int64_t* shape, int32_t dtype, int32_t threads) {
  using namespace porter;
  int64_t tokens = shape[0], n = shape[1], size = shape[2];
  dispatch(dtype, [&](auto tag) {
    using T = decltype(tag);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t item = 0; item < tokens * n; ++item) {
      int64_t t = item / n, k = item % n;
      combine(static_cast<T*>(out) + item * size, static_cast<const T*>(streams) + t * n * size, comb + t * n * n + k, n,
              static_cast<const T*>(output) + t * size, post[item], n, size);
    }
  });
}

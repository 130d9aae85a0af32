// The two ends of absorbed latent attention: queries folded into the latent space, and values out of what they gathered.
#pragma once
#include "rows.h"

namespace porter {

struct Latent {
  int64_t batch, heads, length, nope, rope, keys, latent, value_size;
};

// Rows are (s, h) with h fastest: every head of a position reads the same keys.
template <typename T>
static inline void absorb_queries(float* folded, const T* nope, const int64_t* strides, const T* weight, const Latent& a,
                                  int threads) {
  int64_t room = padded(a.latent);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t h = 0; h < a.heads; ++h) {
    const T* keys = weight + h * (a.nope + a.value_size) * a.latent;
    static thread_local Scratch packed;
    float* q = packed.get<float>(4 * padded(a.nope));
    for (int64_t row = 0; row < a.batch * a.length; row += 4) {
      int64_t count = smaller(4, a.batch * a.length - row);
      for (int64_t i = 0; i < count; ++i) {
        int64_t b = (row + i) / a.length, s = (row + i) % a.length;
        pack_row(q + i * padded(a.nope), nope + b * strides[0] + h * strides[1] + s * strides[2], a.nope);
      }
      float* target = folded + (row * a.heads + h) * room;
      for (int64_t i = 0; i < count; ++i) std::memset(target + i * a.heads * room, 0, room * sizeof(float));
      outer(q, padded(a.nope), count, keys, a.latent, a.nope, a.latent, target, a.heads * room);
    }
  }
}

template <typename T>
static inline void apply_values(T* out, const float* gathered, const T* weight, const Latent& a, int threads) {
  int64_t room = padded(a.latent);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t h = 0; h < a.heads; ++h) {
    const T* values = weight + (h * (a.nope + a.value_size) + a.nope) * a.latent;
    static thread_local Scratch memory;
    float* sums = memory.get<float>(4 * padded(a.value_size));
    for (int64_t row = 0; row < a.batch * a.length; row += 4) {
      int64_t count = smaller(4, a.batch * a.length - row);
      dots(gathered + (row * a.heads + h) * room, a.heads * room, count, values, a.latent, a.value_size, a.latent, sums,
           padded(a.value_size));
      for (int64_t i = 0; i < count; ++i) {
        T* target = out + ((row + i) * a.heads + h) * a.value_size;
        const float* source = sums + i * padded(a.value_size);
        for_each_vector(a.value_size, [&](int64_t j, int n) { store_count(target + j, load_count(source + j, n), n); });
      }
    }
  }
}

}  // namespace porter

// Absorbed latent attention over the keys that an indexer selected: their latents are gathered, and all heads of a query
// attend over the gathered block. Work and memory grow with the number selected, not with the length of the cache.
#include "absorb.h"
#include "attend.h"
#include "selection.h"

namespace porter {
namespace {

// What one query attends to: the rows of both caches at the selected keys that it sees, and what the mask adds to them.
template <typename T>
struct Gathered {
  int64_t count;
  T *latent, *rope;
  float* bias;
};

template <typename T>
Gathered<T> gather(Scratch& memory, const int32_t* indices, const MaskRow& mask, const T* latent, int64_t latent_stride,
                   int64_t latent_size, const T* rope, int64_t rope_stride, int64_t rope_size, int64_t selected) {
  int64_t bytes = (latent_size + rope_size) * static_cast<int64_t>(sizeof(T)) + static_cast<int64_t>(sizeof(float));
  char* base = memory.get<char>(selected * bytes);
  Gathered<T> g{0, nullptr, nullptr, reinterpret_cast<float*>(base)};
  g.latent = reinterpret_cast<T*>(base + selected * sizeof(float));
  g.rope = g.latent + selected * latent_size;
  for (int64_t i = 0; i < selected; ++i) {
    int64_t t = indices[i];
    if (t < 0 || t >= mask.keys || !mask.sees(t)) continue;
    std::memcpy(g.latent + g.count * latent_size, latent + t * latent_stride, latent_size * sizeof(T));
    std::memcpy(g.rope + g.count * rope_size, rope + t * rope_stride, rope_size * sizeof(T));
    g.bias[g.count++] = mask.bias(t);
  }
  return g;
}

}  // namespace
}  // namespace porter

// shape: B, H, S, N (nope), R (rope), T, C (latent), V, K (selected). strides in elements: query_nope (b, h, s),
// query_rope (b, h, s), latent (b, t), key_rope (b, t), mask (b, s, t), which all heads share; mask null: causal, aligned
// to the end. indices int32 [B, S, K], weight [H * (N + V), C] and out [B, S, H, V] are contiguous.
PORTER_EXPORT void porter_sparse_mla(void* out, const void* query_nope, const void* query_rope, const void* latent,
                                     const void* key_rope, const void* weight, const int32_t* indices, const void* mask,
                                     const int64_t* shape, const int64_t* strides, double scaling, int32_t dtype,
                                     int32_t mask_dtype, int32_t threads) {
  using namespace porter;
  int64_t batch = shape[0], heads = shape[1], length = shape[2], nope = shape[3], rope = shape[4], keys = shape[5];
  int64_t size = shape[6], value_size = shape[7], selected = shape[8], room = padded(size);
  // Queries whose folded form is held at once: the weight is read once for them all.
  int64_t block = divide_up(2048, heads);
  dispatch(dtype, [&](auto tag) {
    using T = decltype(tag);
    static thread_local Scratch folded_memory, gathered_memory;
    float* folded = folded_memory.get<float>(block * heads * room);
    float* gathered = gathered_memory.get<float>(block * heads * room);
    for (int64_t item = 0; item < batch * divide_up(length, block); ++item) {
      int64_t b = item / divide_up(length, block), s0 = item % divide_up(length, block) * block;
      int64_t count = smaller(block, length - s0);
      Latent a{1, heads, count, nope, rope, keys, size, value_size};
      const T* queries = static_cast<const T*>(query_nope) + b * strides[0] + s0 * strides[2];
      absorb_queries(folded, queries, strides, static_cast<const T*>(weight), a, threads);
      std::memset(gathered, 0, count * heads * room * sizeof(float));
      int inner = count >= threads ? 1 : threads;
#pragma omp parallel for num_threads(threads) if (inner == 1 && threads > 1) schedule(dynamic)
      for (int64_t i = 0; i < count; ++i) {
        static thread_local Scratch memory;
        int64_t s = s0 + i;
        MaskRow row{mask, mask_dtype, b * strides[10] + s * strides[11], strides[12], keys, keys - length + s + 1};
        auto g = gather(memory, indices + (b * length + s) * selected, row,
                        static_cast<const T*>(latent) + b * strides[6], strides[7], size,
                        static_cast<const T*>(key_rope) + b * strides[8], strides[9], rope, selected);
        AttentionShape attention{1, heads, g.count, size, static_cast<float>(scaling), inner};
        auto keys_of = [&](int64_t) {
          return KeysAndValues<T>{2, {g.latent, g.rope}, {size, rope}, {size, rope}, g.latent, size, size};
        };
        auto query = [&](int64_t, int64_t h, float* target) {
          std::memcpy(target, folded + (i * heads + h) * room, room * sizeof(float));
          const T* source = static_cast<const T*>(query_rope) + b * strides[3] + h * strides[4] + s * strides[5];
          pack_row(target + room, source, rope);
        };
        auto visible = [&](int64_t, int64_t) {
          return Visible{0, g.count, row.additive() ? g.bias : nullptr, 1, kFloat32};
        };
        auto write = [&](int64_t, int64_t h, const float* result) {
          std::memcpy(gathered + (i * heads + h) * room, result, size * sizeof(float));
        };
        attend_all(attention, keys_of, query, visible, write);
      }
      T* target = static_cast<T*>(out) + (b * length + s0) * heads * value_size;
      apply_values(target, gathered, static_cast<const T*>(weight), a, threads);
    }
  });
}

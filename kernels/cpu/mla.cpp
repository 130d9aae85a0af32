// Absorbed multi-head latent attention: W_UK is folded into the query, all heads attend over the shared latent, and
// W_UV is applied to what they gathered. Reads the latent once per block of rows; never expands keys or values.
#include "absorb.h"
#include "attend.h"
#include "kernels.h"

// shape: B, H, S, N (nope), R (rope), T, C (latent), V. strides in elements: query_nope (b, h, s), query_rope (b, h, s),
// latent (b, t), key_rope (b, t), mask (b, h, s, t). weight [H * (N + V), C] and out [B, S, H, V] are contiguous.
PORTER_EXPORT void porter_mla(void* out, const void* query_nope, const void* query_rope, const void* latent,
                              const void* key_rope, const void* weight, const void* mask, const int64_t* shape,
                              const int64_t* strides, double scaling, int32_t dtype, int32_t mask_dtype,
                              int32_t threads) {
  using namespace porter;
  Latent a{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], shape[7]};
  static thread_local Scratch folded_memory, gathered_memory;
  int64_t room = padded(a.latent), rows = a.batch * a.length * a.heads;
  float* folded = folded_memory.get<float>(rows * room);
  float* gathered = gathered_memory.get<float>(rows * room);
  std::memset(gathered, 0, rows * room * sizeof(float));
  int64_t mask_size = mask_dtype == kFloat32 ? 4 : mask_dtype == kBool ? 1 : 2;
  dispatch(dtype, [&](auto tag) {
    using T = decltype(tag);
    absorb_queries(folded, static_cast<const T*>(query_nope), strides, static_cast<const T*>(weight), a, threads);
    AttentionShape attention{a.batch, a.length * a.heads, a.keys, a.latent, static_cast<float>(scaling), threads};
    auto keys = [&](int64_t b) {
      const T* c = static_cast<const T*>(latent) + b * strides[6];
      return KeysAndValues<T>{2,        {c, static_cast<const T*>(key_rope) + b * strides[8]},
                              {strides[7], strides[9]}, {a.latent, a.rope}, c, strides[7], a.latent};
    };
    auto query = [&](int64_t b, int64_t row, float* target) {
      std::memcpy(target, folded + (b * a.length * a.heads + row) * room, room * sizeof(float));
      const T* source = static_cast<const T*>(query_rope) + b * strides[3];
      pack_row(target + room, source + row % a.heads * strides[4] + row / a.heads * strides[5], a.rope);
    };
    auto visible = [&](int64_t b, int64_t row) {
      int64_t h = row % a.heads, s = row / a.heads, high = a.keys - a.length + s + 1;
      if (mask == nullptr) return Visible{0, high > 0 ? high : 0, nullptr, 0, 0};
      int64_t offset = b * strides[10] + h * strides[11] + s * strides[12];
      return Visible{0, a.keys, static_cast<const char*>(mask) + offset * mask_size, strides[13], mask_dtype};
    };
    auto write = [&](int64_t b, int64_t row, const float* result) {
      std::memcpy(gathered + (b * a.length * a.heads + row) * room, result, a.latent * sizeof(float));
    };
    attend_all(attention, keys, query, visible, write);
    apply_values(static_cast<T*>(out), gathered, static_cast<const T*>(weight), a, threads);
  });
}

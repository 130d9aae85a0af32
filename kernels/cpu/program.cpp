// A recorded sequence of kernel calls, run without returning to the caller in between: what a decode step costs beside
// its kernels is then a few function calls. Two kernels that only such a sequence needs are here as well.
#include <type_traits>
#include <utility>

#include "kernels.h"

namespace porter {
namespace {

template <typename A>
A slot_as(int64_t slot) {
  if constexpr (std::is_pointer_v<A>) {
    return reinterpret_cast<A>(slot);
  } else if constexpr (std::is_floating_point_v<A>) {
    double value;
    std::memcpy(&value, &slot, 8);
    return static_cast<A>(value);
  } else {
    return static_cast<A>(slot);
  }
}

template <typename... A, size_t... I>
void call(void (*kernel)(A...), const int64_t* slots, std::index_sequence<I...>) {
  kernel(slot_as<A>(slots[I])...);
}

template <typename... A>
void call(void (*kernel)(A...), const int64_t* slots) {
  call(kernel, slots, std::index_sequence_for<A...>{});
}

constexpr int64_t kSlots = 16;

}  // namespace
}  // namespace porter

// out = a + b, `size` values each.
PORTER_EXPORT void porter_add(void* out, const void* a, const void* b, int64_t size, int32_t dtype) {
  using namespace porter;
  dispatch(dtype, [&](auto tag) {
    using T = decltype(tag);
    for_each_vector(size, [&](int64_t i, int n) {
      Vec sum = load_count(static_cast<const T*>(a) + i, n) + load_count(static_cast<const T*>(b) + i, n);
      store_count(static_cast<T*>(out) + i, sum, n);
    });
  });
}

// shape: B, H, S, bytes of a row; then bytes between rows of out (b, h, s) and of x (b, h, s).
PORTER_EXPORT void porter_copy(void* out, const void* x, const int64_t* shape) {
  const int64_t *to = shape + 4, *from = shape + 7;
  for (int64_t b = 0; b < shape[0]; ++b)
    for (int64_t h = 0; h < shape[1]; ++h)
      for (int64_t s = 0; s < shape[2]; ++s)
        std::memcpy(static_cast<char*>(out) + b * to[0] + h * to[1] + s * to[2],
                    static_cast<const char*>(x) + b * from[0] + h * from[1] + s * from[2], shape[3]);
}

// program: `commands` rows of 16 slots: the code of a kernel (its place in library.py's RECORDED), then its arguments.
PORTER_EXPORT void porter_run(const int64_t* program, int64_t commands) {
  using namespace porter;
  for (int64_t i = 0; i < commands; ++i) {
    const int64_t* slots = program + i * kSlots + 1;
    switch (slots[-1]) {
      case 0: call(porter_rms_norm, slots); break;
      case 1: call(porter_swiglu, slots); break;
      case 2: call(porter_rope, slots); break;
      case 3: call(porter_linear, slots); break;
      case 4: call(porter_linear_w8a8, slots); break;
      case 5: call(porter_attention, slots); break;
      case 6: call(porter_mla, slots); break;
      case 7: call(porter_experts, slots); break;
      case 8: call(porter_add, slots); break;
      case 9: call(porter_copy, slots); break;
      case 10: call(porter_router, slots); break;
      case 11: call(porter_sigmoid_gate, slots); break;
      default: std::abort();
    }
  }
}
